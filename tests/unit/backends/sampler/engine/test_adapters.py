"""Files of saved adapters, before an engine loads them.

pytest tests/unit/backends/sampler/engine/test_adapters.py
"""

from pathlib import Path

import pytest

from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.protocol import InvalidInput
from tinker_server.backends.sampler.engine.adapters import AdapterLoader


def test_a_whole_model_of_an_older_server_is_refused_by_name(tmp_path: Path, renderer: Renderer) -> None:
    (tmp_path / "whole").mkdir()
    for name in ("canary.json", "config.json", "model.safetensors"):
        (tmp_path / "whole" / name).touch()
    loader = AdapterLoader(None, renderer, "float32")  # type: ignore[arg-type]  # linking asks nothing of the engine
    with pytest.raises(InvalidInput, match="weights cannot be loaded: all weights of the model were trained"):
        loader.link(tmp_path / "whole", tmp_path / "linked")
