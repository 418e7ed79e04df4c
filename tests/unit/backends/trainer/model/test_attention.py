"""Our attention refuses architectures by name: for features that it would ignore, and for arguments that it lacks."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from backends.protocol import BackendFailed
from backends.trainer.model import attention
from backends.trainer.model.attention import PACKED, PER_SAMPLE
from tests.models import make_tiny_of
from tests.trainers import trainer


def registered(name: str) -> str:
    """CUDA's implementation has its name on the CPU too: it refuses before it computes."""
    attention.implementation(torch.device("cpu"), torch.float32)
    attention.implementation(torch.device("cuda"), torch.bfloat16)
    return name


@pytest.mark.parametrize(
    ("kind", "architecture"), [("stablelm", "StableLmForCausalLM"), ("nemotron", "NemotronForCausalLM")]
)
@pytest.mark.parametrize("name", [PER_SAMPLE, PACKED])
def test_a_model_whose_attention_does_not_get_packed_lengths_is_refused(
    kind: str, architecture: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tiny_of(kind, tmp_path / "model")
    found = registered(name)
    monkeypatch.setattr("backends.trainer.model.attention.implementation", lambda *_: found)
    with pytest.raises(
        BackendFailed, match=rf"^{architecture} is not supported: .* does not get the lengths of packed samples"
    ):
        trainer(source)


@pytest.mark.parametrize("is_windowed", [True, False])
def test_a_window_that_is_in_the_mask_alone_is_refused_without_a_mask(is_windowed: bool) -> None:
    """Qwen2-MoE's attention does not get it."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    small = {"vocab_size": 64, "num_experts": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    config = AutoConfig.for_model("qwen2_moe", **sizes, **small, use_sliding_window=is_windowed)
    config.architectures = ["Qwen2MoeForCausalLM"]
    model = AutoModelForCausalLM.from_config(config, attn_implementation=registered(PACKED))
    # Without a window the next refusal comes: there are no cu_seqlens.
    refusal = (
        "windows in Qwen2MoeForCausalLM are not supported in bfloat16 on CUDA"
        if is_windowed
        else ".* does not get the lengths"
    )
    with pytest.raises(BackendFailed, match=refusal):
        model(input_ids=torch.zeros(1, 9, dtype=torch.int64), position_ids=torch.arange(9)[None], use_cache=False)
