"""Ranks of one trainer in processes of the test's own, where each can be given what the others are not."""

import os
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Concatenate, ParamSpec, TypeVar

import torch.distributed as dist

from backends.trainer.parallel import World, join_world

P = ParamSpec("P")
T = TypeVar("T")


def on_two_ranks(function: Callable[Concatenate[World, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
    """What a module's function returns on rank 0 and on rank 1 of a world of two, run side by side."""
    with (
        socket.create_server(("127.0.0.1", 0)) as meeting,
        ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes,
    ):
        calls = [processes.submit(_as_rank, rank, meeting, function, args, kwargs) for rank in (0, 1)]
        return [call.result(timeout=240) for call in calls]


def _as_rank(rank: int, meeting: socket.socket, function: Callable[..., T], args: tuple, kwargs: dict) -> T:  # type: ignore[type-arg]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(meeting.getsockname()[1]), "MASTER_LISTEN_FD": str(meeting.detach())}
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # as the launcher has it
    world = join_world("cpu")
    try:
        return function(world, *args, **kwargs)
    finally:
        dist.destroy_process_group()
