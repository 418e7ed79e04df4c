"""Where the milliseconds of a decode step go: our engine beside bare vLLM (`sampling.py --steps`).

Every sequence of a case decodes until the last of them, which the engine took in last, has all its tokens. That last
sequence tells the time of a token. First all cases are timed without the profiler, then some steps of each are
profiled: what the profiler leaves in an engine's process then slows no timed case. Our engine is `SamplerProcess`'s,
but its sequences come without the server's admission, as bare vLLM's do.
"""

import asyncio
import json
import time
import traceback
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np

from benchmarks.kernel_times import COLUMNS, REST, StepTimes, read_steps
from tinker_server.backends.model_spec import ModelSpec

PROFILED = 16
"""Steps that are profiled."""
STEADY = 16
"""Tokens of the last sequence after which all are taken to decode."""
PROMPT = 64
MORE_TOKENS = 512
"""Tokens that the other sequences may draw beyond those of the last, which begins many steps later."""
PATIENCE_S = 120.0
"""Longest time of a case in a round; the engine's first profile takes seconds."""
NAMES, NAME_WIDTH = 5, 44
"""Kernels of the rest that are printed, and characters of each."""
_numbers = count()


class Side(Protocol):
    """An engine that is measured."""

    engine: Any
    """vLLM's AsyncLLM."""

    async def adapter(self, weights: Path) -> Any:
        """Return the engine's name for an adapter, which it may read later."""


@dataclass
class Case:
    """Sequences that decode together, with each an adapter of some, and what was found."""

    sequences: int
    adapters: Sequence[Path]
    """None: the base model."""
    token_ms: dict[str, list[float]] = field(default_factory=dict)
    """Without the profiler, by side and round."""
    steps: dict[str, StepTimes | None] = field(default_factory=dict)
    """With the profiler, by side; None on a CPU."""
    failures: list[str] = field(default_factory=list)

    def best_ms(self, side: str) -> float:
        """Return the time of a token, not a number where it was not measured."""
        return min(self.token_ms.get(side, []), default=float("nan"))

    @property
    def figures(self) -> dict[str, Any]:
        """All of it, for a file."""
        return {**asdict(self), "adapters": len(self.adapters)}


def profiler_config(traces: Path, *, on_gpu: bool) -> Any:
    """Return vLLM's settings of a profiler that records, of a GPU, its kernels and what launched them alone."""
    from vllm.config import ProfilerConfig

    return ProfilerConfig(
        profiler="torch",
        torch_profiler_dir=str(traces),
        torch_profiler_activities=["CUDA"] if on_gpu else None,
        torch_profiler_with_stack=False,
        torch_profiler_use_gzip=False,  # the engine waits for it
        torch_profiler_dump_cuda_time_total=False,
        ignore_frontend=True,
        max_iterations=PROFILED,
    )


