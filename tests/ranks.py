"""Ranks of one trainer in processes of the test's own, each of which can get its own input; and faster starts."""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from tests.trainers import SMOOTH, assert_same, forward_backward, lora_model
from tinker_server.backends.model_spec import Dtype
from tinker_server.backends.processes.launcher import NO_DESCRIPTORS
from tinker_server.backends.processes.messages import STREAM_LIMIT
from tinker_server.backends.processes.rpc import Child, Process, serve
from tinker_server.backends.protocol import EncodedBatch
from tinker_server.backends.trainer import process
from tinker_server.backends.trainer.distributed import World, join_world
from tinker_server.backends.trainer.rank import TrainerRank

P = ParamSpec("P")
T = TypeVar("T")
PROCESSES = get_context("forkserver")
"""One process imports torch and all below it, 8 s of a core; ranks are its forks. It computes nothing, so has no
threads that a fork would miss."""
PROCESSES.set_forkserver_preload(["tests.trainers", "tests.models", "tinker_server.backends.trainer.process"])


async def fork(name: str, module: str, env: Mapping[str, str], fds: Mapping[str, int] = NO_DESCRIPTORS) -> Child:
    """Start a trainer's rank as `launcher.launch` does, but with all imports done, and without a guard."""
    assert module == process.__name__
    ours, theirs = socket.socketpair()
    with theirs, contextlib.ExitStack() as copies:
        listening = [copies.enter_context(socket.socket(fileno=os.dup(fd))) for fd in fds.values()]
        child = PROCESSES.Process(target=_serve, args=(theirs, dict(env), listening), name=name)
        await asyncio.to_thread(child.start)
    reader, writer = await asyncio.open_connection(sock=ours, limit=STREAM_LIMIT)
    assert child.pid is not None

    async def end(grace_s: float) -> None:
        await asyncio.to_thread(child.join, grace_s)
        child.kill()
        await asyncio.to_thread(child.join)

    return Child(name, Process(child.pid, end), reader, writer)


def _serve(connection: socket.socket, env: dict[str, str], listening: list[socket.socket]) -> None:
    os.environ |= env
    if listening:
        os.environ["MASTER_LISTEN_FD"] = str(listening[0].detach())
    sys.argv[1:] = [str(connection.detach())]
    serve(lambda keep_waiting: process.Process(keep_waiting).handle)


def on_ranks(
    num_ranks: int, function: Callable[Concatenate[World, P], T], *args: P.args, **kwargs: P.kwargs
) -> list[T]:
    """Run a module's function on all ranks of a world, side by side; return their values."""
    return on_machines(1, num_ranks, "float32", function, *args, **kwargs)


def on_slices(
    num_slices: int, num_ranks: int, function: Callable[Concatenate[World, P], T], *args: P.args, **kwargs: P.kwargs
) -> list[T]:
    """As `on_ranks`, of which so many compute slices of each microbatch."""
    return on_all((num_ranks, 1, "float32", num_slices), function, *args, **kwargs)


def on_machines(
    num_machines: int,
    num_ranks: int,
    across: Dtype,
    function: Callable[Concatenate[World, P], T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> list[T]:
    """As `on_ranks`, with all ranks divided over several machines, between which gradients travel in `across`."""
    return on_all((num_ranks, num_machines, across, 1), function, *args, **kwargs)


def on_all(
    kind: tuple[int, int, Dtype, int], function: Callable[Concatenate[World, P], T], *args: P.args, **kwargs: P.kwargs
) -> list[T]:
    """As `on_ranks`; `kind` is the number of ranks, that of machines, the precision between them, and the number of
    slices of a microbatch."""
    num_ranks = kind[0]
    with (
        socket.create_server(("127.0.0.1", 0)) as meeting,
        ProcessPoolExecutor(num_ranks, mp_context=PROCESSES) as processes,
    ):
        calls = [processes.submit(_as_rank, rank, kind, meeting, function, args, kwargs) for rank in range(num_ranks)]
        ended, waiting = wait(calls, timeout=240, return_when=FIRST_EXCEPTION)
        if waiting:  # for a rank that failed, in a collective
            for process in processes._processes.values():
                process.kill()
            for call in ended:
                call.result()
        return [call.result() for call in calls]


def on_two_ranks(function: Callable[Concatenate[World, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
    """Run a module's function on both ranks of a world of two."""
    return on_ranks(2, function, *args, **kwargs)


Stepped = tuple[list[list[np.ndarray]], dict[str, torch.Tensor]]


def two_steps(rank: TrainerRank, model_id: str, batch: EncodedBatch) -> Stepped:
    """Return the log probabilities of each step, on rank 0, and the adapter after both."""
    found = []
    for _ in range(2):
        output = forward_backward(rank, model_id, batch, True)
        rank.optim_step(model_id, SMOOTH)
        if output is not None:
            found.append([one["logprobs"] for one in output.loss_fn_outputs])
    return found, {name: tensor.detach().clone() for name, tensor in lora_model(rank, model_id).tensors.items()}


def check_two_are_as_one(steps: Callable[Concatenate[World, P], Stepped], *args: P.args, **kwargs: P.kwargs) -> None:
    """A module's function that ends with `two_steps` gives the same in a world of two and alone."""
    one, one_weights = steps(World(0, 1, torch.device("cpu")), *args, **kwargs)
    (two, two_weights), _ = on_two_ranks(steps, *args, **kwargs)
    for single, double in zip(one, two, strict=True):
        for a, b in zip(single, double, strict=True):
            np.testing.assert_allclose(b, a, atol=1e-4)
    assert_same(two_weights, one_weights)


def _as_rank(
    rank: int,
    kind: tuple[int, int, Dtype, int],
    meeting: socket.socket,
    function: Callable[..., T],
    args: tuple,  # type: ignore[type-arg]
    kwargs: dict,  # type: ignore[type-arg]
) -> T:
    num_ranks, num_machines, across, num_slices = kind
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks // num_machines)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(meeting.getsockname()[1]), "MASTER_LISTEN_FD": str(meeting.detach())}
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # as the launcher has it
    world = join_world("cpu", across_dtype=getattr(torch, across), num_slices=num_slices)
    try:
        return function(world, *args, **kwargs)
    finally:
        dist.destroy_process_group()
