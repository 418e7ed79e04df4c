"""Results of finished operations, and those that are kept in memory to be asked for again."""

import time
from collections import OrderedDict
from dataclasses import dataclass, field

from tinker_server.store.completions import Target


@dataclass(frozen=True, slots=True)
class Result:
    """What a finished operation answers, as bytes ready to send."""

    body: bytes
    content_type: str
    failed: bool = False
    finished_at: float = field(default_factory=time.time)
    kind: str = ""
    """Of the operation; the store fills it in, with its lane, number and owner."""
    lane: str = ""
    seq_id: int = 0
    owner: str = ""

    @property
    def completion(self) -> tuple[Target, int]:
        """Whose log of finished samples it is in, and at which cursor."""
        return Target.of(self.lane, self.seq_id), round(self.finished_at * 1e6)


class RecentResults:
    """The results used last, up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._results: OrderedDict[str, Result] = OrderedDict()

    def get(self, request_id: str) -> Result | None:
        if request_id in self._results:
            self._results.move_to_end(request_id)
        return self._results.get(request_id)

    def put(self, request_id: str, result: Result) -> None:
        if request_id in self._results or len(result.body) > self._max_bytes:
            return
        self._results[request_id] = result
        self._size_bytes += len(result.body)
        while self._size_bytes > self._max_bytes:
            _, oldest = self._results.popitem(last=False)
            self._size_bytes -= len(oldest.body)

    def discard(self, request_id: str, lane: str) -> None:
        """Forget a result of this lane."""
        if (result := self._results.get(request_id)) is not None and result.lane == lane:
            self._size_bytes -= len(self._results.pop(request_id).body)

    def drop(self, before: float) -> None:
        """Forget results that finished before."""
        kept = [(key, result) for key, result in self._results.items() if result.finished_at >= before]
        self._results = OrderedDict(kept)
        self._size_bytes = sum(len(result.body) for _, result in kept)
