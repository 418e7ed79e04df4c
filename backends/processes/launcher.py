"""Start and end child processes on this machine. Only this file knows of ports and environments."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.processes.guarded import Guarded
from tinker_server.backends.processes.messages import STREAM_LIMIT
from tinker_server.backends.processes.preloaded import can_fork, fork
from tinker_server.backends.processes.rpc import Child, Process

IMAGES_AS_SENT = "images-as-sent"
"""Name in vLLM's registry of the connector that reads images of chats in a sampler's process
(`sampler/engine/chat/prompts.py`)."""

StartWorkers = Callable[[ModelSpec], Awaitable[list[Child]]]
"""Starts the processes of a trainer or sampler, all or none, and returns a connection to each, in order. This is all
that the server knows of them; here they are children on this machine."""


@dataclass(frozen=True)
class Seat:
    """The place of a rank among those of its trainer."""

    rank: int
    num_ranks: int
    """Ranks on all machines."""
    host: str
    port: int
    """Port at which rank 0 listens."""


@dataclass(frozen=True)
class Holding:
    """The place of a process that holds a base's weights."""

    gpu: int | None
    """None on the CPU."""


Place = Seat | Holding | None
"""The place of a model's process on another machine; None: an engine's."""
StartRank = Callable[[Seat], Awaitable[list[Child]]]
"""Starts a rank of a trainer on another machine."""


@dataclass(frozen=True)
class Others:
    """Other machines that have ranks of a trainer."""

    host: str = "127.0.0.1"
    """Address of this machine at which they reach it."""
    starts: Sequence[StartRank] = ()
    """The starting function of each machine, in order."""


NO_OTHERS = Others()
StartRanks = Callable[[ModelSpec, Others], Awaitable[list[Child]]]
"""As StartWorkers, for a trainer with ranks on other machines too."""
_RANK, _SAMPLER = "tinker_server.backends.trainer.process", "tinker_server.backends.sampler.engine.process"
_HOLDER = "tinker_server.backends.sampler.engine.weight_holder"
GRAMMARS = "tinker_server.backends.sampler.engine.grammar_process"
_ENGINE = ("vllm.v1.engine.core", "tinker_server.backends.sampler.engine.vllm_patches.worker")
FORKED: dict[str, Sequence[str]] = {_RANK: (), _SAMPLER: _ENGINE, _HOLDER: (), GRAMMARS: ()}
"""Modules that are imported once for all processes that run them, with what these need later; the others import for
themselves."""
_COMPILER = ("torch._inductor.compile_fx",)
"""What ranks on CUDA need beside it, since they compile: torch imports it when it first does."""
NO_DESCRIPTORS = MappingProxyType[str, int]({})
_GLOO = MappingProxyType({"GLOO_SOCKET_IFNAME": ""})
"""Variables that name the network interface of collectives, with what stands before its whole name."""
_GLOO_AND_NCCL = MappingProxyType({**_GLOO, "NCCL_SOCKET_IFNAME": "="})
_LOOPBACK = "127.0.0.1"
_CARDS = "CUDA_VISIBLE_DEVICES"
_ASKS_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Libraries that ask for GPUs while they are imported begin no CUDA then, so that processes can be forks."""
_SIOCGIFADDR = 0x8915
"""Linux's request for an interface's address."""
_VLLM_SOCKETS = "VLLM_RPC_BASE_PATH"
_LAST_WORDS_S = 0.1
"""Time to read the answers that a process sent just before it ended."""
_WITHOUT_BARS = {"TQDM_DISABLE": "1"}
"""Libraries draw no progress bars, since several processes write; loading is reported to the server (`progress.py`)."""
_SHARING_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}
"""OpenMP threads sleep while they wait. By default they spin, for milliseconds of each small operation when other
processes want the cores: a training step of 2 s took 14 s, and quantising a layer's experts at load 19 s for 0.7."""
_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning:vllm.triton_utils.dispatcher",
}
"""vLLM and what it uses report errors alone: its warnings are of its own use of others, and nothing for an operator."""
_CHANGED_BY_RAY = (_CARDS, "OMP_NUM_THREADS", "PYTHONBREAKPOINT")
_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm"}
"""Folder of `ModelSpec.compiled_dir` by the variable that names it. The defaults are in the home directory, which the
user of a container may lack."""


