"""Other machines that hold the ranks of a trainer once more: which are used, and which are not any longer.

Each has the whole base once more, and computes other samples. A machine is used from a start of the ranks on, until it
is lost or a start with it fails. Knows no cluster.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.processes.launcher import Others, StartRank, StartRanks
from tinker_server.backends.processes.rpc import Child

log = logging.getLogger(__name__)
_LOSS_S = 2.0
"""Time between the end of a rank and the notice that its machine is lost."""
MAX_DEATHS = 2
"""Ends of a machine's ranks, while the machine lives, after which it is not used for a while."""
ASIDE_S = 600.0
"""Time for which a machine is not used: more of what is wrong with it would cost a restart each time."""


@dataclass(eq=False)
class Replica:
    """A machine that has joined, and can hold the ranks of a trainer; one that comes back is another."""

    machine: str
    """Its name."""
    spec: ModelSpec
    """The model's, as that machine needs it."""
    start: StartRank
    host: str
    """Address of the serving machine at which it reaches rank 0."""
    is_lost: asyncio.Event = field(default_factory=asyncio.Event)
    aside_until_s: float = 0.0
    """Time, by the monotonic clock, until which it is not used."""
    num_deaths: int = 0
    """Times that its ranks have ended while it lived."""


class Replicas:
    """The machines of a trainer beside the serving one."""

    def __init__(self, spec: ModelSpec, start_ranks: StartRanks) -> None:
        self.used: Sequence[Replica] = ()
        """Machines that the ranks were last started on, in the order of their ranks."""
        self._spec = spec
        self._start_ranks = start_ranks
        self._there: list[Replica] = []
        self._has_started = True
        """False while the ranks that were last started are not ready."""
        self._ranks: list[Child] = []
        self._reason = ""
        """Why the ranks are started again, if a machine is the reason."""

    def add(self, replica: Replica) -> None:
        """Use a machine from the next start on."""
        self._there.append(replica)

    async def remove(self, replica: Replica) -> None:
        """Use a machine no longer. Its ranks count as dead at once."""
        replica.is_lost.set()
        self._there.remove(replica)
        if replica in self.used:
            self._reason = f" without {replica.machine}, which has left or is lost"
            await asyncio.gather(*(rank.stop(0) for rank in self._ranks_of(replica)))

    @property
    def unused(self) -> list[Replica]:
        """Machines that are there, and on which the ranks were not started last."""
        return [replica for replica in self._there if replica not in self.used]

    def can_grow(self) -> bool:
        """Return whether a start now would use more machines."""
        if found := [replica for replica in self.unused if replica.aside_until_s <= time.monotonic()]:
            self._reason = f", with {', '.join(replica.machine for replica in found)}"
        return bool(found)

    async def launch(self) -> list[Child]:
        """Start the processes of all ranks, none of which is ready. Raises BackendFailed, OSError."""
        self._after_failed_start()
        now_s = time.monotonic()
        self.used = tuple(replica for replica in self._there if replica.aside_until_s <= now_s)
        self._ranks, self._has_started = [], False
        if self.used:
            names = ", ".join(replica.machine for replica in self.used)
            log.info("%s: the trainer has ranks here and on %s", self._spec.name, names)
            others = Others(self.used[0].host, tuple(replica.start for replica in self.used))
            self._ranks = await self._start_ranks(self._spec, others)
        else:
            self._ranks = await self._start_ranks(self._spec, Others())
        return self._ranks

    def specs(self) -> list[ModelSpec]:
        """Return the model's spec as each rank needs it."""
        by_machine = (self._spec, *(replica.spec for replica in self.used))
        return [spec for spec in by_machine for _ in range(spec.mesh.size)]

    @property
    def ranks(self) -> str:
        """Number of ranks on all machines; with several, their number, and the precision in which gradients travel."""
        num_ranks = len(self.specs())
        machines = f" on {1 + len(self.used)} machines, {self._spec.across_dtype} between them"
        return f"{num_ranks}{machines if self.used else ''}"

    def has_started(self) -> None:
        """Note that all ranks are ready."""
        self._has_started, self._reason = True, ""

    def reason(self) -> str:
        """Say why nothing is computed while the ranks are started."""
        return f"the trainer of {self._spec.name} starts again{self._reason}"

    async def wait_for_end(self) -> str | None:
        """Return the name of a machine whose ranks were the first to end, with it or without; None if those here were.
        Where it was without, and not for the first time, the machine is not used for a while."""
        if not self.used:
            return None
        waits = [asyncio.create_task(replica.is_lost.wait()) for replica in self.used]
        await asyncio.wait(waits, timeout=_LOSS_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if lost := [replica.machine for replica in self.used if replica.is_lost.is_set()]:
            return lost[0]
        first = min(range(len(self._ranks)), key=lambda rank: self._ranks[rank].died_s)
        if first < self._spec.mesh.size or not self._ranks[first].died.is_set():
            return None
        replica = self.used[first // self._spec.mesh.size - 1]
        replica.num_deaths += 1
        if replica.num_deaths % MAX_DEATHS == 0:
            self._set_aside(replica, "the ranks there have ended again")
        return replica.machine

    def _ranks_of(self, replica: Replica) -> Sequence[Child]:
        num = self._spec.mesh.size
        first = num * (1 + self.used.index(replica))
        return self._ranks[first : first + num]

    def _after_failed_start(self) -> None:
        """Use no machine for a while with which the ranks did not start, unless that was since one was lost."""
        if not self._has_started and not any(replica.is_lost.is_set() for replica in self.used):
            for replica in self.used:
                self._set_aside(replica, "the trainer has not started with it")

    def _set_aside(self, replica: Replica, why: str) -> None:
        replica.aside_until_s = time.monotonic() + ASIDE_S
        log.error("%s: not training on %s for %.0f s: %s", self._spec.name, replica.machine, ASIDE_S, why)
