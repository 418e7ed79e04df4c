"""Cost of being able to restore models, and the time of a restore after the trainer dies, on the CPU.

    python benchmarks/recovery.py [--rounds 5] [--steps 20] [--disk-only]

Rounds of steps (a forward_backward of text and images, an optim_step) on the true trainer, without HTTP, in turns: with
no log, with the log, and with a snapshot in every round. Other work on the machine shows in all of them.

Before that, the bytes of a log on disk, on a trainer that computes nothing: epochs over 64 photographs, 8 to a batch.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests import submitting
from tests.factories import MIXED, datum, make_renderer
from tests.photographs import photographs
from tests.recovery import RealTrainer, finished, server
from tests.submitting import Client
from tinker_server.api_schemas.inputs import Datum, ImageChunk, ModelInput
from tinker_server.api_schemas.training import ForwardBackwardInput, ForwardBackwardRequest, LoraConfig
from tinker_server.app import REPLAY_S
from tinker_server.models import model
from tinker_server.web import submission

MODEL = Path(__file__).resolve().parents[1] / "tinker_server" / "tiny_vl"
LOGGED: tuple[str, ...] = model.LOGGED


class Work:
    """Steps of one model."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._seq_id = -1
        renderer = make_renderer(MODEL)
        self._loss_input = {"data": [datum(item, renderer) for item in MIXED.values()], "loss_fn": "cross_entropy"}

    async def step(self) -> None:
        lane = self._client.model_id
        self._seq_id += 2
        fields = {"model_id": lane, "seq_id": self._seq_id, "forward_backward_input": self._loss_input}
        request = ForwardBackwardRequest.model_validate(fields)
        passed = await self._client.submit("forward_backward", request, self._seq_id)
        stepped = await self._client.optim_step(self._seq_id + 1)
        for request_id in (passed, stepped):
            result = await finished(self._client, request_id)
            assert not result.failed, result.body


async def log_bytes(num_steps: int) -> int:
    """Return the log's bytes on disk for a number of batches and steps, without a snapshot."""
    photos = [ImageChunk(data=photo.jpeg, format="jpeg") for photo in photographs("train", 64)]
    targets = {"target_tokens": np.ones(1, np.int64)}
    data = [Datum(model_input=ModelInput(chunks=[photo]), loss_fn_inputs=targets) for photo in photos]
    with tempfile.TemporaryDirectory() as name:
        async with submitting.server(Path(name), log_bytes=1 << 40) as client:
            await client.result(await client.create_model())
            begun_bytes = size_bytes(Path(name))
            for number in range(1, 2 * num_steps, 2):
                first = 4 * (number - 1) % len(data)
                loss_input = ForwardBackwardInput(data=data[first : first + 8], loss_fn="cross_entropy")
                request = ForwardBackwardRequest(
                    model_id=client.model_id, seq_id=number, forward_backward_input=loss_input
                )
                await client.result(await client.submit("forward_backward", request, number))
                await client.result(await client.optim_step(number + 1))
            return size_bytes(Path(name)) - begun_bytes


async def measure_disk(num_steps: int) -> None:
    """Measure the log with each image stored once, and with it in every body."""
    once = await log_bytes(num_steps)
    submission.SMALLEST_IMAGE_BYTES = 1 << 40
    in_bodies = await log_bytes(num_steps)
    for how, found in (("once", once), ("in every body", in_bodies)):
        print(f"images {how}: {found / (2 * num_steps) * 1000 / 2**20:.1f} MiB on disk for 1,000 operations")


def size_bytes(data_dir: Path) -> int:
    return sum(path.stat().st_size for path in data_dir.rglob("*") if path.is_file())


async def measure(rounds: int, steps: int) -> None:
    backend, times_s = RealTrainer(MODEL), defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory() as name:
        data_dir = Path(name)
        async with server(data_dir, backend) as client:
            created = await client.create_model(lora_config=LoraConfig(rank=32, seed=1))
            assert not (await finished(client, created)).failed
            work = Work(client)
            await work.step()
            begun_bytes = size_bytes(data_dir)
            for _ in range(rounds):
                for how in ("no log", "log", "log and snapshot"):
                    model.LOGGED = () if how == "no log" else LOGGED
                    began = time.perf_counter()
                    for number in range(steps):
                        if how == "log and snapshot" and number == 0:
                            client.services.scheduler.actor(client.model_id).model.log.must_end = True
                        await work.step()
                    times_s[how].append(time.perf_counter() - began)
                    await client.services.scheduler.actor(client.model_id).model.settle()
            model.LOGGED = LOGGED
            num_operations = 2 * steps * rounds * 3
            print(
                f"{(size_bytes(data_dir) - begun_bytes) / num_operations * 1000 / 2**20:.1f} MiB per 1,000 operations"
            )
            for _ in range(steps):
                await work.step()
            backend.kill()
            began = time.perf_counter()
            await work.step()
            print(f"{time.perf_counter() - began:.1f} s from the trainer's death to the next step's result")
    medians = {how: statistics.median(found) for how, found in times_s.items()}
    for how, seconds in medians.items():
        print(f"{how}: {seconds / steps * 1e3:.1f} ms a step ({', '.join(f'{one:.2f}' for one in times_s[how])} s)")
    share = (medians["log and snapshot"] - medians["log"]) / REPLAY_S
    print(f"log: {medians['log'] / medians['no log'] - 1:+.1%}; snapshots every {REPLAY_S:.0f} s of work: {share:+.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--disk-only", action="store_true")
    arguments = parser.parse_args()
    asyncio.run(measure_disk(500))
    if not arguments.disk_only:
        asyncio.run(measure(arguments.rounds, arguments.steps))
