"""Slow-down of a training run by open pages of the dashboard, in alternating watched and unwatched steps.

    python benchmarks/watched_training.py [--turns 4] [--steps 60] [--pages 2]

A server with the small model that comes with it, as a user starts it, and batches of photographs through the SDK. Each
page is a process that holds the stream of events open and asks for what the page of a run asks for, as often. It works
on the same cores; a browser would elsewhere, so the time of these processes is printed beside the difference.
"""

import argparse
import itertools
import multiprocessing
import statistics
import sys
import tempfile
import time
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

import httpx
import psutil
import tinker
import tinker.types as types

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.factories import datum, make_renderer, prompt, words
from tests.photographs import photographs
from tests.servers import Server, sdk_datum
from tinker_server.api_schemas.inputs import ImageChunk
from tinker_server.backends.inputs.rendering import Renderer

MODEL = Path(__file__).resolve().parents[1] / "tinker_server" / "tiny_vl"
BATCH = 16
PARTS = ("summary", "operations", "checkpoints", "curves.json")


def main() -> None:
    """Measure watched and unwatched steps, and print their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pages", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "data", {"tiny": MODEL}).start()
        try:
            measure(server, arguments.turns, arguments.steps, arguments.pages)
        finally:
            server.stop()


def measure(server: Server, num_turns: int, num_steps: int, num_pages: int) -> None:
    """Time the steps of one run; the first turn is a warm-up."""
    training = server.client().create_lora_training_client("tiny", rank=8)
    url = f"{server.base_url}/runs/{training.get_info().model_id}"
    renderer = make_renderer(MODEL)
    batches = itertools.cycle([batch(number, renderer) for number in range(4)])
    times: dict[bool, list[float]] = {False: [], True: []}
    process = psutil.Process(server.process.pid)
    computed_s = {False: 0.0, True: 0.0}
    asked, own_s = 0, 0.0
    for turn in range(2 * num_turns + 1):
        is_watched = turn % 2 == 1
        before_s = cpu_s(process)
        with Pages(server.base_url, url, num_pages if is_watched else 0) as pages:
            steps = [step(training, next(batches)) for _ in range(num_steps)]
        asked += pages.num_asked()
        own_s += pages.cpu_s()
        if turn:
            times[is_watched] += steps
            computed_s[is_watched] += cpu_s(process) - before_s
    bare, watched = (statistics.median(times[kind]) for kind in (False, True))
    print(
        f"a step of {BATCH} photographs: {1e3 * bare:.1f} ms unwatched, {1e3 * watched:.1f} ms beside {num_pages} pages"
    )
    print(
        f"watched over unwatched: {watched / bare:.3f}; {asked} requests of pages in {num_turns * num_steps} steps, and"
        f" {1e3 * own_s / (num_turns * num_steps):.1f} ms of the pages' own computing a step"
    )
    server_ms = [1e3 * computed_s[kind] / (num_turns * num_steps) for kind in (False, True)]
    print(
        f"the server's process computes {server_ms[0]:.1f} ms a step unwatched, {server_ms[1]:.1f} ms watched, which is"
        f" {(server_ms[1] - server_ms[0]) / (1e3 * bare):.1%} of a step more"
    )


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of a process."""
    used = process.cpu_times()
    return used.user + used.system


def step(training: tinker.TrainingClient, data: list[types.Datum]) -> float:
    """Return the seconds of a forward_backward and its optim_step."""
    began = time.perf_counter()
    passed = training.forward_backward(data, "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-4))
    passed.result()
    stepped.result()
    return time.perf_counter() - began


def batch(number: int, renderer: Renderer) -> list[types.Datum]:
    """Make photographs with a few tokens after each."""
    photos = photographs("train", BATCH * (number + 1))[-BATCH:]
    inputs = [prompt(ImageChunk(data=photo.jpeg, format="jpeg"), words(8)) for photo in photos]
    return [sdk_datum(datum(one, renderer)) for one in inputs]


class Pages:
    """A number of open pages, from the first answer of each until the end of the block."""

    def __init__(self, base_url: str, url: str, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ended = context.Event()
        self._counts = [context.Value("i", 0) for _ in range(number)]
        self._computed = [context.Value("d", 0.0) for _ in range(number)]
        self._open = [
            context.Process(target=watch, args=(base_url, url, self._ended, *values), daemon=True)
            for values in zip(self._counts, self._computed, strict=True)
        ]

    def __enter__(self) -> "Pages":
        for process in self._open:
            process.start()
        while not all(count.value for count in self._counts):
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for process in self._open:
            process.join(30)

    def num_asked(self) -> int:
        """Return the number of requests of all pages."""
        return sum(count.value for count in self._counts)

    def cpu_s(self) -> float:
        """Return the CPU seconds of all pages' processes since their first answers."""
        total: float = sum(value.value for value in self._computed)
        return total


def watch(base_url: str, url: str, ended: Event, count: "Synchronized[int]", computed_s: "Synchronized[float]") -> None:
    """Request the same as the page of a run does in a browser."""
    begun_s = 0.0
    with httpx.Client(timeout=60) as client, client.stream("GET", f"{base_url}/live") as events:
        for line in itertools.chain(["event: changed"], events.iter_lines()):
            if ended.is_set():
                return
            if line == "event: changed":
                for part in PARTS:
                    client.get(f"{url}/{part}").raise_for_status()
                    begun_s = begun_s or time.process_time()
                    count.value += 1
                    computed_s.value = time.process_time() - begun_s


if __name__ == "__main__":
    main()
