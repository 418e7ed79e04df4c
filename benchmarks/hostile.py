"""Harm that one owner's hostile requests do to another's, on a real server with a tiny model.

    python benchmarks/hostile.py [--only WORD]

For each attack: the largest growth of the API process's resident memory and of the data directory, its longest silence
(/healthz, asked every 20 ms), and another owner's submits of a sample and one-token chats, beside the same figures of a
quiet server. The ledger's bound is printed with them. Client and server share the machine, so times are upper bounds.
"""

import argparse
import multiprocessing
import socket
import statistics
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.hostile_inputs import INPUTS
from benchmarks.hostile_requests import CONTEXT, MIB, REQUESTS, Attack, Client
from tests.models import make_tiny_vl
from tests.servers import Server
from tinker_server.auth import keys
from tinker_server.settings import Settings
from tinker_server.web.ledger import BODIES_DECODED, BODIES_OF_ALL, RESULTS_OF_ALL

ATTACKS: dict[str, Attack] = {"nothing": lambda _: time.sleep(5), **REQUESTS, **INPUTS}
MAX_CONTEXT = 2 * CONTEXT
"""The most that the model takes, for a large picture."""
COLUMNS = (
    "attack",
    "took, s",
    "memory, MiB",
    "of children, MiB",
    "disk, MiB",
    "longest silence, ms",
    "others' submits, ms: median, largest",
    "others' chats, ms: median, largest",
    "log, KiB",
)


@dataclass
class Seen:
    """What another owner and the operator saw during an attack."""

    silences_s: list[float] = field(default_factory=list)
    submits_s: list[float] = field(default_factory=list)
    chats_s: list[float] = field(default_factory=list)
    grown_bytes: int = 0
    children_grown_bytes: int = 0


def watch(pipe: Connection, other: Client, pid: int) -> None:
    """Ask /healthz, for samples and for chats, and read the memory of processes, until the pipe says so; then send what
    was seen.

    It is a process of its own, so that the attack's own work does not count.
    """
    done, seen, process = threading.Event(), Seen(), psutil.Process(pid)

    def health() -> None:
        while not done.wait(0.02):
            began = time.monotonic()
            other.http.get("/api/v1/healthz")
            seen.silences_s.append(time.monotonic() - began)

    def submits() -> None:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * 1000}]}  # large enough to be read in a thread
        while not done.wait(0.1):
            began = time.monotonic()
            other.call("asample", base_model="tiny", prompt=prompt, sampling_params={"max_tokens": 1}, num_samples=1)
            seen.submits_s.append(time.monotonic() - began)

    def chats() -> None:
        while not done.wait(0.1):
            began = time.monotonic()
            assert other.chat().status_code == 200
            seen.chats_s.append(time.monotonic() - began)

    def memory() -> None:
        before, children_before = process.memory_info().rss, children_bytes(process)
        while not done.wait(0.02):
            seen.grown_bytes = max(seen.grown_bytes, process.memory_info().rss - before)
            seen.children_grown_bytes = max(seen.children_grown_bytes, children_bytes(process) - children_before)

    for _ in range(3):
        other.chat()
    threads = [threading.Thread(target=one) for one in (health, submits, chats, memory)]
    for thread in threads:
        thread.start()
    pipe.send("watching")
    pipe.recv()
    done.set()
    for thread in threads:
        thread.join()
    pipe.send(seen)


def children_bytes(process: psutil.Process) -> int:
    """Return the resident memory of a process's children."""
    total = 0
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += child.memory_info().rss
    return total


def disk_bytes(folder: Path) -> int:
    """Return the bytes that the files of a folder take on the disk."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.lstat().st_blocks * 512
    return total


def main() -> None:
    """Run the attacks one after the other, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word of the attacks' names")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data_dir, images = Path(folder) / "data", Path(folder) / "images"
        images.mkdir()
        image_port = free_port()
        mallory, alice = (keys.add(data_dir / "keys", name) for name in ("mallory", "alice"))
        server = Server(
            data_dir,
            {"tiny": make_tiny_vl(Path(folder) / "tiny")},
            "--max-context",
            str(MAX_CONTEXT),
            image_hosts=f'["127.0.0.1:{image_port}"]',
            image_directories=f'["{images}"]',
        ).start()
        clients = [Client(server.port, key, images, image_port) for key in (mallory, alice)]
        try:
            largest = BODIES_OF_ALL + 4 * BODIES_DECODED + RESULTS_OF_ALL  # what is decoded is there four times
            bound = largest * Settings(data_dir=data_dir).max_body_bytes
            print(f"the ledger's bound: {bound / MIB:.0f} MiB of bodies")
            print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
            for name, attack in ATTACKS.items():
                if arguments.only in name or name == "nothing":
                    measure(name, attack, server, clients, data_dir)
        finally:
            server.stop()


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def measure(name: str, attack: Attack, server: Server, clients: list[Client], data_dir: Path) -> None:
    """Print one line of the table."""
    hostile, other = clients
    log_before, disk_before = server.log.stat().st_size, disk_bytes(data_dir)
    ours, theirs = multiprocessing.Pipe()
    watching = multiprocessing.get_context("spawn").Process(
        target=watch_as,
        args=(theirs, (other.port, other.key, other.images, other.image_port), server.process.pid),
        daemon=True,
    )
    watching.start()
    ours.recv()
    began = time.monotonic()
    attack(hostile)
    took_s = time.monotonic() - began
    ours.send("enough")
    seen: Seen = ours.recv()
    watching.join()
    grown = [seen.grown_bytes, seen.children_grown_bytes, disk_bytes(data_dir) - disk_before]
    logged = (server.log.stat().st_size - log_before) / 1024
    values = [
        name,
        f"{took_s:.1f}",
        *(f"{num_bytes / MIB:.0f}" for num_bytes in grown),
        f"{1e3 * max(seen.silences_s):.0f}",
        *(f"{1e3 * statistics.median(of):.0f}, {1e3 * max(of):.0f}" for of in (seen.submits_s, seen.chats_s)),
        f"{logged:.0f}",
    ]
    print(f"| {' | '.join(values)} |", flush=True)


def watch_as(pipe: Connection, client: tuple[int, str, Path, int], pid: int) -> None:
    """Watch with a client that is made in this process."""
    watch(pipe, Client(*client), pid)


if __name__ == "__main__":
    main()
