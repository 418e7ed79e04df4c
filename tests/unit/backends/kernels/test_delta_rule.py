"""What the delta rule's kernels on CUDA are tested by, in float64. `tests/gpu/test_kernels.py` tests them."""

import math
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from tests.delta_rule import of_queries_and_keys
from tinker_server.backends.kernels import delta_rule
from tinker_server.backends.kernels.delta_rule import CHUNK, chunk_indices

HEADS, KEY, VALUE = 2, 5, 3


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("lengths", [[1], [70], [130, 1, 64, 70], [1] * 9, [64, 64, 63]], ids=str)
@pytest.mark.parametrize("empty", [0, 3])
def test_every_token_is_in_one_chunk_of_its_own_sample(lengths: list[int], empty: int) -> None:
    """Samples without tokens, as a graph has them, and chunks that are left over hold none."""
    ends = [0, *accumulate(lengths)]
    bounds, indices = chunk_indices(torch.tensor(ends + [ends[-1]] * empty, dtype=torch.int32), ends[-1])
    found = []
    for sample, number in indices.tolist():
        begin, end = bounds[sample].item() + number * CHUNK, bounds[sample + 1].item()
        found += [(sample, token) for token in range(begin, min(begin + CHUNK, end))]
    assert found == [(sample, token) for sample, (a, b) in enumerate(pairwise(ends)) for token in range(a, b)]


def test_the_recurrence_that_kernels_are_tested_by_has_autograds_gradients() -> None:
    torch.manual_seed(0)
    inputs = [random(13, HEADS, size) for size in (KEY, KEY, VALUE)] + [-random(13, HEADS).abs(), random(13, HEADS)]
    query, key, value, decay, beta = given = [one.requires_grad_() for one in inputs]
    state, outputs, grad_THV = torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64), [], random(13, HEADS, VALUE)
    for q, k, v, kept, rate in zip(query, key, value, decay.exp(), beta, strict=True):
        state = state * kept[:, None, None]
        missing = (v - torch.einsum("hk,hkv->hv", k, state)) * rate[:, None]
        state = state + torch.einsum("hk,hv->hkv", k, missing)
        outputs.append(torch.einsum("hk,hkv->hv", q * KEY**-0.5, state))
    out = torch.stack(outputs)
    wanted = [out, *torch.autograd.grad(out, given, grad_THV)]
    with torch.no_grad():
        found = delta_rule._by_recurrence(given, grad_THV)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


def test_gradients_within_chunks_are_those_of_autograd() -> None:
    """Of samples that end within a chunk, with it, and have one token; states of chunks without tokens are not read."""
    torch.manual_seed(0)
    ends = [0, *accumulate([130, 1, 64, 70])]
    num_tokens, scale = ends[-1], KEY**-0.5
    query, key, system = (random(num_tokens, HEADS, KEY) * 0.3 for _ in range(3))
    decay, grad_THV = -torch.rand(num_tokens, HEADS, dtype=torch.float64), random(num_tokens, HEADS, VALUE)
    chunks = [(c, min(c + CHUNK, b)) for a, b in pairwise(ends) for c in range(a, b, CHUNK)]
    passed = torch.cat([decay[begin:end].cumsum(0) for begin, end in chunks])
    inputs = [one.requires_grad_() for one in (query, key, system, passed)]
    values, outputs, news, befores = random(num_tokens, HEADS, VALUE), [], [], []
    afters: list[Tensor] = []
    for begin, end in chunks:
        q, k, w, u = (one[begin:end].transpose(0, 1) for one in (query, key, system, values))
        g = passed[begin:end].T
        state = afters[-1] if begin not in ends else torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64)
        befores.append(state)
        news.append(u - w @ state)
        news[-1].requires_grad_().retain_grad()
        seen = torch.ones(end - begin, end - begin).tril().bool()
        scores = (q @ k.mT) * (g[:, :, None] - g[:, None]).masked_fill(~seen, -torch.inf).exp() * scale
        outputs.append(((q * g.exp()[..., None]) @ state * scale + scores @ news[-1]).transpose(0, 1))
        after = state * g[:, -1].exp()[:, None, None] + (k * (g[:, -1:] - g).exp()[..., None]).mT @ news[-1]
        after.retain_grad()
        afters.append(after)
    (torch.cat(outputs) * grad_THV).sum().backward()
    bounds, indices = chunk_indices(torch.tensor(ends, dtype=torch.int32), num_tokens)
    states, of_states = torch.full((2, len(indices), HEADS, KEY, VALUE), torch.nan, dtype=torch.float64)
    for at, (before, after) in enumerate(zip(befores, afters, strict=True)):
        states[at], of_states[at] = before.detach(), 0 if after.grad is None else after.grad
    new, of_new = (
        torch.cat([one.transpose(0, 1) for one in tensors])
        for tensors in ([one.detach() for one in news], [one.grad for one in news if one.grad is not None])
    )
    of_tokens = [query.detach(), key.detach(), new, passed.detach() / math.log(2), grad_THV, of_new]
    found = of_queries_and_keys((*of_tokens, states, of_states), bounds, indices)
    for one, other in zip(found, inputs, strict=True):
        assert other.grad is not None
        assert (one - other.grad).norm() < 1e-6 * other.grad.norm()
