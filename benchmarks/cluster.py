"""Time from `join` to the first use of a machine, of the hand-over of an adapter to all machines, and of a training
step with one and two replicas, where the network has so many Gbit/s. On CPU, as root, on one machine.

    python benchmarks/cluster.py [--gbit 10 1] [--machines 2] [--mib 126] [--rounds 5]

Each machine is a network namespace of its own, and the server is another. Their links to a bridge are throttled by `tc`
in both directions. The floor of a hand-over is the bytes that leave the server over its link's rate. That of a step is
half the time of one replica, and the gradient's bytes over the link's rate: of two machines, each sends half of it to
be summed, and half of the sums.
"""

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.factories import cross_entropy, datum, make_renderer, prompt, words
from tests.models import make_tiny_of, make_tiny_vl
from tests.replicas import until_on
from tests.sampling import sampler_config
from tests.servers import MODEL
from tests.trainers import config
from tinker_server.api_schemas.training import AdamParams, Trainable
from tinker_server.backends.cluster.bases import RemoteBases
from tinker_server.backends.cluster.client import Address, Cluster
from tinker_server.backends.cluster.engines import RemoteEngines
from tinker_server.backends.cluster.replicas import RemoteReplicas
from tinker_server.backends.formats.model_files import fingerprint
from tinker_server.backends.protocol import ADAPTER_FILE, EncodedBatch, LoadedModel, ignore_loading
from tinker_server.backends.sampler.client import EngineClient
from tinker_server.backends.sampler.commands import Receive
from tinker_server.backends.sampler.pool import SamplerPool
from tinker_server.backends.sampler.received import read_files
from tinker_server.backends.trainer.client import TrainerClient

BRIDGE = "tinkerbench"
PORT = 8100
BURST_BYTES = 8 << 20
"""Bytes that pass a link at once: at 10 Gbit/s, those of the time between two interrupts of the clock."""
WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
RANK = 128
DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")


def namespace(number: int) -> str:
    """That of the server is the first."""
    return f"{BRIDGE}{number}"


def address(number: int) -> str:
    return f"10.77.0.{number + 1}"


def ip(*arguments: str, inside: int | None = None) -> None:
    within = [] if inside is None else ["-n", namespace(inside)]
    subprocess.run(["ip", *within, *arguments], check=True)


