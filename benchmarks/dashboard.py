"""Time to the first byte of each page of the dashboard, and the longest stall of the server's event loop meanwhile.

    python benchmarks/dashboard.py [--runs 1000] [--steps 1000000] [--database-url URL]

A server on fakes, with so many runs and recorded steps of one owner: one run has a tenth of all steps, the others
share the rest. Each page is asked for alone, `REPEATS` times; it prints the median and worst time to the first byte,
and the longest time in which a ready task of the server's loop had to wait. By hand, in a minute or two.
"""

import argparse
import asyncio
import itertools
import multiprocessing
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import httpx
import numpy as np
from sqlalchemy import URL, insert

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fake_server import Running
from tinker_server.api_schemas.inputs import EncodedTextChunk, ModelInput
from tinker_server.api_schemas.sampling import SampledSequence, SampleRequest, SampleResponse, SamplingParams
from tinker_server.api_schemas.training import Trainable
from tinker_server.observability.kept_datums import KeptBatch, KeptDatum
from tinker_server.observability.recent_samples import Drawn
from tinker_server.settings import Settings
from tinker_server.store.database import Database
from tinker_server.store.records import Checkpoint, columns
from tinker_server.store.steps import STEPS
from tinker_server.store.tables import AuditEntryRow, CheckpointRow, SessionRow, TrainingRunRow, UsageRow

REPEATS, DAY_S = 7, 24 * 3600.0
ROWS_AT_ONCE = 20_000
BIG = "big:train:0"


