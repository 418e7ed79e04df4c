"""Ranks of one trainer in processes of the test's own, each of which can get its own input."""

import os
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from backends.protocol import EncodedBatch
from backends.trainer.distributed import World, join_world
from backends.trainer.rank import TrainerRank
from tests.trainers import SMOOTH, assert_same, forward_backward, lora_model

P = ParamSpec("P")
T = TypeVar("T")


def on_ranks(
    num_ranks: int, function: Callable[Concatenate[World, P], T], *args: P.args, **kwargs: P.kwargs
) -> list[T]:
    """Run a module's function on all ranks of a world, side by side; return their values."""
    with (
        socket.create_server(("127.0.0.1", 0)) as meeting,
        ProcessPoolExecutor(num_ranks, mp_context=get_context("spawn")) as processes,
    ):
        calls = [
            processes.submit(_as_rank, (rank, num_ranks), meeting, function, args, kwargs) for rank in range(num_ranks)
        ]
        return [call.result(timeout=240) for call in calls]


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
    place: tuple[int, int],
    meeting: socket.socket,
    function: Callable[..., T],
    args: tuple,  # type: ignore[type-arg]
    kwargs: dict,  # type: ignore[type-arg]
) -> T:
    """`place` is the rank and the number of ranks."""
    rank, num_ranks = place
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(meeting.getsockname()[1]), "MASTER_LISTEN_FD": str(meeting.detach())}
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # as the launcher has it
    world = join_world("cpu")
    try:
        return function(world, *args, **kwargs)
    finally:
        dist.destroy_process_group()
