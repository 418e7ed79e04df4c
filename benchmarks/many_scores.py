"""All photographs of a parquet file scored at once through the SDK, with the log probabilities of their prompts.

    python benchmarks/many_scores.py PARQUET [--count N]

Each is a request of its own, all on their way together, to the embedded model; the file is one of those that
`examples/tiny_vl` reads. Prints the time, how many were answered, and what each of the server's processes came to hold
in memory. Needs pyarrow.
"""

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import tinker.types as types

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "tiny_vl"))
from through_server import read_parquet

from tests.photographs import SEEING, conversation
from tests.servers import Server
from tinker_server.embedded import TINY_VL

MIB = 2**20


class Memory:
    """Memory of each descendant of a process: at first, and at most."""

    def __init__(self, root: psutil.Process) -> None:
        self._processes = [root, *root.children(recursive=True)]
        self._first = self._held()
        self._most = list(self._first)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        for process, first, most in zip(self._processes, self._first, self._most, strict=True):
            if most > 100 * MIB:
                name = " ".join(" ".join(process.cmdline()).split()[1:4])
                print(f"{name:<40}{first / MIB:>8.0f} MiB before, {most / MIB:.0f} at most", flush=True)

    def _held(self) -> list[int]:
        return [process.memory_info().rss for process in self._processes]

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            self._most = [max(pair) for pair in zip(self._most, self._held(), strict=True)]


async def score(server: Server, prompts: Sequence[types.ModelInput]) -> None:
    """Print the time that it took and the number of answers."""
    sampler = await server.client().create_sampling_client(base_model=TINY_VL)
    one_token = types.SamplingParams(max_tokens=1, temperature=0)

    async def one(prompt: types.ModelInput) -> float:
        answer = await sampler.sample(prompt, 1, one_token, include_prompt_logprobs=True)
        assert answer.prompt_logprobs is not None
        return float(np.mean([logprob for logprob in answer.prompt_logprobs if logprob is not None]))

    await one(prompts[0])
    began = time.perf_counter()
    found = await asyncio.gather(*map(one, prompts), return_exceptions=True)
    took_s = time.perf_counter() - began
    failed = [result for result in found if isinstance(result, BaseException)]
    means = [result for result in found if not isinstance(result, BaseException)]
    print(f"{len(means)} answered, {len(failed)} failed, in {took_s:.0f} s: {len(means) / took_s:.1f} a second")
    print(
        f"log probability of a prompt's token {np.mean(means):.3f} nats on average", *failed[:3], sep="\n", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parquet", type=Path)
    parser.add_argument("--count", type=int, help="of photographs (all)")
    given = parser.parse_args()
    asked = conversation()
    prompts = [asked.prompt(photo) for photo in read_parquet(given.parquet)[: given.count]]
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "data", {TINY_VL: SEEING}).start()
        memory = Memory(psutil.Process(server.process.pid))
        try:
            asyncio.run(score(server, prompts))
        finally:
            memory.stop()
            server.stop()


if __name__ == "__main__":
    main()
