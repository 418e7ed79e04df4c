"""Where in its run's training weights were saved."""

from collections.abc import Awaitable, Callable

from tinker_server.backends.lru import LRU
from tinker_server.observability.recent_samples import Drawn
from tinker_server.operations.recording import is_optim_step
from tinker_server.store.checkpoints import CheckpointStore, parse_path
from tinker_server.store.records import Step

REMEMBERED = 10_000
LastBefore = Callable[[str, int], Awaitable[Step | None]]
"""Returns the last recorded operation of a run before a number."""


class WeightSteps:
    """The steps before weights were saved, by weights. Remembered, as named weights may be saved again."""

    def __init__(self, checkpoints: CheckpointStore, last_before: LastBefore) -> None:
        self._checkpoints = checkpoints
        self._last_before = last_before
        self._known: LRU[Drawn, int] = LRU(REMEMBERED)

    async def step_of(self, of: Drawn) -> int | None:
        """Return the steps of the run before the weights were saved; None if they were saved again since."""
        if (known := self._known.get(of)) is not None:
            return known
        number = (of.directory or "").rpartition("/")[2].partition("~")[0]
        seq_id = int(number) if number.isdecimal() else None
        if of.model_path is not None:  # its directory begins with the name
            checkpoint = await self._checkpoints.find(parse_path(of.model_path))
            is_same = checkpoint is not None and checkpoint.directory == of.directory
            seq_id = checkpoint.saved_as if checkpoint is not None and is_same else None
        if seq_id is None:
            return None
        last = await self._last_before(of.run_id, seq_id)
        step = 0 if last is None else last.step + is_optim_step(last)
        self._known.put(of, step)
        return step
