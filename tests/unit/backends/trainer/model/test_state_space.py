"""Packed Mamba2 equals the recurrence of each sample alone, in float64, gradients included."""

import importlib
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from tests.factories import datum, make_renderer, prompt, words
from tests.models import make_tiny_nemotron_h
from tests.trainers import LORA, logprobs, reference_logprobs, trainer
from tests.tries import STATES, paths_of
from tinker_server.backends.families.nemotron_h import unlimit_time_steps
from tinker_server.backends.trainer.model.attention import varlen_arguments
from tinker_server.backends.trainer.model.linear_attention import pack_linear_attention

HEADS, GROUPS, WIDTH, STATE = 4, 2, 3, 5
CHUNK = 64
LENGTHS = [
    [1],
    [2],
    [CHUNK - 1],
    [CHUNK],
    [CHUNK + 1],
    [CHUNK + 1, CHUNK - 1, 1, 2],
    [1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 1],
    [200, 1, 1, 1, 130],
    [3, 3, 3, 3],
    [1] * 40,
    [2, 70] * 3,
]
Scan = Callable[..., Tensor]


@pytest.fixture(scope="module")
def mixer() -> NemotronHMamba2Mixer:
    """A layer of Mamba2 in float64, with weights at random, as a trainer has it."""
    config = NemotronHConfig(
        hidden_size=8,
        layers_block_type=["linear_attention"],
        mamba_num_heads=HEADS,
        mamba_head_dim=WIDTH,
        n_groups=GROUPS,
        ssm_state_size=STATE,
        chunk_size=16,
    )
    made = NemotronHMamba2Mixer(config, 0).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.7, generator=generator)
    unlimit_time_steps(made)
    pack_linear_attention(made)
    return made


@pytest.fixture(scope="module")
def scan(mixer: NemotronHMamba2Mixer) -> Scan:
    """The function that layers call."""
    found: Scan = importlib.import_module(type(mixer).__module__).mamba2_chunk_scan
    return found


def lengths_of(lengths: list[int]) -> Tensor:
    return torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32)


def inputs(num_tokens: int, seed: int = 0) -> list[Tensor]:
    """Hidden states, steps, A, B, C, D and the steps' bias, as layers give them, in float64."""
    made = torch.Generator().manual_seed(seed)
    shapes = [(HEADS, WIDTH), (HEADS,), (GROUPS, STATE), (GROUPS, STATE)]
    hidden, dt, b, c = (torch.randn(1, num_tokens, *one, generator=made, dtype=torch.float64) for one in shapes)
    a, d, bias = (torch.randn(HEADS, generator=made, dtype=torch.float64) for _ in range(3))
    return [one.requires_grad_() for one in (hidden, dt, -a.exp(), b, c, d, bias)]


