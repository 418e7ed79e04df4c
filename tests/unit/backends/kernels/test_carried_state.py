"""States of tries of segments: a segment begins where the segment before it ends, and gradients are added."""

import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tries import STATES, paths_of
from tinker_server.backends.kernels import carried_state
from tinker_server.backends.kernels.carried_state import MOST_BEFORE, Carried
from tinker_server.backends.kernels.delta_rule_tries import run, run_backward

TRIES = [*STATES, ([9, *[2] * 70, 3, 3, 5], [-1, *[0] * 70, 1, 1, -1])]
"""The last has more segments than a call."""


def tables_of(lengths: list[int], parents: list[int]) -> tuple[Carried, Tensor]:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return carried_state.tables(bounds.tolist(), parents), bounds


def sum_tokens(
    inputs: list[Tensor], cu: Tensor, begins: Tensor | None, keeps: bool
) -> tuple[tuple[Tensor], Tensor | None]:
    """The sum of the tokens so far is state and output."""
    states = torch.zeros(len(cu), 2, dtype=torch.float64) if begins is None else begins.clone()
    outputs = []
    for segment, (begin, end) in enumerate(pairwise(cu.tolist())):
        outputs.append(states[segment] + inputs[0][begin:end].cumsum(0))
        states[segment] = outputs[-1][-1]
    return (torch.cat(outputs),), states if keeps else None


def sum_tokens_backward(
    saved: list[Tensor], cu: Tensor, begins: Tensor | None, of_last: Tensor | None
) -> tuple[tuple[Tensor], Tensor | None]:
    of_states = torch.zeros(len(cu), 2, dtype=torch.float64) if of_last is None else of_last.clone()
    found = []
    for segment, (begin, end) in enumerate(pairwise(cu.tolist())):
        found.append(saved[0][begin:end].flip(0).cumsum(0).flip(0) + of_states[segment])
        of_states[segment] = found[-1][0]
    return (torch.cat(found),), None if begins is None else of_states


@pytest.mark.parametrize(("lengths", "parents"), TRIES, ids=str)
def test_states_and_their_gradients_pass_from_segment_to_segment(lengths: list[int], parents: list[int]) -> None:
    (flat, _, parents_host), bounds = tables_of(lengths, parents)
    of = list(carried_state.calls(flat, bounds, parents_host))
    assert sorted(token for call in of for token in call.token_N.tolist()) == list(range(sum(lengths)))
    assert all(call.begins is None or len(call.cu_seqlens) <= 65 for call in of)
    made = torch.Generator().manual_seed(0)
    tokens, grad = (torch.randn(sum(lengths), 2, generator=made, dtype=torch.float64) for _ in range(2))
    kept = torch.zeros(carried_state.num_kept(parents_host) + 1, 2, dtype=torch.float64)
    (out,) = run([tokens], of, kept, sum_tokens)
    (of_tokens,) = run_backward([grad], of, kept, sum_tokens_backward)
    wanted, of_wanted = torch.empty_like(out), torch.zeros_like(out)
    for path, length in zip(paths_of(lengths, parents), lengths, strict=True):
        wanted[path[-length:]] = tokens[path].cumsum(0)[-length:]
        own = grad[path].clone()
        own[:-length] = 0
        of_wanted[path] += own.flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(of_tokens, of_wanted)
    assert kept[-1].abs().max() == 0


@pytest.mark.parametrize(("lengths", "parents"), TRIES, ids=str)
def test_a_convolution_reads_the_last_tokens_before_a_segment(lengths: list[int], parents: list[int]) -> None:
    (_, flat, _), bounds = tables_of(lengths, parents)
    found = {token: before for token, before in zip(*map(Tensor.tolist, carried_state.tails(flat)), strict=True)}
    for path, begin, length in zip(paths_of(lengths, parents), bounds.tolist(), lengths, strict=False):
        for place, token in enumerate(path):
            if token < begin or length == len(path):
                continue
            before = [path[place - back] if place >= back else -1 for back in range(1, MOST_BEFORE + 1)]
            of_others = [other if other < begin else -1 for other in before]
            assert found.pop(token, [-1] * MOST_BEFORE) == of_others
    assert not found


class Peak(TorchDispatchMode):
    """The most bytes of tensors of some dimensions at once that were made inside."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.most, self._held, self._dimensions = 0, 0, dimensions
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.ndim == self._dimensions:
            storage = found.untyped_storage()
            if storage not in self._known:
                self._known.add(storage)
                self._held += (size := storage.nbytes())
                weakref.finalize(storage, self._free, size)
                self.most = max(self.most, self._held)
        return found

    def _free(self, size: int) -> None:
        self._held -= size


@pytest.mark.parametrize(("lengths", "parents"), TRIES, ids=str)
def test_backward_has_at_most_as_many_states_as_are_counted(lengths: list[int], parents: list[int]) -> None:
    (flat, _, parents_host), bounds = tables_of(lengths, parents)
    of, shape = list(carried_state.calls(flat, bounds, parents_host)), (3, 4, 5)

    def last(inputs: Sequence[Tensor], cu: Tensor, begins: Tensor | None, keeps: bool) -> Any:
        return tuple(inputs), torch.ones(len(cu), *shape) if keeps else None

    def of_begins(saved: Sequence[Tensor], cu: Tensor, begins: Tensor | None, of_last: Tensor | None) -> Any:
        return tuple(saved), None if begins is None else torch.ones(len(cu), *shape)

    tokens = [torch.zeros(sum(lengths), 2)]
    with Peak(dimensions=4) as peak:
        kept = torch.zeros(carried_state.num_kept(parents_host) + 1, *shape)
        run(tokens, of, kept, last)
        run_backward(tokens, of, kept, of_begins)
    counted = carried_state.count_states(parents) * kept[0].nbytes
    assert counted / 3 < peak.most <= counted