def main() -> None:
    """Fill a database, start a server on it, ask for every page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--database-url", default="", help="of an empty database (SQLite in a scratch folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = Settings(data_dir=Path(folder), database_url=arguments.database_url).resolve_database_url()
        began = time.perf_counter()
        asyncio.run(fill(url, arguments.runs, arguments.steps))
        print(f"{arguments.runs} runs, {arguments.steps} steps, filled in {time.perf_counter() - began:.0f} s")
        server = Running(Path(folder), database_url=arguments.database_url)
        try:
            server.loop.call_soon_threadsafe(fill_gallery, server)
            measure(server)
        finally:
            server.stop()


async def fill(url: str | URL, num_runs: int, num_steps: int) -> None:
    """Write one session, its runs, and their steps."""
    db = Database(url, synchronous="normal")
    await db.migrate()
    now = time.time()
    session_row = {
        "session_id": "big",
        "owner": "local",
        "tags": [],
        "user_metadata": {},
        "sdk_version": "0.38.0",
        "created_at": now,
        "last_heartbeat": now,
    }
    async with db.write() as session:
        await session.execute(insert(SessionRow), [session_row])
        await session.execute(insert(TrainingRunRow), [run_row(number, now) for number in range(num_runs)])
    await fill_records(db, now)
    share = (num_steps - num_steps // 10) // (num_runs - 1)
    of_runs = [(number, num_steps // 10 if number == 0 else share) for number in range(num_runs)]
    rows = (step_row(number, seq_id, now) for number, count in of_runs for seq_id in range(count))
    while batch := list(itertools.islice(rows, ROWS_AT_ONCE)):
        async with db.write() as session:
            await session.execute(insert(STEPS), batch)
    await db.close()


async def fill_records(db: Database, now: float) -> None:
    """Write the most that the pages of records and marks show: entries of a day, 92 days of usage, 100 checkpoints."""
    day = int(now // DAY_S)
    entries = [
        {
            "entry_id": f"{number}",
            "owner": "local",
            "at": day * DAY_S + number / 100,
            "event": "run_deleted",
            "details": {},
        }
        for number in range(2000)
    ]
    usage = [
        {
            "hour": (day - number) * DAY_S,
            "owner": "local",
            "session_id": "big",
            "base_model": "tiny",
            "kind": kind,
            "amount": 10**6,
        }
        for number in range(92)
        for kind in ("training", "prefill", "sampled", "checkpoint", "trainer_ms")
    ]
    saved = [
        columns(
            Checkpoint(
                tinker_path=f"tinker://{BIG}/weights/at-{number}",
                owner="local",
                run_id=BIG,
                kind="weights",
                name=f"at-{number}",
                directory=f"none/{number}",
                base_model="tiny",
                trainable=Trainable(rank=8, seed=0),
                size_bytes=1,
                created_at=now + number,
                saved_as=20 * number + 2,
            )
        )
        for number in range(100)
    ]
    async with db.write() as session:
        await session.execute(insert(AuditEntryRow), entries)
        await session.execute(insert(UsageRow), usage)
        await session.execute(insert(CheckpointRow), saved)


def fill_gallery(server: Running) -> None:
    """Keep samples and datums of as many steps as there may be."""
    gallery = server.app.state.services.gallery
    tokens = np.arange(160, dtype=np.int32)
    sequence = SampledSequence(stop_reason="stop", tokens=tokens, logprobs=-np.ones(160, np.float32))
    prompt = ModelInput(chunks=[EncodedTextChunk(tokens=tokens)])
    asked = SampleRequest(base_model="tiny", prompt=prompt, sampling_params=SamplingParams(max_tokens=1))
    datum = KeptDatum(
        index=0,
        prompt=0,
        tokens=np.arange(512, dtype=np.int32),
        logprobs=-np.ones(512, np.float32),
        push=np.ones(512, np.float32),
        advantage=1.0,
        loss=1.0,
        gradient_norm=1.0,
    )
    for step in range(100):
        directory = f"checkpoints/{BIG}/snapshot/{2 * step + 1}~a"
        for _ in range(4):
            gallery.note(asked, SampleResponse(sequences=[sequence]), "local", Drawn("tiny", None, directory))
        batch = KeptBatch(
            owner="local",
            run_id=BIG,
            step=step,
            base_model="tiny",
            loss_fn="ppo",
            num_datums=8,
            prompts={0: prompt},
            largest=[datum] * 4,
            group=[datum] * 8,
            size_bytes=100_000,
        )
        gallery.put(batch)


def run_row(number: int, now: float) -> dict[str, object]:
    """Make the row of a run that is on disk."""
    return {
        "model_id": f"big:train:{number}",
        "owner": "local",
        "session_id": "big",
        "model_seq_id": number,
        "base_model": "tiny",
        "trainable": Trainable(rank=8, seed=0),
        "optimizer_config": {"type": "adamw"},
        "status": "suspended",
        "created_at": now + number,
    }


def step_row(number: int, seq_id: int, now: float) -> dict[str, object]:
    """Make the row of a batch, or of the optim_step after it."""
    is_batch = seq_id % 2 == 0
    return {
        "model_id": f"big:train:{number}",
        "seq_id": seq_id + 1,
        "step": seq_id // 2,
        "at": now + seq_id,
        "tokens": 512 * is_batch,
        "total_tokens": 256 * seq_id,
        "loss": 1.0 if is_batch else None,
        "loss_tokens": 512 if is_batch else None,
        "learning_rate": None if is_batch else 1e-4,
        "grad_norm": None if is_batch else 1.0,
        "waited_s": 0.1,
        "run_s": 0.5,
    }


def measure(server: Running) -> None:
    """Print a line for each page."""
    paths = {
        "runs": "/",
        "runs, the last page": "/?page=20",
        "runs, searched": "/runs?q=tiny+99",
        "runs, grouped": "/runs?group=base_model",
        "a run": f"/runs/{BIG}",
        "its summary": f"/runs/{BIG}/summary",
        "its operations": f"/runs/{BIG}/operations",
        "its curves": f"/runs/{BIG}/curves.json",
        "its curves, zoomed": f"/runs/{BIG}/curves.json?first=1000&last=1500",
        "its checkpoints": f"/runs/{BIG}/checkpoints",
        "its step": f"/runs/{BIG}/step?step=100",
        "its datums": f"/runs/{BIG}/datums?step=100",
        "its marks": f"/runs/{BIG}/marks.json",
        "settings of 8 runs": f"/runs/{BIG}/settings?" + "&".join(f"with=big:train:{n}" for n in range(1, 8)),
        "its CSV": f"/runs/{BIG}/steps.csv",
        "curves of another": "/runs/big:train:7/curves.json",
        "samples": "/samples",
        "samples of a run": f"/samples?run={BIG}",
        "usage": "/usage?days=92",
        "audit": "/audit",
        "playground": "/playground",
        "machine": "/machine",
        "metrics": "/metrics",
    }
    print("milliseconds to the first byte, the median and the worst; and of the loop's longest stall")
    print(f"{'page':<24}{'median':>10}{'worst':>10}{'stall':>10}")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as elsewhere:
        for name, path in paths.items():
            asked = [ask(server, elsewhere, path) for _ in range(REPEATS)]
            times, stalls = zip(*asked, strict=True)
            median = statistics.median(times)
            print(f"{name:<24}{median * 1e3:>10.1f}{max(times) * 1e3:>10.1f}{max(stalls) * 1e3:>10.1f}")


def ask(server: Running, elsewhere: ProcessPoolExecutor, path: str) -> tuple[float, float]:
    """Return the seconds to the first byte of the body, and the longest stall until its last."""
    done = asyncio.Event()
    watching = asyncio.run_coroutine_threadsafe(longest_stall(done), server.loop)
    try:
        first_byte_s = elsewhere.submit(read, server.url, path).result(120)
    finally:
        server.loop.call_soon_threadsafe(done.set)
    return first_byte_s, watching.result(60)


async def longest_stall(done: asyncio.Event) -> float:
    """Return the loop's longest stall, at most this process's CPU time in it, so that other processes do not count."""
    longest, pause_s = 0.0, 0.001
    while not done.is_set():
        wall, own = time.perf_counter(), time.process_time()
        await asyncio.sleep(pause_s)
        longest = max(longest, min(time.perf_counter() - wall - pause_s, time.process_time() - own))
    return longest


def read(url: str, path: str) -> float:
    """In a process of its own: read the whole answer; seconds until its first byte."""
    with httpx.Client(base_url=url, headers={"x-api-key": "tml-test"}, timeout=60) as client:
        client.get("/api/v1/healthz")  # the connection is there
        began = time.perf_counter()
        with client.stream("GET", path) as answer:
            assert answer.status_code == 200, (path, answer.status_code)
            parts = answer.iter_raw()
            next(parts, b"")
            first_byte_s = time.perf_counter() - began
            for _ in parts:
                pass
    return first_byte_s


if __name__ == "__main__":
    main()
