"""A sampler's process without an engine: `python -m tests.fake_sampler_process FD`.

The first token of a prompt says what happens: 0 answers at once, 1 after a second, 13 ends the process, 14 does
so after half a second, 7 hangs it. While a file `broken` stands in the scratch directory, everything ends it; while a
file `unwritten` does, prompts are scored otherwise than drawn. What is published is noted in the file `published`, and
what is read into a slot in `filled`; weights named `slow` are published after half a second, `refused-N` are refused by
engine N, `deadly-N` end it, and `deadly` every engine, and `unreceived-N` ends it when it is sent them, which others
note in the file `received`. What other engines have running is noted in the file `elsewhere`.
"""

import asyncio
import json
import os
import time
from collections import Counter
from pathlib import Path

import numpy as np

from tinker_server.api_schemas.sampling import SampledSequence, SampleResponse
from tinker_server.backends.processes.rpc import OnPart, serve_async
from tinker_server.backends.protocol import BackendFailed, ChatUsage, SamplingTask
from tinker_server.backends.sampler.commands import Chat, CountProgress, Publish, Receive, Sample, ShareRunning, Start
from tinker_server.backends.sampler.received import ReceivedWeights


async def sample(task: SamplingTask, broken: Path) -> SampleResponse:
    (chunk,) = task.prompt.chunks
    token = int(chunk.tokens[0])  # type: ignore[union-attr]
    await asyncio.sleep({1: 1.0, 14: 0.5}.get(token, 0))
    if token in (13, 14) or broken.exists():  # noqa: ASYNC240
        os._exit(1)
    if token == 7:
        time.sleep(1000)  # noqa: ASYNC251 - it is to hang
    tokens = np.array([token], np.int32)
    distance = broken.with_name("unwritten").exists()
    numbers = range(task.first, task.first + task.num_samples)
    return SampleResponse(
        sequences=[
            SampledSequence(stop_reason="length", tokens=tokens, logprobs=np.full(1, -number, np.float32))
            for number in numbers
        ],
        prompt_logprobs=np.full(len(chunk.tokens), -float(distance)) if task.scores.logprobs else None,  # type: ignore[union-attr]
    )


async def publish(weights: Path, directory: Path, engine: int | None, *, only_reads: bool) -> None:
    if only_reads:
        (directory / "filled").write_text(weights.name)
        return
    if weights.name == "slow":
        await asyncio.sleep(0.5)
    if weights.name in ("deadly", f"deadly-{engine}"):
        os._exit(1)
    if weights.name == f"refused-{engine}":
        raise BackendFailed("the scores differ")
    (directory / "published").write_text(weights.name)


async def main() -> None:
    broken, done, engine = Path(), 0, None
    running, received = Counter[str](), ReceivedWeights(None)

    async def handle(
        command: Start | Sample | Chat | Publish | Receive | ShareRunning | CountProgress, tell: OnPart
    ) -> object:
        nonlocal broken, done, engine, received
        match command:
            case Start(spec):
                broken, engine = spec.scratch_dir / "broken", spec.engine
                spec.scratch_dir.mkdir(parents=True, exist_ok=True)
                received = ReceivedWeights(spec.received_dir)
                return None
            case Sample(task):
                running[task.owner] += 1
                response = await sample(task, broken)
                running[task.owner] -= 1
                done += 1
                return response
            case Publish(weights, only_reads):
                received.require(weights)
                await publish(weights, broken.parent, engine, only_reads=only_reads)
                return None
            case Receive(weights, files):
                if weights.name == f"unreceived-{engine}":
                    os._exit(1)
                await asyncio.sleep(0.5)  # others ask meanwhile
                received.receive(weights, files)
                with broken.with_name("received").open("a") as file:
                    file.write(f"{weights.name} ")
                return None
            case ShareRunning(elsewhere):
                broken.with_name("elsewhere").write_text(json.dumps(elsewhere))
                return {owner: number for owner, number in running.items() if number}
            case Chat(task):
                if task.body["first"] is not None:
                    tell(task.body["first"])
                if not (died := broken.with_name("died")).exists():
                    await asyncio.sleep(0.2)
                    died.touch()
                    os._exit(1)
                tell("done")
                return ChatUsage()
            case CountProgress():
                return done

    await serve_async(handle)


if __name__ == "__main__":
    asyncio.run(main())
