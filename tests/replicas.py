"""Machines that join a trainer, all of them this one, without a cluster."""

import asyncio

from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.processes import launcher
from tinker_server.backends.processes.launcher import Seat
from tinker_server.backends.processes.rpc import Child
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.trainer.client import TrainerClient
from tinker_server.backends.trainer.replicas import Replica


class Machine:
    """Starts ranks, except as often as it is told to fail."""

    def __init__(self, spec: ModelSpec, name: str = "a") -> None:
        self.failures = 0
        self.replica = Replica(name, spec, self.start, "127.0.0.1")

    async def start(self, seat: Seat) -> list[Child]:
        if self.failures:
            self.failures -= 1
            raise BackendFailed(f"{self.replica.machine} has no memory left")
        name = f"{launcher.rank_name(self.replica.spec, seat)} on {self.replica.machine}"
        return [
            await launcher.launch(
                name, "tinker_server.backends.trainer.process", launcher._for_rank(self.replica.spec, seat)
            )
        ]


def machines(trainer: TrainerClient) -> list[str]:
    ranks = trainer._supervisor.children if trainer._supervisor.is_alive else []
    return [rank.name.partition(" on ")[2] or "here" for rank in ranks]


async def until_on(trainer: TrainerClient, *names: str, limit_s: float = 100) -> None:
    async with asyncio.timeout(limit_s):
        while machines(trainer) != [*names]:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.02)
