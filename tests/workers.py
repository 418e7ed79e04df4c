"""Gives tests to workers: those that share a server or an engine to the same worker, and the longest first."""

import time
from hashlib import sha256

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

OF_SERVER = ("chat_clients", "docs", "full_disk", "start", "training", "uploaded_adapters")
TOGETHER = {
    "sampler": ("tests/contract/sampler/",),
    "server": ("tests/conformance/", *(f"tests/e2e/test_{name}.py" for name in OF_SERVER)),
}
"""Files that share an engine of their own, and those with the server of a test session."""
APART = "tests/chaos/"
"""Each test takes minutes, and has its own server."""
LONGEST = ("server", "sampler", "tests/e2e/", "tests/chaos/", "tests/cluster/", "tests/browser/", "tests/contract/")
"""Scopes, or beginnings of their names, in the order of their start. What takes minutes would be waited for at the
end, while all other workers have nothing to do."""
NUM_HELD = 2
"""A worker runs a test once it has the next."""


class ByEngine(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a worker one file after the other, or all files of an engine, or one test: the longest first, or in the
    order of `--order`."""

    def _split_scope(self, nodeid: str) -> str:
        for name, files in TOGETHER.items():
            if nodeid.startswith(files):
                return name
        return nodeid if nodeid.startswith(APART) else nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        first = min(self.workqueue, key=self._place)  # of equals, the first by name
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)

    def _place(self, scope: str) -> int | str:
        order = self.config.getoption("order")
        return _length(scope) if order is None else sha256(f"{order} {scope}".encode()).hexdigest()

    def _reschedule(self, node: WorkerController) -> None:
        """Leave to other workers what this worker need not have yet. Scopes that a crashed worker had run to their end
        are in the queue again, without a test: a worker that got nothing else would wait for ever."""
        while self.workqueue and not node.shutting_down and not self._has_next(node):
            self._assign_work_unit(node)
        if not self._has_next(node):
            super()._reschedule(node)

    def _has_next(self, node: WorkerController) -> bool:
        num_pending: int = self._pending_of(self.assigned_work[node])
        return num_pending >= NUM_HELD


def _length(scope: str) -> int:
    return next((place for place, name in enumerate(LONGEST) if scope.startswith(name)), len(LONGEST))


def skip_after(minutes: float | None, began_s: float) -> None:
    """Skip the test that begins now if the minutes of its run are over."""
    if minutes is not None and time.monotonic() - began_s > 60 * minutes:
        pytest.skip("no time is left for it (--minutes)")