async def launch(
    name: str, module: str, env: Mapping[str, str], fds: Mapping[str, int] = NO_DESCRIPTORS, folder: str | None = None
) -> Child:
    """Run `main` of a module with a connection, which ends in `rpc.serve` or `serve_async`. `env` is added to the
    server's environment. `fds` stay open in the process, which finds their numbers in the variables that are their
    keys. `folder` belongs to the process and is removed when it has ended."""
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as unless_started:  # a start that is cancelled leaves nothing
        unless_started.callback(ours.close)
        if folder is not None:
            unless_started.callback(shutil.rmtree, folder, ignore_errors=True)
        with theirs:
            guarded = await _start_module(name, module, env, theirs, fds)
        unless_started.callback(guarded.abandon)
        guarded.folder = folder
        reader, writer = await asyncio.open_connection(sock=ours, limit=STREAM_LIMIT)
        unless_started.pop_all()

    async def watch() -> None:
        """Close the connection when the process has ended: what it has started may still hold its other end."""
        await guarded.wait()
        await asyncio.sleep(_LAST_WORDS_S)
        writer.transport.abort()

    watching = asyncio.create_task(watch(), name=f"end of {name}")

    async def end(grace_s: float) -> None:
        await guarded.end(grace_s)
        await watching

    return Child(name, Process(guarded.pid, end), reader, writer)


async def _start_module(
    name: str,
    module: str,
    own: Mapping[str, str],
    connection: socket.socket,
    fds: Mapping[str, int] = NO_DESCRIPTORS,
) -> Guarded:
    """Run `main` of a module, which finds the number of the connection in its arguments: as a fork of a process that
    has imported its libraries, or as `python -m module FD`."""
    env, number = {**os.environ, **_WITHOUT_BARS, **own}, connection.fileno()
    # An engine with ranks on several GPUs has not run as a fork.
    is_divided = module == _SAMPLER and "," in own.get(_CARDS, "")
    if module in FORKED and not is_divided and can_fork():
        return await fork(name, modules_before(module, own), env, number, fds)
    env |= {variable: str(fd) for variable, fd in fds.items()}
    return await Guarded.start(name, [sys.executable, "-m", module, str(number)], env, [number, *fds.values()])


def modules_before(module: str, own: Mapping[str, str]) -> tuple[str, ...]:
    """Return what is imported before processes with these variables are forked, the module that they run first."""
    compiler = _COMPILER if module == _RANK and _ASKS_NVML in own else ()
    return (module, *FORKED[module], *compiler)


def read_environment() -> dict[str, str | None]:
    """Return the variables that Ray changes in the processes that it starts, as they are here."""
    return {name: os.environ.get(name) for name in _CHANGED_BY_RAY}


def parents_environment() -> dict[str, str | None]:
    """Return the same variables as Ray itself was started with, in a process that it has started."""
    content = Path(f"/proc/{os.getppid()}/environ").read_bytes().decode(errors="surrogateescape")
    there = dict(variable.partition("=")[::2] for variable in content.split("\0"))
    return {name: there.get(name) for name in _CHANGED_BY_RAY}


def restore_environment(kept: Mapping[str, str | None]) -> None:
    """Undo what Ray has changed in the environment of this process, and take away what is its own, for all processes
    that this one will start."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    for name, value in kept.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def num_visible_gpus(num_gpus: int) -> int:
    """Return how many of the machine's GPUs this process may use."""
    seen = os.environ.get(_CARDS)
    return num_gpus if seen is None else len(list(filter(None, seen.split(","))))