@contextlib.contextmanager
def network(num: int, gbit: float) -> Iterator[None]:
    """So many namespaces, whose links have so many Gbit/s."""
    with contextlib.ExitStack() as made:
        ip("link", "add", BRIDGE, "type", "bridge")
        made.callback(ip, "link", "del", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for number in range(num):
            ip("netns", "add", namespace(number))
            made.callback(ip, "netns", "del", namespace(number))
            outer = f"{BRIDGE[:10]}-{number}"
            ip("link", "add", "name", outer, "type", "veth", "peer", "name", "eth0", "netns", namespace(number))
            made.callback(ip, "link", "del", outer)  # with its namespace alone it would be gone only later
            ip("link", "set", outer, "master", BRIDGE, "up")
            ip("addr", "add", f"{address(number)}/24", "dev", "eth0", inside=number)
            for device in ("lo", "eth0"):
                ip("link", "set", device, "up", inside=number)
            throttle = ["root", "tbf", "rate", f"{gbit}gbit", "burst", str(BURST_BYTES), "latency", "50ms"]
            subprocess.run(["tc", "qdisc", "add", "dev", outer, *throttle], check=True)
            subprocess.run(["tc", "-n", namespace(number), "qdisc", "add", "dev", "eth0", *throttle], check=True)
        yield


@dataclass
class Machine:
    """`tinker-server join` in a namespace."""

    number: int
    process: asyncio.subprocess.Process
    began_s: float

    @classmethod
    async def start(cls, number: int, directory: Path) -> "Machine":
        began_s = time.perf_counter()
        command = [sys.executable, "-m", "tinker_server", "join", f"{address(0)}:{PORT}", "--name", str(number)]
        command += ["--token-file", str(directory / "token"), "--model", MODEL]
        command += ["--data-dir", str(directory / f"machine-{number}")]
        process = await asyncio.create_subprocess_exec("ip", "netns", "exec", namespace(number), *command)
        return cls(number, process, began_s)

    async def stop(self) -> None:
        self.process.terminate()
        await self.process.wait()


async def measure(arguments: argparse.Namespace, directory: Path) -> None:
    """In the server's namespace."""
    model = make_tiny_vl(directory / "model")
    spec = replace(sampler_config(model, directory / "scratch"), name=MODEL, fingerprint=fingerprint(model))
    pool = SamplerPool(spec, may_grow=True)
    bases = RemoteBases({MODEL: spec})
    engines = RemoteEngines({MODEL: (spec, pool)}, bases)
    cluster = Cluster(Address(address(0), PORT), directory / "token", [bases, engines], {MODEL: str(model)})
    async with contextlib.AsyncExitStack() as running:
        began_s = time.perf_counter()
        running.push_async_callback(pool.stop)
        await pool.start()
        print(f"  an engine's start alone                  {time.perf_counter() - began_s:8.1f} s")
        running.push_async_callback(cluster.stop)
        await cluster.start(ignore_loading)
        for number in range(1, arguments.machines + 1):
            machine = await Machine.start(number, directory)
            running.push_async_callback(machine.stop)
            await join_to_first_use(machine, cluster, pool)
        await hand_over(pool.engines[1:], arguments, directory)


async def join_to_first_use(machine: Machine, cluster: Cluster, pool: SamplerPool) -> None:
    """One machine after the other: they share this one's cores."""
    while str(machine.number) not in cluster.nodes:  # noqa: ASYNC110 - it has no event for others
        await asyncio.sleep(0.02)
    joined_s = time.perf_counter()
    engine = pool.engines[machine.number]
    while not engine.supervisor.is_alive:  # noqa: ASYNC110 - likewise
        await asyncio.sleep(0.02)
    ready_s = time.perf_counter()
    print(f"  machine {machine.number}: from join to a member         {joined_s - machine.began_s:8.1f} s")
    print(f"  machine {machine.number}: from join to the first token  {ready_s - machine.began_s:8.1f} s")


async def hand_over(engines: list[EngineClient], arguments: argparse.Namespace, directory: Path) -> None:
    """An adapter's bytes reach all machines, and each has written them."""
    size = arguments.mib << 20
    floor_s = 8 * size * len(engines) / (arguments.gbit[0] * 1e9)
    times = []
    for number in range(arguments.rounds + 1):
        weights = directory / f"weights-{number}"
        weights.mkdir()
        (weights / ADAPTER_FILE).write_bytes(np.random.default_rng(number).bytes(size))
        began_s = time.perf_counter()
        await asyncio.gather(*(_send(engine, weights) for engine in engines))
        times.append(time.perf_counter() - began_s)
    median_s = statistics.median(times[1:])
    print(f"  {arguments.mib} MiB to {len(engines)} machines, median of {arguments.rounds}  {median_s:8.2f} s")
    print(f"    the floor                              {floor_s:8.2f} s: {median_s / floor_s:.2f} times as long")


async def train(arguments: argparse.Namespace, directory: Path) -> None:
    """Steps of one replica, and of two whose gradients travel in float32 and in bfloat16. In the server's namespace."""
    model = make_tiny_of("qwen3", directory / "wide", **WIDE)
    batch = cross_entropy([datum(prompt(words(64, seed)), make_renderer(model), seed) for seed in range(8)])
    one_s = 0.0
    spec = replace(config(model), name=MODEL, fingerprint=fingerprint(model), max_lora_rank=RANK)
    for across in DTYPES:
        spec = replace(spec, across_dtype=across)
        trainer = TrainerClient(spec)
        bases = RemoteBases({MODEL: spec})
        replicas = RemoteReplicas(address(0), {MODEL: (spec, trainer)}, bases, RemoteEngines({}, bases))
        cluster = Cluster(Address(address(0), PORT), directory / "token", [bases, replicas], {MODEL: str(model)})
        async with contextlib.AsyncExitStack() as running:
            running.push_async_callback(trainer.stop)
            await trainer.start()
            trained = await trainer.create_model("m", Trainable(rank=RANK, seed=1, layout="service"), "owner")
            if not one_s:
                one_s = await step_s(trainer, trained, batch, arguments.rounds)
                print(f"  a step of one replica                    {one_s:8.2f} s")
            running.push_async_callback(cluster.stop)
            await cluster.start(ignore_loading)
            machine = await Machine.start(1, directory)
            running.push_async_callback(machine.stop)
            await until_on(trainer, "here", "1")
            trained = await trainer.create_model("m", Trainable(rank=RANK, seed=1, layout="service"), "owner")
            two_s = await step_s(trainer, trained, batch, arguments.rounds)
            await trainer.save(trained, directory / across, "state")
        count = sum(one.numel() for one in load_file(directory / across / ADAPTER_FILE).values())
        size = count * getattr(torch, across).itemsize
        floor_s = one_s / 2 + 8 * size / (arguments.gbit[0] * 1e9)
        print(f"  a step of two, {size >> 20} MiB in {across:8s}         {two_s:8.2f} s")
        print(f"    the floor                              {floor_s:8.2f} s: {two_s / floor_s:.2f} times as long")


async def step_s(trainer: TrainerClient, model: LoadedModel, batch: EncodedBatch, rounds: int) -> float:
    """Return the median time of a forward_backward and its optim_step, after a first one."""
    times = []
    for _ in range(rounds + 1):
        began_s = time.perf_counter()
        await trainer.forward_backward(model, batch, backward=True)
        await trainer.optim_step(model, AdamParams())
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[1:])


async def _send(engine: EngineClient, weights: Path) -> None:
    child = await engine.running()
    await child.call(Receive(weights, await asyncio.to_thread(read_files, weights)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gbit", type=float, nargs="+", default=[10, 1])
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--mib", type=int, default=126, help="an adapter of rank 32 on a 4 B model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        with tempfile.TemporaryDirectory(prefix="tinker-cluster-") as directory:
            asyncio.run(measure(arguments, Path(directory)))
            asyncio.run(train(arguments, Path(directory)))
        return
    for gbit in arguments.gbit:
        print(f"{gbit:g} Gbit/s", flush=True)
        with network(arguments.machines + 1, gbit):
            command = [sys.executable, __file__, "--inside", "--gbit", str(gbit), "--machines", str(arguments.machines)]
            command += ["--mib", str(arguments.mib), "--rounds", str(arguments.rounds)]
            subprocess.run(["ip", "netns", "exec", namespace(0), *command], check=True)


if __name__ == "__main__":
    main()
