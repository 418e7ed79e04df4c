"""Packed linear attention equals the recurrence of each sample alone, in float64, gradients included."""

import functools
import importlib
import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.tries import STATES, paths_of
from tinker_server.backends.configure import examine
from tinker_server.backends.families import linear_attention as registered
from tinker_server.backends.kernels.carried_state import tables
from tinker_server.backends.trainer.model import sample_chunks
from tinker_server.backends.trainer.model.linear_attention import in_plain_torch, pack_linear_attention
from tinker_server.backends.trainer.model.sample_chunks import Chunks, make_chunks

CPU = torch.device("cpu")
HEADS, KEY, VALUE, CHANNELS, WIDTH = 2, 5, 3, 6, 4
MODULE = "transformers.models.qwen3_5.modeling_qwen3_5"
LENGTHS = [
    [1],
    [2],
    [64],
    [65, 63, 1],
    [1, 127, 128, 129, 1],
    [200, 1, 1, 1, 130],
    [3, 3, 3, 3],
    [1] * 40,
    [2, 70] * 3,
]


def layer() -> nn.Module:
    found = nn.Identity()
    found.__class__ = type("Qwen3_5GatedDeltaNet", (nn.Identity,), {"__module__": MODULE})
    return found


@pytest.fixture(scope="module")
def functions() -> tuple[object, object]:
    """The functions that a decoder of this kind calls: convolution and delta rule."""

    pack_linear_attention(nn.ModuleList([layer()]))
    found = importlib.import_module(MODULE)
    return found.causal_conv1d_fn, found.torch_chunk_gated_delta_rule


def test_the_models_own_forward_is_in_plain_torch_whatever_kernels_transformers_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = importlib.import_module(MODULE)
    given, plain = inputs(70), inspect.unwrap(module.torch_chunk_gated_delta_rule)
    wanted, _ = plain(*given, use_qk_l2norm_in_kernel=True)

    @functools.wraps(plain)
    def of_a_gpu(*_: object, **__: object) -> None:
        raise ValueError("cannot be accessed from Triton (cpu tensor?)")

    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", of_a_gpu)
    with in_plain_torch(nn.ModuleList([layer()])):
        found, _ = module.torch_chunk_gated_delta_rule(
            *given, use_qk_l2norm_in_kernel=True, **lengths_as(lengths_of([70]))
        )
    assert torch.equal(found, wanted)
    assert module.torch_chunk_gated_delta_rule is of_a_gpu


def lengths_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32)


def lengths_as(host: Tensor) -> dict[str, Tensor]:
    """What a layer gives its delta rule: on the CPU, device and host have one tensor."""
    return {"packed_cu_seqlens": host, "packed_cu_seqlens_host": host}


def inputs(num_tokens: int, seed: int = 0) -> list[Tensor]:
    """Query, key, value, g and beta as the layers give them, of [1, T, ...] in float64."""
    made = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(1, num_tokens, HEADS, KEY, generator=made, dtype=torch.float64) for _ in range(2))
    value = torch.randn(1, num_tokens, HEADS, VALUE, generator=made, dtype=torch.float64)
    g = -torch.rand(1, num_tokens, HEADS, generator=made, dtype=torch.float64)
    beta = torch.rand(1, num_tokens, HEADS, generator=made, dtype=torch.float64)
    return [one.requires_grad_() for one in (query, key, value, g, beta)]