def local_address(peer: str = "192.0.2.1") -> str:
    """Return the address of this machine by which it reaches a peer, by default one that nobody has; the loopback one
    where it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((peer, 9))  # nothing is sent
        return str(probe.getsockname()[0])
    return _LOOPBACK


async def launch_trainer(spec: ModelSpec, others: Others = NO_OTHERS) -> list[Child]:
    """Start the ranks of a trainer, this machine's first, then as many on each other machine."""
    starts = len(others.starts) + 1
    num_ranks = spec.mesh.size * starts
    # Rank 0 inherits a socket that listens already: otherwise another process could take the port before rank 0 does.
    with socket.create_server((others.host, 0), backlog=num_ranks) as meeting:
        seats = [Seat(rank, num_ranks, others.host, meeting.getsockname()[1]) for rank in range(num_ranks)]

        async def launch_rank(seat: Seat) -> list[Child]:
            fds = {"MASTER_LISTEN_FD": meeting.fileno()} if seat.rank == 0 else {}
            return [await launch(rank_name(spec, seat), _RANK, _for_rank(spec, seat), fds)]

        by_machine = [start for start in (launch_rank, *others.starts) for _ in range(spec.mesh.size)]
        started = (start(seat) for start, seat in zip(by_machine, seats, strict=True))
        return await start_all(started)


def _for_rank(spec: ModelSpec, seat: Seat) -> dict[str, str]:
    """Return the variables that torchrun would set. The i-th rank of a machine takes the i-th GPU of its placement, by
    the server's numbers; without any, ranks see all that the server sees."""
    env = {
        "WORLD_SIZE": str(seat.num_ranks),
        "LOCAL_WORLD_SIZE": str(spec.mesh.size),
        "RANK": str(seat.rank),
        "LOCAL_RANK": str(seat.rank % spec.mesh.size),
        "MASTER_ADDR": seat.host,
        "MASTER_PORT": str(seat.port),
        # Threads of transformers would convert tensors far ahead of their use, and fill main memory with them.
        "HF_DEACTIVATE_ASYNC_LOAD": "1",
        **_for_device(spec, spec.placement.gpus),
    }
    if spec.device == "cuda":
        # Sequences of varying lengths would fragment memory into pieces too small for the next long one.
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    named = _GLOO_AND_NCCL if seat.num_ranks > spec.mesh.size else _GLOO
    return env | _name_interface(local_address(seat.host), named)


