"""A backend that satisfies the protocol and computes next to nothing."""

import asyncio
import contextlib
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tinker_server.api_schemas.inputs import Datum, EncodedTextChunk, ModelInput
from tinker_server.api_schemas.sampling import SampledSequence, SampleRequest, SampleResponse, SamplingParams
from tinker_server.api_schemas.training import (
    MORE_OUTPUTS,
    AdamParams,
    ForwardBackwardOutput,
    OptimStepResponse,
    Trainable,
)
from tinker_server.backends.files import write_aside
from tinker_server.backends.processes.fair_queue import FairQueue
from tinker_server.backends.processes.spans import ANSWERED, ProcessSpan, emit
from tinker_server.backends.protocol import (
    BackendFailed,
    BaseModelInfo,
    ChatTask,
    ChatUsage,
    EncodedBatch,
    EngineBatch,
    EngineUse,
    GpuState,
    InvalidInput,
    LoadedModel,
    ModelLost,
    NodeState,
    ProcessState,
    PromptSize,
    SamplingTask,
    SavedForm,
)
from tinker_server.backends.sampler.checks import check_support
from tinker_server.backends.trainer.step.decoding import decode_batch

ADAPTER = {
    f"base_model.model.{module}.lora_{half}.weight": np.full(shape, 0.5, np.float32)
    for module in ("model.language_model.layers.0.self_attn.q_proj", "lm_head")
    for half, shape in (("A", (8, 3)), ("B", (5, 8)))
}
"""The adapter of every model."""
SIZE_BYTES = 3 << 20
"""Memory of every model in training."""


