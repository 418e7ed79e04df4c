"""What restoring models costs while nothing dies, and how long it takes when the trainer does, on the CPU.

    python benchmarks/recovery.py [--rounds 5] [--steps 20]

Rounds of steps (a forward_backward of text and images, an optim_step) on the true trainer, without HTTP, in turns: with
no log, with the log, and with a snapshot in every round. Other work on the machine shows in all of them.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from api_schemas.training import ForwardBackwardRequest, LoraConfig
from tests.contract.test_recovery import RealTrainer, finished, server
from tests.factories import MIXED, datum, make_renderer
from tests.submitting import Client
from tinker_server import snapshots
from tinker_server.app import REPLAY_S

MODEL = Path(__file__).resolve().parents[1] / "tinker_server" / "tiny_vl"
LOGGED: tuple[str, ...] = snapshots.LOGGED


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


def size_bytes(data_dir: Path) -> int:
    return sum(path.stat().st_size for path in data_dir.rglob("*") if path.is_file())


async def measure(rounds: int, steps: int) -> None:
    backend, times_s = RealTrainer(MODEL), defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory() as name:
        data_dir = Path(name)
        async with server(data_dir, backend) as client:
            created = await client.create_model(lora_config=LoraConfig(rank=32, seed=1))
            assert not (await finished(client, created)).failed
            work, models = Work(client), client.services.models
            await work.step()
            begun_bytes = size_bytes(data_dir)
            for _ in range(rounds):
                for how in ("no log", "log", "log and snapshot"):
                    snapshots.LOGGED = () if how == "no log" else LOGGED
                    began = time.perf_counter()
                    for number in range(steps):
                        if how == "log and snapshot" and number == 0:
                            client.services.snapshots._logs[client.model_id].must_end = True
                        await work.step()
                    times_s[how].append(time.perf_counter() - began)
                    await models.settle(client.model_id)
            snapshots.LOGGED = LOGGED
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
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.rounds, arguments.steps))
