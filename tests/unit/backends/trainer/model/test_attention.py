"""Our attention's windows, and the architectures that it refuses by name: for features that it would ignore, and for
arguments that it lacks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Linear
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from tests.attention import PlainKernel
from tests.models import EXPERTS, make_tiny_deepseek_v3, make_tiny_of
from tests.trainers import trainer
from tinker_server.backends.kernels import varlen_attention
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.trainer.model import attention
from tinker_server.backends.trainer.model.attention import PACKED, PER_SAMPLE, _packed_attention, _window

LENGTHS = attention.varlen_arguments(*(torch.tensor([0, 3], dtype=torch.int32),) * 2, 3)


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
    monkeypatch.setattr("tinker_server.backends.trainer.model.attention.implementation", lambda *_, **__: found)
    with pytest.raises(
        BackendFailed, match=rf"^{architecture} is not supported: .* does not get the lengths of packed samples"
    ):
        trainer(source)


WINDOW = 8
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen2": {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
    # Its attention does not get the window: that is in the mask alone.
    "qwen2_moe": {
        **EXPERTS,
        "shared_expert_intermediate_size": 32,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3},  # with sinks
}


def test_a_layer_that_caps_its_scores_or_trains_its_sinks_is_refused_on_cuda() -> None:
    query, sinks_H = torch.zeros(1, 1, 3, 4), torch.zeros(1, requires_grad=True)
    with pytest.raises(BackendFailed, match="softcap in Linear is not supported in bfloat16 on CUDA; float32 is"):
        _packed_attention(Linear(1, 1), query, query, query, None, **LENGTHS, softcap=50.0)
    with pytest.raises(BackendFailed, match="the sinks of Linear are not trained in bfloat16 on CUDA"):
        _packed_attention(Linear(1, 1), query, query, query, None, **LENGTHS, s_aux=sinks_H)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("kind", WINDOWED)
def test_windows_of_packed_samples_are_transformers_own(
    kind: str, compiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator of CUDA, on a plain kernel. In the order of the samples a window would reach into the one before."""
    monkeypatch.setattr(varlen_attention, "_flash", PlainKernel())
    source = make_tiny_of(kind, tmp_path / "model", sliding_window=WINDOW, **WINDOWED[kind])
    everywhere = make_tiny_of(kind, tmp_path / "everywhere", **{**WINDOWED[kind], "sliding_window": 4096})
    packed = AutoModelForCausalLM.from_pretrained(source, attn_implementation=registered(PACKED))
    packed.eval().requires_grad_(False)  # sinks must be
    if compiles:
        for layer in packed.model.layers:
            layer.self_attn.compile(dynamic=True, backend="aot_eager")
    alone, without = (AutoModelForCausalLM.from_pretrained(one).eval() for one in (source, everywhere))
    generator = torch.Generator().manual_seed(1)
    for lengths in ([23, 1, 30], [WINDOW - 1, WINDOW, WINDOW + 1], [2, 3]):
        ids = torch.randint(0, 300, (1, sum(lengths)), generator=generator)
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        extra = attention.varlen_arguments(bounds, bounds, max(lengths))
        with torch.no_grad():
            got = packed(input_ids=ids, position_ids=positions, use_cache=False, **extra).logits
            wanted, other = (
                torch.cat([one(input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)], 1)
                for one in (alone, without)
            )
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
        if max(lengths) > 2 * WINDOW:
            assert (got - other).abs().max() > 0.01


@pytest.mark.parametrize("compiles", [False, True])
def test_values_narrower_than_keys_are_attended_to_as_by_transformers(
    compiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator of CUDA, on a plain kernel that, as CUDA's, has one width."""
    kernel = PlainKernel()
    monkeypatch.setattr(varlen_attention, "_flash", kernel)
    source = make_tiny_deepseek_v3(tmp_path / "model")
    packed = AutoModelForCausalLM.from_pretrained(source, attn_implementation=registered(PACKED)).eval()
    alone = AutoModelForCausalLM.from_pretrained(source).eval()
    if compiles:
        for layer in packed.model.layers:
            layer.self_attn.compile(dynamic=True, backend="aot_eager")
    lengths = [23, 1, 30]
    ids = torch.randint(0, 300, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    extra = attention.varlen_arguments(bounds, bounds, max(lengths))
    got = packed(input_ids=ids, position_ids=positions, use_cache=False, **extra).logits
    wanted = torch.cat([alone(input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    for logits in (got, wanted):
        logits.log_softmax(-1)[0, range(sum(lengths)), ids[0]].sum().backward()
    expected = dict(alone.named_parameters())
    for name, parameter in packed.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-4)
    assert kernel.widths == [{64}] * len(kernel.widths) != []


def windowed(architecture: str, **changes: object) -> PretrainedConfig:
    return AutoConfig.for_model("mistral", sliding_window=WINDOW, architectures=[architecture], **changes)


def test_masks_that_are_no_windows_are_refused() -> None:
    assert _window(config=windowed("M"), local_size=WINDOW) == WINDOW
    assert _window(config=windowed("M"), local_size=0) is _window(config=windowed("M")) is None
    refusal = "M is not supported in bfloat16 on CUDA: tokens attend to others than those before them"
    for changes, arguments in (
        ({}, {"local_size": WINDOW + 1}),  # chunks
        ({}, {"use_vmap": True}),
        ({"is_causal": False}, {"local_size": WINDOW}),
        ({"use_bidirectional_attention": True}, {}),
    ):
        with pytest.raises(BackendFailed, match=refusal):
            _window(config=windowed("M", **changes), **arguments)


def test_a_layer_whose_own_window_is_not_its_masks_is_refused() -> None:
    query = torch.zeros(1, 1, 3, 4)
    for mask in (None, WINDOW + 1):
        with pytest.raises(BackendFailed, match=rf"it has a window of {WINDOW} tokens, and its mask one of {mask}"):
            _packed_attention(Linear(1, 1), query, query, query, mask, **LENGTHS, sliding_window=WINDOW)
