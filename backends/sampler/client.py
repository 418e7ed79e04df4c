"""Drives a vLLM engine of a base model: a child process, started again when it dies or hangs.

Imports no vLLM: the engine is in the child (`engine/process.py`) and in further processes that vLLM starts. The pool
(`pool.py`) says what the engine does.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from tinker_server.api_schemas.inputs import ModelInput
from tinker_server.api_schemas.sampling import SampleRequest, SamplingParams
from tinker_server.backends.formats.load_check import BASE_TOKENS, LoadCheck, compare, text_input
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.processes.crash_isolation import CrashIsolation, Suspect
from tinker_server.backends.processes.launcher import StartWorkers
from tinker_server.backends.processes.rpc import Child, Command, OnPart, WeightsAbsent
from tinker_server.backends.processes.supervisor import Silence, Supervisor
from tinker_server.backends.protocol import BackendFailed, EngineUse, Loading, OnLoading, SamplingTask
from tinker_server.backends.sampler.commands import (
    CountProgress,
    CountSequences,
    Receive,
    Sample,
    ShareRunning,
    Start,
    weights_of,
)
from tinker_server.backends.sampler.received import read_files

log = logging.getLogger(__name__)
R = TypeVar("R")
Sending = dict[Path, asyncio.Task[None]]
"""Weights that travel to another machine now, by their directory here."""
ScoreBase = Callable[[], Awaitable[LoadCheck]]
"""Gives the trainer's scores of a text by the base alone, once it has started."""

_ENGINE_USE_S = 0.5
"""Longest wait for an engine's counts: an answer that is not there at once is not worth waiting for."""


@dataclass(eq=False)
class Request(Suspect):
    """A request to the sampler."""

    num_tokens: int = 0
    """Tokens that it is expected to take."""
    num_samples: int = 1
    is_part: bool = False
    """True for some of a prompt's samples, which go where most sequences have room."""
    deaths: int = 0
    """Number of engines that died while they worked on it."""
    has_begun: bool = False
    """True once a part of its answer was emitted."""
    engine: "EngineClient | None" = None
    """The engine that it was given to last."""


class EngineClient:
    """An engine, its process and the requests that it has."""

    def __init__(
        self,
        spec: ModelSpec,
        start_workers: StartWorkers,
        *,
        is_alone: bool,
        sending: Sending | None = None,
        score_base: ScoreBase | None = None,
    ) -> None:
        """If it `is_alone` in its pool, it is started again when somebody asks for it, else by itself. An engine on
        another machine has `sending` in common with the others there. `score_base` as the pool's."""
        self._spec, self._score_base = spec, score_base
        self.number = spec.engine or 0
        self.name = "the sampler" if is_alone else f"engine {self.number} of the sampler"
        self.is_gone = False
        """True once its machine has left: it will not be started again."""
        self._sending: Sending = {} if sending is None else sending
        self.isolation = CrashIsolation(is_exclusive=True)
        self.requests: set[Request] = set()
        """Requests that run here, or wait for this engine."""
        self.waiting_tokens = 0
        """Tokens that they are expected to take."""
        silence = Silence(spec.silence_s, lambda: self.isolation.is_busy, lambda child: child.call(CountProgress()))
        self.supervisor = Supervisor(
            f"{spec.name}: {self.name}",
            partial(start_workers, spec),
            self._load,
            restart=None if is_alone else self.running,
            silence=silence,
        )

    async def start(self, on_loading: OnLoading) -> None:
        """Start its process, and load the engine in it. Raises BackendFailed."""
        await self.supervisor.start(on_loading)

    @property
    def num_samples(self) -> int:
        """Return the samples of its requests."""
        return sum(request.num_samples for request in self.requests)

    @property
    def is_open(self) -> bool:
        """Return whether it lives and takes requests that are no suspects."""
        return self.supervisor.is_alive and not self.isolation.has_suspects

    async def wait_until_open(self) -> None:
        """Wait until it is open, or gone; a dead engine is started again."""
        while not self.is_open and not self.is_gone:
            await self.supervisor.running()
            await self.isolation.wait_until_clear()

    async def running(self) -> Child:
        """Return its process. The first caller after a death starts another process. Raises BackendFailed if it is
        gone."""
        if self.is_gone:
            raise BackendFailed(f"{self.name} is gone with its machine")
        [child] = await self.supervisor.running()
        return child

    async def call(self, child: Child, command: Command[R], on_part: OnPart | None = None, owner: str = "") -> R:
        """Return its process' answer, as `Child.call`. An engine on another machine that does not have the weights gets
        them first. Raises InvalidInput where they no longer exist."""
        while True:
            try:
                return await child.call(command, on_part=on_part, owner=owner)
            except WeightsAbsent:
                if (weights := weights_of(command)) is None:
                    raise
            if (sending := self._sending.get(weights)) is not None:
                await asyncio.wait([sending])  # if it fails, by the death of another engine too, this engine asks again
                continue
            sending = self._sending[weights] = asyncio.create_task(_send(child, weights))
            sending.add_done_callback(partial(self._end_sending, weights))
            await asyncio.shield(sending)

    def _end_sending(self, weights: Path, task: "asyncio.Task[None]") -> None:
        del self._sending[weights]
        if not task.cancelled():
            task.exception()  # whoever asked may have been cancelled

    @contextmanager
    def having(self, request: Request) -> Iterator[None]:
        """Count a request as the engine's while the block runs."""
        self.requests.add(request)
        self.waiting_tokens += request.num_tokens
        try:
            yield
        finally:
            self.requests.discard(request)
            self.waiting_tokens -= request.num_tokens

    async def use(self) -> EngineUse | None:
        """Return its load; None if it is being started, or does not answer at once."""
        return await self._at_once(CountSequences())

    async def share_running(self, elsewhere: dict[str, int]) -> dict[str, int] | None:
        """Tell it how many sequences each owner has running in other engines, and return how many in this engine; None
        as `use`."""
        return await self._at_once(ShareRunning(elsewhere))

    async def _at_once(self, command: Command[R]) -> R | None:
        if not (children := self.supervisor.children):
            return None
        try:
            async with asyncio.timeout(_ENGINE_USE_S):
                return await children[0].call(command)
        except (TimeoutError, BackendFailed):
            return None

    async def _load(self, children: list[Child]) -> None:
        [child] = children
        emit = partial(self.supervisor.on_loading, child.name)
        await child.call(Start(self._spec), on_part=emit)
        emit(Loading("draws and scores a first text"))
        await _check_kernels(child, self._spec)
        if self._score_base is not None:
            emit(Loading("waits for the trainer's scores of the base, and compares them with its own"))
            await _check_base(child, self._spec, await self._score_base())


