"""The one seam between the server and what computes: a trainer and a sampler per base model.

What may be called when: `Backend.start` first, then anything from any task, `Backend.stop` last. The
server serialises a model's training operations by seq_id. Of several models they may be given at once: owners take
turns on the trainer, and then their models.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import PickleBuffer
from typing import Any, Literal, Protocol

from api_schemas.inputs import ModelInput, TensorData
from api_schemas.sampling import SampleRequest, SampleResponse, SamplingParams
from api_schemas.training import (
    AdamParams,
    ForwardBackwardOutput,
    OptimStepResponse,
    Trainable,
)

ADAPTER_FILE, ADAPTER_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
"""The two files of a saved adapter, as PEFT and vLLM name them."""
CANARY_FILE = "canary.json"
"""Beside a whole model: how its trainer scores a short text."""


class InvalidInput(ValueError):
    """The request cannot be done as it is. The text names the datum and field, and what is allowed."""


class ModelLost(RuntimeError):
    """The process that held the model ended; it can be created again from a checkpoint."""


class BackendFailed(RuntimeError):
    """Something broke in computing; the request was not at fault."""


class ProcessDied(BackendFailed):
    """A process ended, or was ended, while it worked on this: so did all that it held."""


@dataclass(frozen=True)
class BaseModelInfo:
    """What the server says of a base model."""

    name: str
    source: str
    """Directory or hub id it was loaded from."""
    fingerprint: str
    """64 hexadecimal digits: another where the same name stands for other weights."""
    arch: str
    """transformers' model_type."""
    vocab_size: int
    max_context_length: int
    """Largest number of tokens of a prompt and its continuation, or of a datum; images counted expanded."""
    takes_images: bool
    max_lora_rank: int
    trains_vision: bool = False
    """Whether models may train the vision tower."""
    full: bool = False
    """Whether its models train all weights, one at a time, and are no adapters."""
    numerics: Mapping[str, str] = field(default_factory=dict)
    """What the numbers of training depend on beside the request: settings, and versions of libraries."""


@dataclass(frozen=True)
class EncodedBatch:
    """A forward_backward's request as it came: it is decoded where it is computed."""

    body: bytes
    content_type: str
    """wire.PROTOBUF or wire.JSON; in JSON it may be the ForwardRequest of older SDKs."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, the body stays as it is, beside the message."""
        return EncodedBatch, (PickleBuffer(self.body), self.content_type)


@dataclass(frozen=True)
class ProcessState:
    """One child process, as far as the server knows it."""

    name: str
    pid: int
    is_alive: bool
    restarts: int
    """How often it was started again since the server started."""


@dataclass(frozen=True)
class Loading:
    """What a process that gets ready does now."""

    doing: str
    done_bytes: int = 0
    total_bytes: int = 0
    """0: it is no matter of bytes, or nobody knows of how many."""


LoadingHearer = Callable[[str, Loading | None], None]
"""Hears on the event loop which process gets ready, by its name, and what it does; None: it is ready, or has failed."""


def unheard(process: str, loading: Loading | None) -> None:
    """Nobody listens."""


@dataclass(frozen=True)
class EngineBatch:
    """What the engine's own scheduler had in hand between two of its steps."""

    running: int
    """Sequences in its batch."""
    waiting: int
    """Those that it was given and does not compute: not yet begun, or put back for want of cache."""
    cache_used: float
    """Part of the KV cache that they hold, from 0 to 1. What is kept of ended ones is free to take."""


@dataclass(frozen=True)
class EngineUse:
    """What a sampler's engine has to do now."""

    rows_running: int
    """Sequences that are decoded."""
    rows_waiting: int
    max_rows: int
    adapters: int
    """Those that have a slot."""
    max_adapters: int
    batch: EngineBatch | None = None
    """As of the engine's last answer; None before the first."""


@dataclass(frozen=True)
class GpuState:
    """One GPU of this machine, whoever fills it."""

    index: int
    name: str
    used_bytes: int
    total_bytes: int
    utilization: float
    """Part of the last moments in which a kernel ran, from 0 to 1."""


