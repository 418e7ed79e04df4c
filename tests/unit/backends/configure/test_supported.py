"""What a base cannot be served with is refused by name, before anything starts."""

import json
from pathlib import Path

import pytest

from tests.models import FAMILIES
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.describe import read_size
from tinker_server.backends.protocol import BackendFailed


@pytest.mark.parametrize(
    ("kind", "field"),
    [("Qwen3 MoE", "hidden_size"), ("Qwen3 MoE", "moe_intermediate_size"), ("Mixtral", "intermediate_size")],
)
def test_experts_whose_rows_torch_cannot_multiply_on_a_gpu_are_refused(kind: str, field: str, tmp_path: Path) -> None:
    source = FAMILIES[kind](tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, field: 100}))
    settings = BackendConfig(models={"odd": "a/b"})
    with pytest.raises(BackendFailed, match=rf"a/b: dtype bfloat16 .*: its {field} is 100, and .* a multiple of 8;"):
        read_size("odd", source, settings, "cuda")
    read_size("odd", source, settings, "cpu")
    read_size("odd", source, settings.model_copy(update={"dtype": "float32"}), "cuda")