def _name_interface(address: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which collectives use the interface of this machine's address, save those that are set.

    By default gloo listens at the address of the host's name: at the loopback one, which other machines do not reach,
    or at another, where whoever reaches it may send it pickles.
    """
    interface = _interface(address)
    unset = {} if interface is None else {name: exact for name, exact in variables.items() if name not in os.environ}
    return {name: f"{exact}{interface}" for name, exact in unset.items()}


def _interface(address: str) -> str | None:
    """Return the network interface that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def rank_name(spec: ModelSpec, seat: Seat) -> str:
    """Return the name of a rank's process."""
    return f"trainer {spec.name} rank {seat.rank}"


async def launch_sampler(spec: ModelSpec) -> list[Child]:
    """Start the process of an engine, on the GPUs of its placement; the engine starts with the first command."""
    env = _for_engine(spec)
    return [await launch(sampler_name(spec), _SAMPLER, env, folder=env[_VLLM_SOCKETS])]


async def launch_at(connection: socket.socket, spec: ModelSpec, place: Place) -> Guarded:
    """Start a process of a model for a server on another machine, at the other end of a connection. That is shut down
    when the process has ended."""
    name = process_name(spec, place)
    if isinstance(place, Seat):
        return await _start_module(name, _RANK, _for_rank(spec, place), connection)
    if isinstance(place, Holding):
        return await _start_module(name, _HOLDER, _for_holder(spec, place.gpu), connection)
    env = _for_engine(spec)
    with contextlib.ExitStack() as unless_started:
        unless_started.callback(shutil.rmtree, env[_VLLM_SOCKETS], ignore_errors=True)
        guarded = await _start_module(name, _SAMPLER, env, connection)
        unless_started.pop_all()
    guarded.folder = env[_VLLM_SOCKETS]
    return guarded


def process_name(spec: ModelSpec, place: Place) -> str:
    """Return the name of a model's process."""
    if isinstance(place, Seat):
        return rank_name(spec, place)
    return holder_name(spec, place.gpu) if isinstance(place, Holding) else sampler_name(spec)


def sampler_name(spec: ModelSpec) -> str:
    """Return the name of an engine's process."""
    return f"sampler {spec.name}" + ("" if spec.engine is None else f" engine {spec.engine}")


async def launch_holders(spec: ModelSpec) -> list[Child]:
    """Start a process for each GPU of a model, in the order of `spec.base_gpus`, to hold its weights there."""

    async def launch_holder(gpu: int | None) -> list[Child]:
        return [await launch(holder_name(spec, gpu), _HOLDER, _for_holder(spec, gpu))]

    return await start_all(map(launch_holder, spec.base_gpus))


def holder_name(spec: ModelSpec, gpu: int | None) -> str:
    """Return the name of the process that holds a base's weights on a GPU."""
    place = "GPU" if spec.device == "cuda" else "rank"
    return f"weights {spec.name}" + ("" if gpu is None else f" {place} {gpu}")


async def start_all(launches: Iterable[Awaitable[list[Child]]]) -> list[Child]:
    """Await the launches in order; if any fails, end those before."""
    children: list[Child] = []
    try:
        for launch in launches:
            children += await launch
    except BaseException:
        await asyncio.gather(*(child.stop(grace_s=1) for child in children))
        raise
    return children


def _for_engine(spec: ModelSpec) -> dict[str, str]:
    sockets = tempfile.mkdtemp(prefix="tinker-sampler-")  # vLLM leaves two for every start of an engine
    return {_VLLM_SOCKETS: sockets, **_for_vllm(spec, spec.placement.engines[0])}


def _for_holder(spec: ModelSpec, gpu: int | None) -> dict[str, str]:
    # CUDA gives no handles of memory in expandable segments, which the server's user may have asked for.
    return {
        **_for_vllm(spec, () if gpu is None else (gpu,)),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
    }


def _for_vllm(spec: ModelSpec, gpus: Sequence[int]) -> dict[str, str]:
    env = {
        **_QUIET,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # for `model_spec.DRAWN_TOKENS`, behind the longest context of the model
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # the model is a local directory
        "VLLM_MEDIA_CONNECTOR": IMAGES_AS_SENT,
        "VLLM_MLA_DISABLE": str(int(not spec.latent_cache)),  # its own default leaves adapters of `kv_b_proj` out
        **_name_interface(_LOOPBACK, _GLOO),
        **_for_device(spec, gpus),
    }
    if spec.device == "cpu":
        # An only rank without a process of its own, several on the cores of the server, and no inductor builds of half
        # a minute for a function that counts ranks.
        env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        env["TORCH_COMPILE_DISABLE"] = "1"
    else:
        # FlashInfer's fused sampler cannot give the log probabilities that we always ask for.
        env |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return env


def _for_device(spec: ModelSpec, gpus: Sequence[int]) -> dict[str, str]:
    folder = spec.compiled_dir
    named = {} if folder is None else {variable: str(folder / name) for variable, name in _CACHES.items()}
    # Torch sets its variable to its default while it is imported, in the server too: nobody has chosen that.
    torchs = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    free = {None} if torchs is None else {None, torchs.default_cache_dir()}
    caches = {variable: path for variable, path in named.items() if os.environ.get(variable) in free}
    env = caches | _SHARING_CORES
    if spec.device == "cuda":
        env[_ASKS_NVML] = "1"
        env |= {_CARDS: ",".join(gpu_names(gpus))} if gpus else {}
    return env


def gpu_names(gpus: Sequence[int]) -> list[str]:
    """Translate the server's numbers of GPUs, of which it may see only some, into the machine's names."""
    seen = os.environ.get(_CARDS)
    names = seen.split(",") if seen else [str(number) for number in range(max(gpus) + 1)]
    return [names[gpu].strip() for gpu in gpus]