class Trainer(Protocol):
    """LoRA models on a frozen base, or one model that trains all of it. Every method raises InvalidInput, ModelLost or
    BackendFailed."""

    async def create_model(self, model_id: str, lora: Trainable, owner: str) -> None:
        """Make a fresh adapter (`lora.seed` is set) with an empty optimizer. InvalidInput for a bad rank, and where
        another model is training all weights of the base."""

    async def delete_model(self, model_id: str) -> None:
        """Drop adapter, gradient and optimizer. Nothing happens where the model is not held."""

    async def forward_backward(self, model_id: str, batch: EncodedBatch, *, backward: bool) -> ForwardBackwardOutput:
        """Log probabilities of every target; with `backward` the loss's gradient is added to the model's.

        It takes a turn for each of its rows, in which other models' datums may be computed too. A failure with
        `backward` leaves the gradient incomplete: the next optim_step clears it and fails.
        """

    async def mark_incomplete(self, model_id: str) -> None:
        """A forward_backward of this model will never run: its gradient is incomplete until the next optim_step."""

    async def optim_step(self, model_id: str, adam: AdamParams) -> OptimStepResponse:
        """Apply the gradient, then clear it. InvalidInput where there is none, part of it is missing, or a weight
        would not be finite; weights and optimizer are then as they were."""

    async def save_state(self, model_id: str, directory: Path) -> None:
        """Write adapter and optimizer into `directory`, which appears whole or not at all. InvalidInput for an
        adapter that is not finite."""

    async def load_state(self, model_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """Read what save_state wrote into a model of the same LoRA shape; the gradient is cleared. A model that it
        fails for is as it was."""

    async def snapshot(self, model_id: str, directory: Path) -> Awaitable[None]:
        """Copy the whole model, its accumulated gradient too, and write the copy into `directory` while later
        operations run. What is returned is done once the directory is there: whole, or not at all."""

    async def resume(self, model_id: str, lora: Trainable, owner: str, directory: Path) -> None:
        """Make the model that a snapshot is of, as it was."""

    def last_turn(self, model_id: str) -> int:
        """A number that changes when the trainer begins to work for this model: before, nothing has changed."""

    def holds(self, model_id: str) -> bool:
        """Whether the model was made here, and has not ended with the process that held it."""

    async def restarted(self, seen: int) -> int:
        """How often the trainer has ended and is there again by itself, once that is more than `seen`. What it held
        until then is lost."""

    def worked_s(self, model_id: str) -> float:
        """Seconds that the trainer has worked for this model since it was loaded: what is beyond, it has waited."""

    async def save_sampler_weights(self, model_id: str, directory: Path, *, for_elsewhere: bool) -> None:
        """Write the adapter into `directory`, which appears whole or not at all, but is not durable yet: in PEFT's form
        and in float32 where it is `for_elsewhere`, else for the sampler alone, in its precision, which is the base's,
        and a layer's experts in stacks. Of a model that trains all weights write a complete Hugging Face model, always
        in the base's precision. InvalidInput for weights that are not finite, or whose log probabilities are not."""


@dataclass(frozen=True)
class PromptScores:
    """What to say of a prompt's own tokens."""

    logprobs: bool = False
    """Log probability of each prompt token."""
    last_n: int | None = None
    """Only of that many tokens at the end; None: of all."""
    topk: int = 0
    """So many of the likeliest tokens at each position."""
    targets: TensorData | None = None
    """Chosen tokens, int64 [prompt length - 1, K]; -1, or left out of a sparse tensor: none."""
    num_draws: int = 0
    """So many random draws at each position."""


@dataclass(frozen=True)
class SamplingTask:
    """What a sampler is asked for, once `BaseModel.check_sample` has passed it."""

    prompt: ModelInput
    params: SamplingParams
    num_samples: int
    weights: Path | None
    """Directory of what save_sampler_weights wrote, never changed after; None: the base model."""
    owner: str
    """Whose work it is. Owners share the sampler evenly."""
    topk: int = 0
    """So many of the likeliest tokens beside each sampled one."""
    scores: PromptScores = PromptScores()

    @classmethod
    def from_request(cls, request: SampleRequest, weights: Path | None, owner: str) -> "SamplingTask":
        """The one place that turns a client's request into a task."""
        return cls(
            prompt=request.prompt,
            params=request.sampling_params,
            num_samples=request.num_samples,
            weights=weights,
            owner=owner,
            topk=request.topk_sample_logprobs,
            scores=PromptScores(
                logprobs=request.prompt_logprobs,
                last_n=request.prompt_logprobs_last_n,
                topk=request.topk_prompt_logprobs,
                targets=request.target_prompt_logprobs,
                num_draws=request.prompt_alt_tokens_k,
            ),
        )


ChatEndpoint = Literal["chat_completions", "completions", "messages", "count_tokens"]
"""OpenAI's /chat/completions and /completions, Anthropic's /messages and /messages/count_tokens."""


@dataclass(frozen=True)
class ChatTask:
    """A request of one of the chat endpoints, of which the server has taken what is its own to decide."""

    endpoint: ChatEndpoint
    body: Mapping[str, Any]
    """As its vendor defines it; every image is a data URI."""
    weights: Path | None
    """As in SamplingTask."""
    owner: str
    """Likewise."""
    kept_bytes: int = 0
    """Whether people want to read what was drawn, and so many bytes of each prompt and its continuations at most."""


@dataclass(frozen=True)
class ChatUsage:
    """Tokens of one request."""

    prompt: int = 0
    """Of its prompts, images expanded."""
    cached: int = 0
    """Of these, found in the prefix cache."""
    sampled: int = 0
    drawn: tuple[tuple[SampleRequest, SampleResponse], ...] = ()
    """Each prompt as if a sample had been asked for, where the task wants to keep it and it is not too large."""


class Sampler(Protocol):
    """Continuations and prompt scores from one base model and any saved adapter, or whole model."""

    async def sample(self, task: SamplingTask) -> SampleResponse:
        """Do the task. Cancelling the call stops the work.

        Raises InvalidInput where the prompt's images do not decode or the weights are gone or diverged,
        BackendFailed where the engine cannot do this task. An engine that dies is started again under it.
        """

    async def chat(self, task: ChatTask, tell: Callable[[str], None]) -> ChatUsage:
        """Answer the task in its vendor's form: `tell` gets the whole as JSON, or of a stream each event as it comes.
        Cancelling the call stops the work.

        Raises as `sample`, InvalidInput also for a body that is not what its vendor defines, and what it raises it has
        not told. An engine that dies is started again, unless a part has been told: then BackendFailed is raised.
        """

    async def publish(self, weights: Path, owner: str) -> None:
        """Load what save_sampler_weights wrote, before its first sample: where the sampler does not score a test text
        with it as the trainer did, BackendFailed is raised, and otherwise as by `sample`."""


class BaseModel(Protocol):
    """One served base model."""

    @property
    def info(self) -> BaseModelInfo: ...
    @property
    def trainer(self) -> Trainer: ...
    @property
    def sampler(self) -> Sampler: ...

    def check_sample(self, request: SampleRequest) -> int:
        """The prompt's length in tokens, images expanded.

        Raises InvalidInput for what can be told without computing: ids, images, lengths, parameters.
        """

    def pixel_bytes(self, images: Sequence[bytes]) -> int:
        """Bytes of the pixels that the model sees of image files, at three a pixel, from the files' headers. What is
        no image has none."""

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """What each token adds to the text. A character of several tokens is told with its last one."""

    def processes(self) -> list[ProcessState]:
        """The trainer's ranks and the sampler."""

    async def engine_use(self) -> EngineUse | None:
        """None where the sampler is being started, or does not answer at once."""


@dataclass(frozen=True)
class ExaminedModel:
    """What a model's files say of how it would be served here."""

    name: str
    arch: str
    takes_images: bool
    dtype: str
    weight_bytes: int
    """Of one copy: trainer and sampler have one each."""
    kv_cache_bytes: int
    """The least that its sampler can do with."""
    context: int
    max_lora_rank: int


@dataclass(frozen=True)
class Examination:
    """What this machine has, and what the configured models want of it."""

    versions: Mapping[str, str]
    device: str
    main_bytes: int
    """Main memory that is free."""
    gpus: Sequence[tuple[str, int]]
    """Name and memory of each."""
    models: Sequence[ExaminedModel]
    problem: str | None
    """Why they cannot be served."""


class Backend(Protocol):
    """All served base models, by name."""

    @property
    def models(self) -> Mapping[str, BaseModel]:
        """Complete once started."""

    async def start(self) -> None:
        """Load everything. Raises BackendFailed with one clear line."""

    async def stop(self) -> None:
        """End every child process."""

    def gpus(self) -> list[GpuState]:
        """Those that are computed with; none on the CPU. It takes some milliseconds."""