def recurrence(hidden: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, bias: Tensor) -> Tensor:
    """One sample, token by token: equation 1 of arXiv 2405.21060, with steps as in its section 7.1."""
    state = torch.zeros(HEADS, WIDTH, STATE, dtype=torch.float64)
    steps = F.softplus(dt + bias)
    outputs = []
    for x, step, write, read in zip(hidden[0], steps[0], b[0], c[0], strict=True):
        write, read = (one.repeat_interleave(HEADS // GROUPS, 0) for one in (write, read))
        state = state * (step * a).exp()[:, None, None] + torch.einsum("hp,hn->hpn", x * step[:, None], write)
        outputs.append(torch.einsum("hpn,hn->hp", state, read) + d[:, None] * x)
    return torch.stack(outputs)[None]


def packed(scan: Scan, given: list[Tensor], host: Tensor, parents: Tensor | None = None) -> Tensor:
    hidden, dt, a, b, c, d, bias = given
    return scan(
        hidden, dt, a, b, c, D=d, dt_bias=bias, chunk_size=16, dt_softplus=True, dt_limit=(0.0, torch.inf),
        packed_cu_seqlens_host=host, packed_parents_host=parents,
    )  # fmt: skip


def one_by_one(given: list[Tensor], host: Tensor) -> Tensor:
    hidden, dt, a, b, c, d, bias = given
    return torch.cat(
        [
            recurrence(hidden[:, begin:end], dt[:, begin:end], a, b[:, begin:end], c[:, begin:end], d, bias)
            for begin, end in pairwise(host)
        ],
        dim=1,
    )


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_each_sample_has_a_state_of_its_own(scan: Scan, lengths: list[int]) -> None:
    host, given = lengths_of(lengths), inputs(sum(lengths))
    alone, found = one_by_one(given, host), packed(scan, given, host)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-11)
    weight = torch.randn(alone.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = torch.autograd.grad((alone * weight).sum(), given)
    for one, other in zip(torch.autograd.grad((found * weight).sum(), given), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("lengths", "parents"), STATES, ids=str)
def test_a_segment_begins_with_the_last_state_of_the_segment_before_it(
    scan: Scan, lengths: list[int], parents: list[int]
) -> None:
    host, given = lengths_of(lengths), inputs(sum(lengths))
    hidden, dt, a, b, c, d, bias = given
    ends = [
        recurrence(hidden[:, path], dt[:, path], a, b[:, path], c[:, path], d, bias)[:, -length:]
        for path, length in zip(paths_of(lengths, parents), lengths, strict=True)
    ]
    alone, found = torch.cat(ends, 1), packed(scan, given, host, torch.tensor(parents))
    torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-11)
    weight = torch.randn(alone.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = torch.autograd.grad((alone * weight).sum(), given)
    for one, other in zip(torch.autograd.grad((found * weight).sum(), given), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("lengths", [[1, 2, 1], [CHUNK - 1, CHUNK, CHUNK + 1], [5, 130, 1]], ids=str)
def test_a_layer_computes_packed_samples_as_transformers_each_alone(
    mixer: NemotronHMamba2Mixer, lengths: list[int]
) -> None:
    """Convolution, scan, gate and projections; transformers computes the scan in float32."""
    host, made = lengths_of(lengths), torch.Generator().manual_seed(2)
    hidden = torch.randn(1, sum(lengths), 8, generator=made, dtype=torch.float64, requires_grad=True)
    alone = torch.cat([mixer(hidden[:, begin:end]) for begin, end in pairwise(host)], dim=1)
    found = mixer(hidden, **varlen_arguments(host, host, max(lengths)))
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)
    weight = torch.randn(alone.shape, generator=made, dtype=torch.float64)
    trained = [hidden, mixer.in_proj.weight, mixer.out_proj.weight]
    wanted = torch.autograd.grad((alone * weight).sum(), trained)
    for one, other in zip(torch.autograd.grad((found * weight).sum(), trained), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_sample_that_is_not_finite_leaves_others_as_they_are(scan: Scan, culprit: int) -> None:
    host = lengths_of([70, 3, 65])
    begin, end = host[culprit], host[culprit + 1]
    given = inputs(138)
    with torch.no_grad():
        given[0][:, begin:end] = torch.nan
        given[3][:, begin:end] = torch.inf
    out = packed(scan, given, host)
    others = torch.ones(138, dtype=torch.bool)
    others[begin:end] = False
    assert out[0, others].isfinite().all() and not out[0, begin:end].isfinite().any()
    for gradient in torch.autograd.grad(out[:, others].sum(), [given[index] for index in (0, 1, 3, 4)]):
        assert gradient[0, others].isfinite().all()


def test_small_decays_behind_a_large_one_are_not_lost_in_float32(scan: Scan) -> None:
    """A token that forgets all before it, then tokens that forget next to nothing."""
    given = inputs(CHUNK)
    with torch.no_grad():
        given[1].fill_(-6.0)
        given[1][:, 3] = 2e4
        given[6].zero_()
    host = lengths_of([CHUNK])
    single = [one.detach().float() for one in given]
    torch.testing.assert_close(packed(scan, single, host)[:, 4:].double(), one_by_one(given, host)[:, 4:],
                               rtol=1e-4, atol=1e-4)  # fmt: skip


def test_a_call_without_lengths_is_transformers_own(scan: Scan) -> None:
    hidden, dt, a, b, c, d, bias = given = inputs(20)
    out, state = scan(
        hidden, dt, a, b, c, D=d, dt_bias=bias, chunk_size=16, dt_softplus=True, return_final_states=True
    )  # fmt: skip
    assert state.shape == (1, HEADS, WIDTH, STATE)
    torch.testing.assert_close(out.double(), recurrence(*given), rtol=1e-4, atol=1e-4)


def test_time_steps_are_as_short_as_the_engines(tmp_path: Path) -> None:
    """transformers makes those longer that are below the config's `time_step_min`; vLLM and NVIDIA's code do not."""
    source = make_tiny_nemotron_h(tmp_path / "model", moe=False)
    config = json.loads((source / "config.json").read_text())
    text, renderer = prompt(words(23, 1)), make_renderer(source)
    scores = {}
    for shortest in (1e-9, 0.5):
        (source / "config.json").write_text(json.dumps(config | {"time_step_min": shortest}))
        rank, model = trainer(source), AutoModelForCausalLM.from_pretrained(source).eval()
        rank.create_model("m", LORA)
        item = datum(text, renderer)
        with torch.no_grad():
            scores[shortest] = logprobs(rank, [item])[0], reference_logprobs(renderer, item, model)[:, 0].numpy()
    np.testing.assert_allclose(scores[0.5][0], scores[1e-9][1], atol=1e-4)
    assert np.abs(scores[0.5][1] - scores[1e-9][1]).max() > 0.05, "the limit would be felt"
