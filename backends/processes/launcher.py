"""Starts child processes on this machine and ends them: processes, ports and environments are known here alone.

A child leads a session of its own, so that Ctrl-C reaches the server alone and a child is ended together with
everything it started. A guard in the same session ends them all at once when the server is gone, whatever it
died of: Linux's parent-death signal would reach the child, and not the processes that vLLM starts beneath it.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from backends.processes.messages import STREAM_LIMIT
from backends.processes.rpc import Child, Process

log = logging.getLogger(__name__)
IMAGES_AS_SENT = "images-as-sent"
"""What reads the images of chats in a sampler's process (`sampler/chat_prompts.py`), by vLLM's register of such."""
Device = Literal["cpu", "cuda"]

_GUARDED = '(read -r _ </proc/self/fd/$0; kill -s KILL 0) & exec "$@"'
"""The guard waits on a pipe whose other end the server alone holds; the shell itself becomes the child. As part of
the group that it ends, the guard also keeps the group's number from being given to others."""
_LAST_WORDS_S = 0.1
"""For the answers that a process sent just before it ended."""
_WITHOUT_BARS = {"TQDM_DISABLE": "1"}
"""Libraries draw none where several processes write; what is loaded is told to the server (`progress.py`)."""
_SHARING_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}
"""OpenMP threads sleep while they wait. By default they spin, for milliseconds of each small operation once other
processes want the cores: a training step of 2 s took 14."""


async def launch(
    name: str, module: str, env: Mapping[str, str], fds: Sequence[int] = (), folder: str | None = None
) -> Child:
    """Run `python -m module FD`, which ends in `children.serve` or `serve_async`; `env` is added to the server's, and
    the process has `fds` open too. `folder` is its own, and is removed when it has been ended."""
    ours, theirs = socket.socketpair()
    guarding, guard_fd = os.pipe()
    guard = os.fdopen(guard_fd, "w")
    with theirs, os.fdopen(guarding):
        process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", _GUARDED, str(guarding)),
            *(sys.executable, "-m", module, str(theirs.fileno())),
            pass_fds=[theirs.fileno(), guarding, *fds],
            env={**os.environ, **_WITHOUT_BARS, **env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr,  # the server's own output is for its user alone
            stderr=sys.stderr,
            start_new_session=True,
        )

    reader, writer = await asyncio.open_connection(sock=ours, limit=STREAM_LIMIT)

    async def watch() -> None:
        """Break the connection when the process has ended: the guard still holds its other end."""
        await process.wait()
        await asyncio.sleep(_LAST_WORDS_S)
        writer.transport.abort()

    watching = asyncio.create_task(watch(), name=f"end of {name}")

    async def end(grace_s: float) -> None:
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            log.warning("the %s process did not end within %s s and is killed", name, grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await watching
        guard.close()
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    return Child(name, Process(process.pid, end), reader, writer)


class WorkerGroup(Protocol):
    """The processes of one trainer or sampler, which start and end together. All that the server knows of them once
    they run is a connection to each, wherever they are."""

    @property
    def name(self) -> str:
        """Name in the log: "qwen: the trainer"."""

    @property
    def process_names(self) -> list[str]: ...

    async def start(self) -> list[Child]:
        """Start all of them, or none. Return their connections, in order."""


@dataclass(frozen=True)
class TrainerRanks:
    """The ranks of one base model's trainer on this machine, with the variables that torchrun would set.

    Rank i takes the i-th of `gpus`, by the server's numbers; none given: all that the server sees.
    """

    model: str
    num_ranks: int
    device: Device
    gpus: Sequence[int] = ()

    @property
    def name(self) -> str:
        """Name in the log."""
        return f"{self.model}: the trainer"

    @property
    def process_names(self) -> list[str]:
        """Names by rank."""
        return [f"trainer {self.model} rank {rank}" for rank in range(self.num_ranks)]

    async def start(self) -> list[Child]:
        """Start all ranks."""
        env = {"WORLD_SIZE": str(self.num_ranks), "MASTER_ADDR": "127.0.0.1", **_for_device(self.device, self.gpus)}
        # Threads of transformers would convert tensors far ahead of their use, and fill main memory with them.
        env["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
        if self.device == "cuda":
            # Sequences of all lengths would leave memory in pieces too small for the next long one.
            env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        ranks: list[Child] = []
        # Rank 0 listens on a port that is taken from here on: until it is ready to, another process could take it.
        with socket.create_server(("127.0.0.1", 0), backlog=self.num_ranks) as meeting:
            env |= {"MASTER_PORT": str(meeting.getsockname()[1]), "MASTER_LISTEN_FD": str(meeting.fileno())}
            try:
                for rank, name in enumerate(self.process_names):
                    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    fds = [meeting.fileno()] if rank == 0 else []
                    ranks.append(await launch(name, "backends.trainer.process", env | own, fds))
            except BaseException:
                await asyncio.gather(*(rank.stop(grace_s=1) for rank in ranks))
                raise
        return ranks


@dataclass(frozen=True)
class SamplerHost:
    """The process of one base model's sampler on this machine, on the first of `gpus`; its engine starts with the
    first command."""

    model: str
    device: Device
    gpus: Sequence[int] = ()

    @property
    def name(self) -> str:
        """Name in the log."""
        return f"{self.model}: the sampler"

    @property
    def process_names(self) -> list[str]:
        """The one name."""
        return [f"sampler {self.model}"]

    async def start(self) -> list[Child]:
        """Start it."""
        sockets = tempfile.mkdtemp(prefix="tinker-sampler-")  # vLLM leaves two for every start of an engine
        env = {
            "VLLM_RPC_BASE_PATH": sockets,
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",  # the model is a local directory
            "VLLM_MEDIA_CONNECTOR": IMAGES_AS_SENT,
            **_for_device(self.device, self.gpus[:1]),
        }
        if self.device == "cpu":
            # The engine without a further worker process, and no inductor builds of half a minute for a
            # function that counts ranks.
            env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}
        else:
            # FlashInfer's fused sampler cannot give the log probabilities that we always ask for.
            env |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        [name] = self.process_names
        return [await launch(name, "backends.sampler.process", env, folder=sockets)]


def _for_device(device: Device, gpus: Sequence[int]) -> dict[str, str]:
    if device == "cpu":
        return _SHARING_CORES
    if not gpus:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpu_names(gpus))}


def gpu_names(gpus: Sequence[int]) -> list[str]:
    """What the machine calls the GPUs with these numbers of the server's own, who may see only some of them."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(number) for number in range(max(gpus) + 1)]
    return [names[gpu].strip() for gpu in gpus]
