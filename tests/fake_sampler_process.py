"""A sampler's process without an engine: `python -m tests.fake_sampler_process FD`.

The first token of a prompt says what happens: 0 answers at once, 1 after a second, 13 ends the process, 14 does
so after half a second, 7 hangs it. While a file `broken` stands in the scratch directory, everything ends it.
"""

import asyncio
import os
import time
from pathlib import Path

import numpy as np

from api_schemas.sampling import SampledSequence, SampleResponse
from backends.processes.rpc import OnPart, serve_async
from backends.protocol import ChatUsage, SamplingTask
from backends.sampler.commands import Chat, CountProgress, Sample, Start


async def sample(task: SamplingTask, broken: Path) -> SampleResponse:
    (chunk,) = task.prompt.chunks
    token = int(chunk.tokens[0])  # type: ignore[union-attr]
    await asyncio.sleep({1: 1.0, 14: 0.5}.get(token, 0))
    if token in (13, 14) or broken.exists():  # noqa: ASYNC240
        os._exit(1)
    if token == 7:
        time.sleep(1000)  # noqa: ASYNC251 - it is to hang
    tokens = np.array([token], np.int32)
    return SampleResponse(
        sequences=[SampledSequence(stop_reason="length", tokens=tokens, logprobs=np.zeros(1, np.float32))]
    )


async def main() -> None:
    broken, done = Path(), 0

    async def handle(command: Start | Sample | Chat | CountProgress, tell: OnPart) -> object:
        nonlocal broken, done
        match command:
            case Start(spec):
                broken = spec.scratch_dir / "broken"
                return None
            case Sample(task):
                response = await sample(task, broken)
                done += 1
                return response
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
