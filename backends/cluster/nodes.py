"""Nodes of the Ray cluster, as the head's process uses them: an agent on each, and in a cluster that was there before
the server, a member that has the node belong to it."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tinker_server.backends.cluster.agent import Agent
from tinker_server.backends.cluster.commands import EndProcess, StartProcess
from tinker_server.backends.cluster.member import Member
from tinker_server.backends.cluster.offer import Invitation, Offer
from tinker_server.backends.cluster.ray_commands import NODE_LABEL
from tinker_server.backends.protocol import BackendFailed

log = logging.getLogger(__name__)
_RETRY_S = 0.3
_NODE_S = 60.0
"""Longest time until Ray knows a machine that has joined, and until a member runs on it."""
_LOOK_S = 2.0
"""Time between two looks for new nodes: Ray has no event for them."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class Agents:
    """The actors on the machines, each made when it is first needed."""

    def __init__(self) -> None:
        self._agents: dict[str, Any] = {}
        """By Ray's number of the machine's present Ray."""

    async def start(self, command: StartProcess) -> int:
        """Start a process on a machine. Raises BackendFailed."""
        async with self._agent(command.offer) as agent:
            return int(await agent.start.remote(command.key, command.spec, command.place))

    async def end(self, command: EndProcess) -> None:
        """End a process on a machine. Raises BackendFailed."""
        async with self._agent(command.offer) as agent:
            await agent.end.remote(command.key, command.grace_s)

    @contextlib.asynccontextmanager
    async def _agent(self, offer: Offer) -> AsyncIterator[Any]:
        """Yield the machine's actor. The next caller gets a new actor if it has died."""
        with _failing(offer.name):
            async with asyncio.timeout(_NODE_S):
                while (node := await asyncio.to_thread(_node, offer.ray_label)) is None:  # noqa: ASYNC110 - Ray has no event
                    await asyncio.sleep(_RETRY_S)
            if (agent := self._agents.get(node)) is None:
                made = ray.remote(Agent).options(num_cpus=0, scheduling_strategy=_on(node))
                agent = self._agents[node] = made.remote(offer)
            try:
                yield agent
            except RayActorError:
                if self._agents.get(node) is agent:
                    del self._agents[node]
                raise


class Members:
    """Has every node of a cluster, except this machine's, belong to the server while it is there."""

    def __init__(self, invitation: Invitation) -> None:
        self._invitation = invitation
        self._own = ray.get_runtime_context().get_node_id()
        self._nodes: dict[str, asyncio.Task[None]] = {}
        """Those that have been invited, by Ray's number. A node that was asked to leave is not invited again."""

    async def invite(self) -> None:
        """Invite every node that there is, and that comes."""
        while True:
            there = {str(node["NodeID"]): node for node in await asyncio.to_thread(ray.nodes) if node["Alive"]}
            for number in self._nodes.keys() - there.keys():
                self._nodes.pop(number).cancel()
            for number in there.keys() - self._nodes.keys() - {self._own}:
                self._nodes[number] = asyncio.create_task(self._keep(there[number]), name=f"member {number}")
            await asyncio.sleep(_LOOK_S)

    async def _keep(self, node: dict[str, Any]) -> None:
        """Have a node belong until it has been asked to leave."""
        name, pause_s = _name(node), _FIRST_PAUSE_S
        while True:
            began = asyncio.get_running_loop().time()
            try:
                with _failing(name):
                    if await self._belong(node, name):
                        return
            except BackendFailed as error:
                log.warning("%s; retrying in %.0f s", error, pause_s)
            if asyncio.get_running_loop().time() - began > _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _belong(self, node: dict[str, Any], name: str) -> bool:
        """Run a member, which reserves the node's GPUs in Ray; return whether it was asked to leave."""
        number, num_gpus = str(node["NodeID"]), node["Resources"].get("GPU", 0)
        made = ray.remote(Member).options(num_cpus=0, num_gpus=num_gpus, scheduling_strategy=_on(number))
        member = made.remote(self._invitation, name, number)
        try:
            try:
                async with asyncio.timeout(_NODE_S):
                    await member.__ray_ready__.remote()
            except TimeoutError:
                reason = (
                    f"other jobs of Ray have some of its {num_gpus:.0f} GPUs" if num_gpus else "none of Ray's starts"
                )
                raise BackendFailed(f"machine {name}: agent not running yet: {reason}") from None
            return bool(await member.belong.remote())
        finally:
            ray.kill(member)


@contextlib.contextmanager
def _failing(name: str) -> Iterator[None]:
    """Raise BackendFailed for whatever Ray raises about a machine."""
    try:
        yield
    except TimeoutError:
        raise BackendFailed(f"Ray does not know the machine {name}") from None
    except (RayError, OSError) as error:
        cause = getattr(error, "cause", None) or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[-1]
        raise BackendFailed(f"the machine {name}: {reason}") from error


def _on(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node, soft=False)


def _node(label: str) -> str | None:
    """Return Ray's number of the machine with that label, or that number, if it is there."""
    found = (node for node in ray.nodes() if node["Alive"])
    return next(
        (str(node["NodeID"]) for node in found if label in (node["NodeID"], node["Labels"].get(NODE_LABEL))), None
    )


def _name(node: dict[str, Any]) -> str:
    """Return the name that its operator gave a node of a cluster, or its host name."""
    has_own = node["NodeName"] != node["NodeManagerAddress"]
    return str(node["NodeName"] if has_own else node["NodeManagerHostname"])
