"""Samples and datums in memory, for people to read: the latest samples, and a few items of a run's steps.

All are bounded together. Where room is needed, the owner with the most bytes gives way. `sample_files.py` keeps them on
disk.
"""

import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any

from tinker_server.api_schemas.sampling import SampleRequest, SampleResponse
from tinker_server.observability.kept_datums import KeptBatch
from tinker_server.observability.recent_samples import CHAT_BYTES, Drawn, Shown, make_shown
from tinker_server.observability.thinned_steps import ThinnedSteps
from tinker_server.store.futures.observers import Work

MAX_BYTES = 64 << 20
"""Bytes of all owners' samples and datums."""
Item = Shown | KeptBatch
OnChange = Callable[[str], None]
"""Gets the owner whose items have changed."""
StepOf = Callable[[Drawn], Awaitable[int | None]]
"""Returns the steps of the run before weights were saved; None if that is not known."""


class _Owned:
    """The samples and datums of an owner."""

    def __init__(self) -> None:
        self.by_id: dict[str, Item] = {}
        self.newest: deque[Shown] = deque()
        """The latest, newest first."""
        self.of_runs: dict[tuple[str, type[Item]], ThinnedSteps[Hashable, Any]] = {}
        """Older samples, and datums, by run."""
        self.size_bytes = 0

    def add(self, item: Item, most_newest: int) -> None:
        """Add an item. A sample that is no longer among the latest stays as one of its run's, if it has a run."""
        self.by_id[item.sample_id] = item
        self.size_bytes += item.size_bytes
        if isinstance(item, KeptBatch):
            self._keep(item.run_id, item.step, item)
            return
        self.newest.appendleft(item)
        if len(self.newest) > most_newest:
            old = self.newest.pop()
            self._keep(old.of.run_id, old.of, old)

    def _keep(self, run_id: str, step: Hashable, item: Item) -> None:
        of_run = self.of_runs.setdefault((run_id, type(item)), ThinnedSteps()) if run_id else None
        self.remove([item] if of_run is None else of_run.add(step, item.at, item))

    def of_run(self, run_id: str, kind: type[Item]) -> list[Any]:
        """Return the items that are kept of a run, newest first."""
        return list(self.of_runs.get((run_id, kind), ()))[::-1]

    def shrink(self) -> None:
        """Remove a step's items from the run that has most of them, else the oldest of the latest samples."""
        if not self.of_runs:
            self.remove([self.newest.pop()])
            return
        most = max(self.of_runs, key=lambda name: len(self.of_runs[name]))
        self.remove(self.of_runs[most].thin())
        if not len(self.of_runs[most]):
            del self.of_runs[most]

    def remove(self, gone: Iterable[Item]) -> None:
        """Forget items that are in no list any more."""
        for item in gone:
            del self.by_id[item.sample_id]
            self.size_bytes -= item.size_bytes

    def drop_run(self, run_id: str) -> None:
        """Remove all items of a run."""
        gone = [shown for shown in self.newest if shown.of.run_id == run_id]
        gone += itertools.chain(*(self.of_runs.pop((run_id, kind), ()) for kind in (Shown, KeptBatch)))
        self.remove(gone)
        self.newest = deque(shown for shown in self.newest if shown.sample_id in self.by_id)


class Gallery:
    """Caches the latest `per_owner` samples of each owner, and some older of each run, fewer if they are large."""

    def __init__(
        self,
        per_owner: int,
        max_bytes: int = MAX_BYTES,
        on_change: OnChange = lambda owner: None,
        step_of: StepOf | None = None,
    ) -> None:
        """Cache nothing if `per_owner` is 0."""
        self.per_owner = per_owner
        self.chat_bytes = CHAT_BYTES if per_owner else 0
        """Value of `protocol.ChatTask.kept_bytes`."""
        self._max_bytes = max_bytes
        self._on_change = on_change
        self._step_of = step_of
        self._of: dict[str, _Owned] = {}

    async def on_success(self, work: Work[Any]) -> None:
        """Cache a sample that an operation has drawn."""
        if not isinstance(work.response, SampleResponse):
            return
        of = Drawn(work.base_model, work.model_path, work.directory)
        shown = make_shown(work.request, work.response, work.operation.owner, of) if self.per_owner else None
        if shown is not None:
            step = await self._step_of(of) if self._step_of is not None and of.run_id else None
            self.put(replace(shown, step=step))

    def note(self, request: SampleRequest, response: SampleResponse, owner: str, of: Drawn) -> None:
        """Cache a sample of these weights, whose step is not known yet."""
        if self.per_owner and (shown := make_shown(request, response, owner, of)) is not None:
            self.put(shown)

    def put(self, item: Item) -> None:
        """Cache an item, and notify of it."""
        self._add(item)
        self._on_change(item.owner)

    def _add(self, item: Item) -> None:
        self._of.setdefault(item.owner, _Owned()).add(item, self.per_owner)
        while sum(owned.size_bytes for owned in self._of.values()) > self._max_bytes:
            largest = max(self._of, key=lambda owner: self._of[owner].size_bytes)
            self._of[largest].shrink()
            if not self._of[largest].by_id:
                del self._of[largest]

    def of(self, owner: str) -> list[Shown]:
        """Return an owner's latest samples, newest first."""
        return list(self._of[owner].newest) if owner in self._of else []

    def of_run(self, owner: str, run_id: str) -> list[Shown]:
        """Return the samples of a run's weights, newest first: of the latest and of those that are kept by step."""
        if (owned := self._of.get(owner)) is None:
            return []
        return [shown for shown in owned.newest if shown.of.run_id == run_id] + owned.of_run(run_id, Shown)

    def batches_of_run(self, owner: str, run_id: str) -> list[KeptBatch]:
        """Return the batches of a run of which datums are kept, newest first."""
        return self._of[owner].of_run(run_id, KeptBatch) if owner in self._of else []

    def get(self, owner: str, sample_id: str) -> Shown | None:
        """Return a sample, or None if it was evicted or belongs to another owner."""
        found = self._of[owner].by_id.get(sample_id) if owner in self._of else None
        return found if isinstance(found, Shown) else None

    def all(self) -> list[Item]:
        """Return the items of all owners, newest first."""
        every = itertools.chain.from_iterable(owned.by_id.values() for owned in self._of.values())
        return sorted(every, key=lambda item: item.at, reverse=True)

    def restore(self, items: list[Item]) -> None:
        """Cache items of an earlier server, the newest first."""
        if self.per_owner:
            for item in reversed(items):
                self._add(item)

    def drop_run(self, owner: str, run_id: str) -> None:
        """Forget the samples and datums of a run that is deleted."""
        if owner in self._of:
            self._of[owner].drop_run(run_id)