async def _check_kernels(child: Child, spec: ModelSpec) -> None:
    """Raise BackendFailed unless an engine scores a text as it drew it: prompts and single tokens have kernels of their
    own, and on CUDA graphs of their own. One that dies of this is no engine: no request is the culprit."""
    num_tokens = min(BASE_TOKENS, spec.max_context_length - 1)  # with the one before
    params = SamplingParams(max_tokens=num_tokens, seed=0, stop=[])
    first = np.zeros(1, np.int64)
    (drawn,) = (await child.call(Sample(_of_base(text_input(first), params)))).sequences
    scores = await _score(child, text_input(np.concatenate([first, drawn.tokens])))
    difference, is_rounding = compare(scores[1:], drawn.logprobs, spec.dtype)
    found = f"sampled and re-scored log probs differ by {difference:.2g} nats per token"
    if not is_rounding:
        raise BackendFailed(f"self-test failed: {found}: the engine's kernels are wrong for this model")
    log.info("%s: self-test passed: %s", child.name, found)


async def _check_base(child: Child, spec: ModelSpec, trainers: LoadCheck) -> None:
    """Raise BackendFailed unless an engine scores the base as the trainer does: both may have read something
    otherwise."""
    own = replace(trainers, logprobs=(await _score(child, text_input(trainers.token_ids)))[1:].tolist())
    if trainers.image:
        behind_image = (await _score(child, trainers.behind_image))[-len(trainers.token_ids) :]
        own = replace(own, logprobs_behind_image=behind_image.tolist())
    for found in trainers.require_same_base(own, spec, "the engine"):
        log.info("%s: %s", child.name, found)


async def _score(child: Child, prompt: ModelInput) -> np.ndarray:
    """Return the base's log probability of each token of a prompt [T], nats."""
    answer = await child.call(Sample(_of_base(prompt, SamplingParams(max_tokens=1), is_scored=True)))
    assert answer.prompt_logprobs is not None
    return answer.prompt_logprobs


def _of_base(prompt: ModelInput, params: SamplingParams, *, is_scored: bool = False) -> SamplingTask:
    """Return a task of the base model and of no owner."""
    request = SampleRequest(prompt=prompt, sampling_params=params, prompt_logprobs=is_scored)
    return SamplingTask.from_request(request, weights=None, owner="")


async def _send(child: Child, weights: Path) -> None:
    await child.call(Receive(weights, await asyncio.to_thread(read_files, weights)))