class FakeTrainer:
    """Counts steps and keeps the books of gradients. A loss named `wrong` is invalid, and one named `broken` an
    unforeseen error."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}
        self.gradients: dict[str, list[int] | None] = {}
        """Per model, the first token of each datum whose gradient waits for a step; None where one is missing."""
        self.applied: list[tuple[str, list[int]]] = []
        """The model and gradient of every step that was taken."""
        self.calls: list[tuple[str, str]] = []
        self.queue = FairQueue()
        self.models: dict[str, LoadedModel] = {}
        """The handle of each model that was made, lost ones too."""
        self.begun: Counter[str] = Counter()
        self.gates: dict[str, asyncio.Event] = defaultdict(_open)
        """Per loss: a forward_backward waits here."""
        self.num_restarts = 0
        self.waited_for: str | None = None
        self.restart = asyncio.Condition()

    async def create_model(
        self, model_id: str, lora: Trainable, owner: str, snapshot: Path | None = None
    ) -> LoadedModel:
        async with self.queue.grant(owner, model_id):
            if lora.rank > 64:
                raise InvalidInput(f"lora_config.rank {lora.rank}: at most 64")
            self.steps[model_id] = 0
            self.gradients[model_id] = []
            model = self.models[model_id] = LoadedModel(model_id, owner, SIZE_BYTES, lora.layout, self.begun[model_id])
            self.calls.append(("create_model", model_id))
        if snapshot is not None:
            await self.load_state(model, snapshot, with_optimizer=True)
            self.gradients[model_id] = json.loads((snapshot / "gradient").read_text())
        return model

    async def delete_model(self, model: LoadedModel) -> None:
        if not model.is_lost:
            self.lose(model.model_id)

    async def forward_backward(
        self, model: LoadedModel, batch: EncodedBatch, *, backward: bool
    ) -> ForwardBackwardOutput:
        with _emitting("trainer tiny rank 0", "ComputeMicrobatch"):
            return await self._forward_backward(model, batch, backward)

    async def _forward_backward(self, model: LoadedModel, batch: EncodedBatch, backward: bool) -> ForwardBackwardOutput:
        model_id = self._held(model)
        loss_input = decode_batch(batch)
        async with self.queue.grant(model.owner, model_id):
            self.begin(model)
            await self.gates[loss_input.loss_fn].wait()
        self.calls.append((loss_input.loss_fn, model_id))
        if loss_input.loss_fn in ("wrong", "broken"):
            if backward:
                await self.mark_incomplete(model)
            if loss_input.loss_fn == "broken":
                raise ZeroDivisionError("division by zero")
            raise InvalidInput("datum 0: loss_fn 'wrong' is not known")
        if backward and (gradient := self.gradients[model_id]) is not None:
            gradient += [_first_token(datum) for datum in loss_input.data]
        shapes = [datum.loss_fn_inputs["target_tokens"].shape for datum in loss_input.data]
        values = {"logprobs": -1, "elementwise_loss": 1}
        names = ("logprobs", *MORE_OUTPUTS.get(loss_input.loss_fn, ()))
        outputs = [{name: np.full(shape, values[name], np.float32) for name in names} for shape in shapes]
        metrics = {"loss:sum": float(len(loss_input.data))}
        if loss_input.loss_fn == "nan":
            metrics["nan:mean"] = float("nan")
        return ForwardBackwardOutput(loss_fn_outputs=outputs, metrics=metrics)

    async def mark_incomplete(self, model: LoadedModel) -> None:
        self.gradients[self._held(model)] = None

    async def optim_step(self, model: LoadedModel, adam: AdamParams) -> OptimStepResponse:
        model_id = self._held(model)
        async with self.queue.grant(model.owner, model_id):
            self.begin(model)
        self.calls.append(("optim_step", model_id))
        gradient, self.gradients[model_id] = self.gradients[model_id], []
        if gradient is None:
            raise InvalidInput("the gradient is incomplete")
        self.applied.append((model_id, gradient))
        self.steps[model_id] += 1
        return OptimStepResponse(metrics={"grad_norm": 1.0, "step": self.steps[model_id]})

    async def save(self, model: LoadedModel, directory: Path, form: SavedForm) -> None:
        model_id = self._held(model)
        with write_aside(directory) as aside:
            _write_steps(aside, self.steps[model_id])
        if form != "state":
            save_file(ADAPTER, directory / "adapter_model.safetensors")
            (directory / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 32}')

    async def load_state(self, model: LoadedModel, directory: Path, *, with_optimizer: bool) -> None:
        model_id = self._held(model)
        self.steps[model_id] = int((directory / "steps").read_text()) if with_optimizer else 0
        self.gradients[model_id] = []

    async def snapshot(self, model: LoadedModel, directory: Path) -> Awaitable[None]:
        model_id = self._held(model)
        steps, gradient = self.steps[model_id], json.dumps(self.gradients[model_id])

        async def write() -> None:
            with write_aside(directory) as aside:
                _write_steps(aside, steps)
                (aside / "gradient").write_text(gradient)

        return asyncio.ensure_future(write())

    async def wait_for_restart(self, seen: int) -> int:
        async with self.restart:
            await self.restart.wait_for(lambda: self.num_restarts > seen)
            return self.num_restarts

    def waits_for(self) -> str | None:
        return self.waited_for

    async def die(self) -> None:
        """And be there again."""
        self.lose(*self.steps)
        async with self.restart:
            self.num_restarts += 1
            self.restart.notify_all()

    def restoring(self, model_id: str, owner: str) -> contextlib.AbstractContextManager[None]:
        return self.queue.prioritize(owner, model_id)

    def begin(self, model: LoadedModel) -> None:
        self.begun[model.model_id] += 1
        model.latest_work = self.begun[model.model_id]

    def lose(self, *model_ids: str) -> None:
        for model_id in model_ids:
            del self.steps[model_id]
            self.models[model_id].is_lost = True

    def _held(self, model: LoadedModel) -> str:
        if model.is_lost:
            raise ModelLost("the trainer was restarted")
        return model.model_id


class FakeSampler:
    """Answers each sample with one token: the number of steps its weights had, 100 for the base model."""

    def __init__(self) -> None:
        self.gate = _open()
        self.running = 0
        self.num_begun = 0
        self.request_ids: list[str] = []
        """Of the samples that have begun."""
        self.publish_gate = _open()
        self.published: list[Path] = []
        self.chats: list[ChatTask] = []
        self.refuses = False

    async def sample(self, task: SamplingTask) -> SampleResponse:
        self.num_begun += 1
        self.request_ids.append(task.request_id)
        self.running += 1
        try:
            with _emitting("sampler tiny", "Sample"):
                await self.gate.wait()
        finally:
            self.running -= 1
        token = 100 if task.weights is None else int((task.weights / "steps").read_text())
        sequence = SampledSequence(
            stop_reason="length", tokens=np.array([token], np.int32), logprobs=np.array([-0.5], np.float32)
        )
        length = sum(len(chunk.tokens) for chunk in task.prompt.chunks if isinstance(chunk, EncodedTextChunk))
        scores = np.append(np.nan, np.full(length - 1, -1)).astype(np.float32) if task.scores.logprobs else None
        return SampleResponse(sequences=[sequence] * task.num_samples, prompt_logprobs=scores)

    async def chat(self, task: ChatTask, tell: Callable[[str], None]) -> ChatUsage:
        """Tells its body's `user` (of a message its user_id), or of a stream an event for each word of it; the word
        `fails` fails."""
        self.chats.append(task)
        self.running += 1
        try:
            await self.gate.wait()
            said = task.body.get("user") or task.body.get("metadata", {}).get("user_id") or "hello"
            words = str(said).split()
            for word in words:
                if word == "fails":
                    raise BackendFailed("the engine failed in /some/directory/file")
                if task.body.get("stream"):
                    tell(f"data: {word}\n\n")
                    await asyncio.sleep(0)
            if not task.body.get("stream"):
                tell(json.dumps({"said": words}))
        finally:
            self.running -= 1
        return ChatUsage(prompt=7, cached=2, sampled=len(words), drawn=_drawn(len(words)) if task.kept_bytes else ())

    async def publish(self, weights: Path, owner: str) -> None:
        self.published.append(weights)
        await self.publish_gate.wait()
        if self.refuses:
            raise BackendFailed("the sampler's log probabilities of a test text are not the trainer's")


class FakeBaseModel:
    def __init__(self, name: str) -> None:
        self.info = BaseModelInfo(
            name=name,
            source=f"org/{name}",
            fingerprint="0" * 64,
            arch="fake",
            vocab_size=1000,
            max_context_length=128,
            takes_images=False,
            max_lora_rank=64,
            adapter_bytes=64,
            adapter_matrices=2,
        )
        self.trainer = FakeTrainer()
        self.sampler = FakeSampler()
        self.engines: dict[int, EngineUse] = {}
        """Of a sampler with several."""

    def check_sample(self, request: SampleRequest) -> PromptSize:
        if not request.prompt.chunks:
            raise InvalidInput("the prompt is empty")
        check_support(request)
        sizes = [len(one.tokens) if isinstance(one, EncodedTextChunk) else None for one in request.prompt.chunks]
        return PromptSize(sum(4 if size is None else size for size in sizes), sizes.count(None) << 20)

    def pixel_bytes(self, images: Sequence[bytes]) -> int:
        return len(images) << 20

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [f" word{token_id}" for token_id in token_ids]

    def special_ids(self) -> frozenset[int]:
        return frozenset({999})

    def processes(self) -> list[ProcessState]:
        return [ProcessState("trainer", os.getpid(), True, 0), ProcessState("sampler", os.getpid(), True, 1)]

    async def engine_use(self) -> EngineUse | None:
        batch = EngineBatch(self.sampler.running, 2, 0.375)
        return EngineUse(self.sampler.running, 0, 256, 0, 8, batch, self.engines)


class FakeBackend:
    """One base model, named `tiny`."""

    def __init__(self) -> None:
        self.tiny = FakeBaseModel("tiny")
        self.models = {"tiny": self.tiny}
        self.running = False
        self.machines: list[NodeState] = []

    def gpus(self) -> list[GpuState]:
        return []

    def nodes(self) -> list[NodeState]:
        return self.machines

    async def start(self) -> None:
        self.running = True

    async def stop(self) -> None:
        self.running = False


def _write_steps(directory: Path, steps: int) -> None:
    directory.mkdir(parents=True)
    (directory / "steps").write_text(str(steps))


@contextlib.contextmanager
def _emitting(process: str, command: str) -> Iterator[None]:
    """As a call of a child process is."""
    began_ns, outcome = time.time_ns(), "invalid"
    try:
        yield
        outcome = ANSWERED
    finally:
        emit(ProcessSpan(process, command, began_ns, time.time_ns(), outcome))


def _first_token(datum: Datum) -> int:
    """-1 where it does not begin with text."""
    chunk = next(iter(datum.model_input.chunks), None)
    return int(chunk.tokens[0]) if isinstance(chunk, EncodedTextChunk) and len(chunk.tokens) else -1


def _drawn(num_tokens: int) -> tuple[tuple[SampleRequest, SampleResponse], ...]:
    """A chat's prompt of the token 7, and what was drawn from it."""
    prompt = ModelInput(chunks=[EncodedTextChunk(tokens=np.array([7]))])
    request = SampleRequest(prompt=prompt, sampling_params=SamplingParams(temperature=0.5, seed=3))
    tokens, logprobs = np.arange(num_tokens, dtype=np.int32), np.full(num_tokens, -0.5, np.float32)
    sequence = SampledSequence(stop_reason="stop", tokens=tokens, logprobs=logprobs)
    return ((request, SampleResponse(sequences=[sequence])),)


def _open() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event