def engine_params(num_tokens: int, *, streams: bool = False) -> Any:
    """Return the parameters by which bare vLLM is fastest: outputs at the end, flat logprobs."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=num_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY,
    )


class OurEngine:
    """The engine of a `SamplerProcess` in this process."""

    def __init__(self, spec: ModelSpec, profiler: Any) -> None:
        self._spec, self._profiler = spec, profiler

    async def start(self) -> None:
        """Start it as the server does, with a profiler besides."""
        from tinker_server.backends.sampler.engine import process
        from tinker_server.backends.sampler.engine.engine import engine_args

        def arguments(*given: Any) -> Any:
            return replace(engine_args(*given), profiler_config=self._profiler)

        with patch.object(process, "engine_args", arguments):
            self._process = await process.SamplerProcess.start(self._spec)
        self.engine = self._process._engine

    async def adapter(self, weights: Path) -> Any:
        """Load an adapter."""
        async with self._process._weights.hold(weights) as held:  # few enough to stay afterwards
            return await self._process._weights.load(held)

    async def stop(self) -> None:
        self.engine.shutdown()


async def measure_steps(
    sides: dict[str, Side], cases: Sequence[Case], num_tokens: int, rounds: int, traces: Path
) -> AsyncIterator[None]:
    """Measure and print all cases of one or two sides, a row at a time; yield after each. A case that fails is printed
    as failed."""
    names = list(sides)
    heads = ["sequences", "adapters", *(f"{name}, ms a token" for name in names)]
    heads += [" / ".join(names)] if len(names) == 2 else []
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|", flush=True)
    for case in cases:
        with _noting_failures(case):
            for _ in range(rounds):
                for name, side in sides.items():
                    case.token_ms.setdefault(name, []).append(await decode(side, case, num_tokens))
            found = [case.best_ms(name) for name in names]
            found += [found[0] / found[1]] if len(names) == 2 else []
            print(f"| {' | '.join((*_head(case), *(f'{number:.3f}' for number in found)))} |", flush=True)
        yield
    columns = "sequences", "adapters", "side", "ms a token", "step", "kernels", *COLUMNS, "idle", "longest of the rest"
    print(f"\nProfiled, ms a step:\n\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for case in cases:
        for name, side in sides.items():
            with _noting_failures(case):
                trace = f"{name}-{case.sequences}-{len(case.adapters)}"
                await decode(side, case, STEADY + 3 * PROFILED, profile_as=trace)
                steps = case.steps[name] = await asyncio.to_thread(read_trace, traces, trace)
                times = (*_head(case), name, f"{case.best_ms(name):.3f}", *_describe(steps))
                print(f"| {' | '.join(times)} |", flush=True)
            yield


async def decode(side: Side, case: Case, num_tokens: int, profile_as: str | None = None) -> float:
    """Return the milliseconds of a token while all sequences decode. `profile_as`: the name of a trace."""
    adapters = [await side.adapter(weights) for weights in case.adapters] or [None]
    random = np.random.default_rng(0)
    prompts = random.integers(1, 250, (case.sequences, PROMPT)).tolist()

    def sequence(number: int, params: Any) -> Any:
        prompt, adapter = {"prompt_token_ids": prompts[number]}, adapters[number % len(adapters)]
        return side.engine.generate(prompt, params, f"steps-{next(_numbers)}", lora_request=adapter)

    async def accompany(number: int) -> None:
        async for _ in sequence(number, engine_params(num_tokens + MORE_TOKENS)):
            pass

    others = [asyncio.create_task(accompany(number)) for number in range(case.sequences - 1)]
    began_s, began_at, found = 0.0, 0, 0
    try:
        async with asyncio.timeout(PATIENCE_S):
            while side.engine.get_num_unfinished_requests() < len(others):  # noqa: ASYNC110 - vLLM has no event
                await asyncio.sleep(0.001)
            async for output in sequence(case.sequences - 1, engine_params(num_tokens, streams=True)):
                found += len(output.outputs[0].token_ids)
                if not began_at and found >= STEADY:
                    began_s, began_at = time.perf_counter(), found
                    if profile_as is not None:
                        await side.engine.start_profile(profile_as)
            took_s = time.perf_counter() - began_s
        for task in others:
            if task.done():
                task.result()
                raise RuntimeError("a sequence ended before the last had all its tokens")
    finally:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if profile_as is not None:  # the engine has stopped by itself, unless the case failed, and written the trace
            async with asyncio.timeout(PATIENCE_S):
                await side.engine.stop_profile()
    return took_s / (found - began_at) * 1e3


def read_trace(traces: Path, name: str) -> StepTimes | None:
    """Return the times in a trace of the engine's first rank, and delete its file."""
    file = min(traces.glob(f"{name}_*.json"), default=None)
    if file is None:
        raise FileNotFoundError(f"the engine has written no trace {name}: did its profiler start?")
    events = json.loads(file.read_text())["traceEvents"]
    file.unlink()
    return read_steps(events, PROFILED)


@contextmanager
def _noting_failures(case: Case) -> Iterator[None]:
    """Inside, a failure is printed and kept: it must not lose the figures of other cases."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - of any kind
        case.failures.append("".join(traceback.format_exception(error)))
        print(f"| {' | '.join((*_head(case), f'failed: {error!r}'))} |", flush=True)


def _head(case: Case) -> tuple[str, str]:
    return f"{case.sequences}", f"{len(case.adapters)}"


def _describe(steps: StepTimes | None) -> list[str]:
    if steps is None:
        return ["no kernels"]
    rest = [(name, kernel.ms) for name, kernel in steps.kernels.items() if kernel.group == REST]
    names = ", ".join(f"{_short(name)} {ms:.3f}" for name, ms in rest[:NAMES])
    times = steps.step_ms, steps.busy_ms, *(steps.group_ms(group) for group in COLUMNS), steps.idle_ms
    return [*(f"{ms:.3f}" for ms in times), names]


def _short(name: str) -> str:
    """Return the part of a kernel's name that tells it from others."""
    for part in ("void ", "at::native::", "(anonymous namespace)::", "c10::"):
        name = name.replace(part, "")
    return name.replace("|", "/")[:NAME_WIDTH]