def recurrence(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One sample, token by token: equation 10 of arXiv 2412.06464."""
    query, key = (one * torch.rsqrt((one * one).sum(-1, keepdim=True) + 1e-6) for one in (query[0], key[0]))
    state = torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64)
    outputs = []
    for q, k, v, decay, rate in zip(query, key, value[0], g[0].exp(), beta[0], strict=True):
        state = state * decay[:, None, None]
        known = torch.einsum("hk,hkv->hv", k, state)
        state = state + torch.einsum("hk,hv->hkv", k, (v - known) * rate[:, None])
        outputs.append(torch.einsum("hk,hkv->hv", q * KEY**-0.5, state))
    return torch.stack(outputs)[None]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_each_sample_has_a_state_of_its_own(functions, lengths: list[int]) -> None:
    _, rule = functions
    host, num_tokens = lengths_of(lengths), sum(lengths)
    given = inputs(num_tokens)
    alone = torch.cat(
        [recurrence(*(one[:, begin:end] for one in given)) for begin, end in pairwise(host)],
        dim=1,
    )
    packed, state = rule(*given[:3], g=given[3], beta=given[4], use_qk_l2norm_in_kernel=True, **lengths_as(host))
    assert state is None and packed.dtype == torch.float64
    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-11)
    weight = torch.randn(alone.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.autograd.grad((alone * weight).sum(), given)
    found = torch.autograd.grad((packed * weight).sum(), given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_convolution_reads_its_own_sample_alone(functions, lengths: list[int], activation: str | None) -> None:
    convolution, _ = functions
    host, made = lengths_of(lengths), torch.Generator().manual_seed(2)
    hidden = torch.randn(1, CHANNELS, sum(lengths), generator=made, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(CHANNELS, WIDTH, generator=made, dtype=torch.float64, requires_grad=True)
    alone = torch.cat(
        [
            F.conv1d(F.pad(hidden[..., begin:end], (WIDTH - 1, 0)), weight[:, None], groups=CHANNELS)
            for begin, end in pairwise(host)
        ],
        dim=-1,
    )
    alone = F.silu(alone) if activation else alone
    packed = convolution(hidden, weight, None, activation=activation, packed_cu_seqlens=host)
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=1e-12)
    given = torch.randn(alone.shape, generator=made, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad((packed * given).sum(), (hidden, weight)),
        torch.autograd.grad((alone * given).sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("lengths", "parents"), STATES, ids=str)
def test_a_segment_goes_on_where_the_segment_before_it_ends(functions, lengths: list[int], parents: list[int]) -> None:
    convolution, rule = functions
    host, given, paths = lengths_of(lengths), inputs(sum(lengths)), paths_of(lengths, parents)
    carried = tables(host.tolist(), parents)
    made = torch.Generator().manual_seed(2)
    hidden = torch.randn(1, CHANNELS, sum(lengths), generator=made, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(CHANNELS, WIDTH, generator=made, dtype=torch.float64, requires_grad=True)
    ends = [
        (
            recurrence(*(one[:, path] for one in given))[:, -length:],
            F.conv1d(F.pad(hidden[..., path], (WIDTH - 1, 0)), weight[:, None], groups=CHANNELS)[..., -length:],
        )
        for path, length in zip(paths, lengths, strict=True)
    ]
    alone = torch.cat([one for one, _ in ends], 1), torch.cat([one for _, one in ends], 2)
    shared = lengths_as(host) | {"packed_parents_host": carried.parents_host, "packed_calls": carried.calls}
    out, _ = rule(*given[:3], g=given[3], beta=given[4], use_qk_l2norm_in_kernel=True, **shared)
    found = out, convolution(hidden, weight, packed_cu_seqlens=host, packed_tails=carried.tails)
    trained = [*given, hidden, weight]
    gradients = []
    for outs in (found, alone):
        again = torch.Generator().manual_seed(3)
        sums = [(one * torch.randn(one.shape, generator=again, dtype=torch.float64)).sum() for one in outs]
        gradients.append(torch.autograd.grad(sums[0] + sums[1], trained))
    for one, other in zip((*found, *gradients[0]), (*alone, *gradients[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_sample_that_is_not_finite_leaves_others_as_they_are(functions, culprit: int) -> None:
    """Nothing of a sample is in another's output or gradient, not even times zero."""
    convolution, rule = functions
    host = lengths_of([70, 3, 65])
    begin, end = host[culprit], host[culprit + 1]
    given = inputs(138)
    hidden = torch.randn(1, CHANNELS, 138, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    hidden.requires_grad_()
    with torch.no_grad():
        given[2][:, begin:end] = torch.nan
        hidden[..., begin:end] = torch.inf
    out, _ = rule(*given[:3], g=given[3], beta=given[4], use_qk_l2norm_in_kernel=True, **lengths_as(host))
    convolved = convolution(hidden, torch.ones(CHANNELS, WIDTH).double(), packed_cu_seqlens=host)
    others = torch.ones(138, dtype=torch.bool)
    others[begin:end] = False
    assert out[0, others].isfinite().all() and convolved[..., others].isfinite().all()
    for gradient in torch.autograd.grad(out[:, others].sum(), given):
        assert gradient[0, others].isfinite().all()


def test_a_call_without_lengths_is_transformers_own(functions) -> None:
    _, rule = functions
    given = inputs(20)
    out, state = rule(*given[:3], g=given[3], beta=given[4], use_qk_l2norm_in_kernel=True, output_final_state=True)
    assert state is not None
    torch.testing.assert_close(out, recurrence(*given), rtol=1e-4, atol=1e-5)  # in float32


def test_every_layer_of_a_forward_has_the_same_chunks(functions, monkeypatch) -> None:
    _, rule = functions
    made = []

    def counted(cu_seqlens: np.ndarray, *others: Any) -> Chunks:
        made.append(cu_seqlens)
        return make_chunks(cu_seqlens, *others)

    monkeypatch.setattr(sample_chunks, "make_chunks", counted)
    host, given = lengths_of([5, 6]), inputs(11)
    for _ in range(3):
        rule(*given[:3], g=given[3], beta=given[4], use_qk_l2norm_in_kernel=True, **lengths_as(host))
    assert len(made) == 1


def test_two_microbatches_in_turn_have_their_own_chunks(functions) -> None:
    _, rule = functions
    given, both = inputs(11), (lengths_of([5, 6]), lengths_of([3, 8]))
    for host in (*both, *both):
        packed, _ = rule(*given[:3], g=given[3], beta=given[4], use_qk_l2norm_in_kernel=True, **lengths_as(host))
        alone = [recurrence(*(one[:, begin:end] for one in given)) for begin, end in pairwise(host)]
        torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("lengths", "size"),
    [([640], 64), ([64] * 9, 64), ([40] * 9, 16), ([1] * 9, 1), ([1000, 1, 1], 64), ([10], 4), ([3] * 5, 1)],
)
def test_short_samples_have_short_chunks(lengths: list[int], size: int) -> None:
    chunks = make_chunks(lengths_of(lengths).numpy(), CPU)
    assert chunks.token_RC.shape[1] == size
    assert chunks.token_RC.numel() <= 1.25 * sum(lengths)
    assert chunks.token_RC.flatten()[chunks.place_T].tolist() == list(range(sum(lengths)))


def test_all_families_with_linear_attention_are_registered() -> None:
    for patches in (registered.CONVOLUTIONS, registered.DELTA_RULES, registered.SCANS):
        assert {patch.state for patch in patches.values()} == {"as written"}
        assert all(patch in examine.PATCHES for patch in patches.values())
