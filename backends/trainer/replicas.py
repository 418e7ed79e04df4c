"""Other machines that hold the ranks of a trainer once more: which are used, and which are not any longer.

Each has the whole base once more, and computes other samples. A machine is used from a start of the ranks on, until it
is lost or a start with it fails. Knows no cluster.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from backends.model_spec import ModelSpec
from backends.processes.launcher import Others, StartRank, StartRanks
from backends.processes.rpc import Child

log = logging.getLogger(__name__)
_LOSS_S = 2.0
"""Time between the end of a rank and the notice that its machine is lost."""


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


class Replicas:
    """The machines of one trainer beside the serving one."""

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
        if replica in self._there:
            self._there.remove(replica)
        if replica in self.used:
            self._reason = f" without {replica.machine}, which has left or is lost"
            first = self._spec.mesh.size * (1 + self.used.index(replica))
            await asyncio.gather(*(one.stop(0) for one in self._ranks[first : first + self._spec.mesh.size]))

    def grow(self) -> None:
        """Note that the ranks are started again to use machines that have joined."""
        self._reason = f", with {', '.join(one.machine for one in self._there)}"

    @property
    def are_used(self) -> bool:
        """Return whether the ranks were last started on all machines that are there."""
        return set(self._there) <= set(self.used)

    async def launch(self) -> list[Child]:
        """Start the processes of all ranks, none of which is ready. Raises BackendFailed, OSError."""
        self._set_aside()
        self.used, self._ranks, self._has_started = tuple(self._there), [], False
        if self.used:
            names = ", ".join(one.machine for one in self.used)
            log.info("%s: the trainer has ranks here and on %s", self._spec.name, names)
            others = Others(self.used[0].host, tuple(one.start for one in self.used))
            self._ranks = await self._start_ranks(self._spec, others)
        else:
            self._ranks = await self._start_ranks(self._spec, Others())
        return self._ranks

    def specs(self) -> list[ModelSpec]:
        """Return the model's spec as each rank needs it."""
        by_machine = (self._spec, *(one.spec for one in self.used))
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

    async def lost(self) -> str | None:
        """Return the name of a machine that was used and is lost; None if all are there."""
        if self.used:
            waits = [asyncio.create_task(one.is_lost.wait()) for one in self.used]
            await asyncio.wait(waits, timeout=_LOSS_S, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        return next((one.machine for one in self.used if one.is_lost.is_set()), None)

    def _set_aside(self) -> None:
        """Use no machine again with which the ranks did not start, until it joins again, unless one was lost."""
        if self._has_started or any(one.is_lost.is_set() for one in self.used):
            return
        for one in self.used:
            log.error(
                "%s: the trainer has not started with %s, which is not used for training until it joins again",
                *(self._spec.name, one.machine),
            )
            self._there.remove(one)
