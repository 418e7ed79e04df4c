"""Name the cards with which models would fit, whatever this machine has: the smallest for each number of them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tinker_server.backends.config import BackendConfig, FittingCards
from tinker_server.backends.configure.gpus import CARDS_GIB, cards
from tinker_server.backends.configure.memory_plan import Machine
from tinker_server.backends.configure.model_size import ModelSize
from tinker_server.backends.configure.placement import CONTEXTS, make_plan
from tinker_server.backends.protocol import BackendFailed

_COUNTS = (1, 2, 4, 8)
_SHORT_CONTEXT = 16384
"""A second context, for which fewer or smaller cards may do."""


def fitting_cards(sizes: Sequence[ModelSize], config: BackendConfig, machine: Machine) -> list[FittingCards]:
    """Return the cards for the context that is asked for, at most the models' own; and for a shorter one if others do.

    `sizes` are those on CUDA. Empty if no card does.
    """
    own = max(size.longest_context for size in sizes)
    longest = min(own, config.max_context_length or CONTEXTS["cuda"][0])
    found = [
        FittingCards(context, tuple(_smallest(sizes, config, machine, context)))
        for context in sorted({longest, min(longest, _SHORT_CONTEXT)}, reverse=True)
    ]
    return [fit for fit in found if fit.cards and (fit is found[0] or fit.cards != found[0].cards)]


def _smallest(
    sizes: Sequence[ModelSize], config: BackendConfig, machine: Machine, context: int
) -> Iterator[tuple[int, str]]:
    """Yield a number of cards with the smallest that does, as long as more cards may be smaller cards."""
    at_context = config.model_copy(update={"max_context_length": context, "device": "cuda"})
    candidates = sorted(CARDS_GIB, key=CARDS_GIB.__getitem__)
    for count in _COUNTS:
        for number, name in enumerate(candidates):
            if _fits(sizes, at_context, machine, f"{name}:{count}"):
                yield count, name
                candidates = candidates[:number]
                break


def _fits(sizes: Sequence[ModelSize], config: BackendConfig, machine: Machine, text: str) -> bool:
    """Return whether the plan succeeds on these cards, as `H200:2`."""
    names, gpu_bytes = zip(*cards(text), strict=True)
    try:
        make_plan(sizes, config, replace(machine, gpu_names=names, gpu_bytes=gpu_bytes), "cuda")
    except BackendFailed:
        return False
    return True
