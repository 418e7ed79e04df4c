"""The only seam between the server and what computes: a trainer and a sampler per base model.

`Backend.start` is called first, then anything from any task, and `Backend.stop` last. The server serialises a model's
training operations by seq_id. Operations of several models may be given at once: the trainer serves owners in turn,
and their models. Directories are given by paths that are the same to server, trainer and sampler.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from pickle import PickleBuffer
from typing import Any, Literal, NamedTuple, Protocol

from tinker_server.api_schemas.inputs import ModelInput, TensorData
from tinker_server.api_schemas.sampling import SampleRequest, SampleResponse, SamplingParams
from tinker_server.api_schemas.training import (
    AdamParams,
    ForwardBackwardOutput,
    Layout,
    OptimStepResponse,
    Trainable,
)

ADAPTER_FILE, ADAPTER_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
"""The two files of a saved adapter, as PEFT and vLLM name them."""
WHOLE_MODEL = (
    "cannot be loaded: all weights of the model were trained, and only tinker-server 0.1.0 started with --full can load"
    " that"
)
"""Behind the name of what an older server saved of a model that is not an adapter."""


class InvalidInput(ValueError):
    """The request cannot be done as it is. The text names the datum and field, and what is allowed."""


class ModelLost(RuntimeError):
    """The process that held the model ended; it can be created again from a checkpoint."""


class BackendFailed(RuntimeError):
    """Something broke in computing; the request was not at fault."""


class Unavailable(BackendFailed):
    """Something that is needed is not there now, and may be later: another server, the model hub, room on the disk."""


class ProcessDied(BackendFailed):
    """A process ended, or was ended, while it worked on this: so did all that it held."""


@dataclass(frozen=True)
class BaseModelInfo:
    """A base model, as far as the server knows it."""

    name: str
    source: str
    """Directory or hub id it was loaded from."""
    fingerprint: str
    """64 hexadecimal digits, which differ if the same name stands for other weights."""
    arch: str
    """transformers' model_type."""
    vocab_size: int
    max_context_length: int
    """Largest number of tokens of a prompt and its continuation, or of a datum, with images expanded."""
    takes_images: bool
    max_lora_rank: int
    adapter_bytes: int
    """Bytes of an adapter that trains everything, in float32 and of rank 1; one of rank r has r times as many."""
    adapter_matrices: int
    """Number of the matrices that it adapts, those of experts one by one."""
    trains_vision: bool = False
    """True if models may train the vision tower."""
    lora_layout: Layout = "own"
    """Layout of new models whose request does not say; `own` where both are the same."""
    expert_slots: Layout = "own"
    """Form of the engine's slots: `service` if they have the factors that a layer's experts share once. Adapters of
    experts with factors of their own have no place there; `own` takes both."""
    latent_cache: bool = False
    """True if engines keep latents in place of whole keys and values. Adapters of linears out of latents, which the
    attention of `own` has, have no place there."""
    numerics: Mapping[str, str] = field(default_factory=dict)
    """Settings and versions of libraries on which the numbers of training depend."""


@dataclass(frozen=True)
class OwnLayout:
    """Names of base models with runs or weights of the layout `own` in a data directory."""

    experts: Set[str]
    """Those whose experts they train."""
    attention: Set[str]
    """Those whose attention they train."""


NO_RUNS = OwnLayout(frozenset(), frozenset())


@dataclass(frozen=True)
class EncodedBatch:
    """A forward_backward's request as it was received; the ranks decode it."""

    body: bytes
    content_type: str
    """wire.PROTOBUF or wire.JSON; in JSON it may be the ForwardRequest of older SDKs."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the body as a buffer beside the message, without a copy."""
        return EncodedBatch, (PickleBuffer(self.body), self.content_type)


@dataclass(frozen=True)
class ProcessState:
    """State of a process of trainer or sampler."""

    name: str
    pid: int
    """Its number on the machine that it runs on."""
    is_alive: bool
    restarts: int
    """Number of restarts since the server started."""


@dataclass(frozen=True)
class Loading:
    """Current activity of a process that gets ready."""

    doing: str
    done_bytes: int = 0
    total_bytes: int = 0
    """0 if there are no bytes to count, or their number is unknown."""
    began_s_ago: float = 0.0
    """Time since it began, of an activity that is reported later."""


OnLoading = Callable[[str, Loading | None], None]
"""Called on the event loop with the name of a process that gets ready and its activity; None: it is ready, or has
failed."""


def ignore_loading(process: str, loading: Loading | None) -> None:
    """Do nothing, as an OnLoading."""


@dataclass(frozen=True)
class EngineBatch:
    """State of the engine's own scheduler between two of its steps."""

    running: int
    """Sequences in its batch."""
    waiting: int
    """Sequences that it has but does not compute: not yet begun, or preempted for lack of cache."""
    cache_used: float
    """Part of the KV cache that they hold, from 0 to 1. Cached blocks of ended sequences count as free."""


@dataclass(frozen=True)
class EngineUse:
    """Load of a sampler's engine, or of all its engines."""

    sequences_running: int
    """Sequences that are decoded."""
    sequences_waiting: int
    max_sequences: int
    adapters: int
    """Adapters that have a slot."""
    max_adapters: int
    batch: EngineBatch | None = None
    """State at the engine's last answer; None before the first."""
    engines: Mapping[int, "EngineUse"] = field(default_factory=dict)
    """Load of each engine by its number, where the sampler has several; this is then their sum, and `cache_used` their
    mean. An engine that does not answer at once is left out."""


@dataclass(frozen=True)
class GpuState:
    """State of a GPU of this machine, counting all processes."""

    index: int
    name: str
    used_bytes: int
    total_bytes: int
    utilization: float
    """Part of the latest sampling interval in which a kernel ran, from 0 to 1."""


@dataclass(frozen=True)
class NodeState:
    """State of another machine that has joined the cluster."""

    name: str
    address: str
    is_alive: bool
    """False while it is lost: it may come back."""


@dataclass(eq=False)
class LoadedModel:
    """A model in a trainer's memory, from `Trainer.create_model` until it is lost. Only the trainer writes to it."""

    model_id: str
    owner: str
    size_bytes: int
    """Device memory of each rank that it takes while it trains: weights, gradient, moments."""
    layout: Layout
    """Loaded weights may have another layout than the model had."""
    latest_work: int = 0
    """A number that changes whenever the trainer begins to work for it."""
    worked_s: float = 0.0
    """Seconds that the trainer has worked for it since it was loaded; the rest it has waited."""
    is_lost: bool = False
    """True once the trainer no longer holds the model: its process has ended, or it was deleted or made again."""


SavedForm = Literal["state", "sampler", "export"]
"""`state`: adapter and optimizer, to go on from. `export`: the adapter in PEFT's form and in float32. `sampler`: the
adapter for the sampler alone, in its precision, which is the base's, with a layer's experts stacked. The last two are
not durable yet."""


class Trainer(Protocol):
    """LoRA models on a frozen base. Every method raises InvalidInput or BackendFailed, and ModelLost for a lost
    model."""

    async def create_model(
        self, model_id: str, lora: Trainable, owner: str, snapshot: Path | None = None
    ) -> LoadedModel:
        """Make a fresh adapter (`lora.seed` is set) with an empty optimizer, or a model as it was at its snapshot.
        A model of the same id is lost by it. Raises InvalidInput for a bad rank."""

    async def delete_model(self, model: LoadedModel) -> None:
        """Delete adapter, gradient and optimizer, unless the model is lost."""

    async def forward_backward(
        self, model: LoadedModel, batch: EncodedBatch, *, backward: bool
    ) -> ForwardBackwardOutput:
        """Compute the log probabilities of every target; with `backward`, add the loss's gradient to the model's.

        It waits for a grant of the trainer before each microbatch, in which other models' datums may be computed too. A
        failure with `backward` leaves the gradient incomplete: the next optim_step clears it and fails.
        """

    async def mark_incomplete(self, model: LoadedModel) -> None:
        """Mark the gradient as incomplete until the next optim_step: a forward_backward will never run."""

    async def optim_step(self, model: LoadedModel, adam: AdamParams) -> OptimStepResponse:
        """Apply the gradient, then clear it. Raises InvalidInput if there is none, part of it is missing, or a weight
        would not be finite; weights and optimizer are then as they were."""

    async def save(self, model: LoadedModel, directory: Path, form: SavedForm) -> None:
        """Write the model into `directory`, which appears whole or not at all. Raises InvalidInput if weights are not
        finite, or their log probabilities, which a `state` is not asked for."""

    async def load_state(self, model: LoadedModel, directory: Path, *, with_optimizer: bool) -> None:
        """Read what was saved as `state` into a model of the same LoRA shape; the gradient is cleared. Without the
        optimizer it may be any adapter in PEFT's names or in those of Tinker's tools. The model gets the layout of the
        weights. If it fails, the model is as it was."""

    async def snapshot(self, model: LoadedModel, directory: Path) -> Awaitable[None]:
        """Copy the whole model with its accumulated gradient, and write the copy into `directory` while later
        operations run. The result is done once the directory is there: whole, or not at all."""

    def restoring(self, model_id: str, owner: str) -> AbstractContextManager[None]:
        """Grant the trainer only to models that are being restored while the block runs: this model, and others in
        such a block."""

    def waits_for(self) -> str | None:
        """Say what keeps all operations from being computed; None if nothing does."""

    async def wait_for_restart(self, seen: int) -> int:
        """Wait until the trainer has been restarted more than `seen` times, and return how many times. All models that
        it held before are lost."""


@dataclass(frozen=True)
class PromptScores:
    """Scores of a prompt's own tokens that are asked for."""

    logprobs: bool = False
    """Give the log probability of each prompt token."""
    last_n: int | None = None
    """Only score that many tokens at the end; None: all."""
    topk: int = 0
    """Number of the likeliest tokens to give at each position."""
    targets: TensorData | None = None
    """Chosen tokens, int64 [prompt length - 1, K]; -1, or left out of a sparse tensor: none."""
    num_draws: int = 0
    """Number of random draws at each position."""


@dataclass(frozen=True)
class SamplingTask:
    """A request to a sampler that has passed `BaseModel.check_sample`."""

    prompt: ModelInput
    params: SamplingParams
    num_samples: int
    weights: Path | None
    """Directory that was saved as `sampler` or `export`, never changed after; None: the base model."""
    owner: str
    """Owner of the work. Owners share the sampler evenly."""
    topk: int = 0
    """Number of the likeliest tokens to give beside each sampled one."""
    scores: PromptScores = PromptScores()
    request_id: str = ""
    """Names its sequences (`ids.sequence_id`); empty: they have no names."""
    first: int = 0
    """Number of its first sample: a request's samples may be several tasks."""

    @classmethod
    def from_request(
        cls, request: SampleRequest, weights: Path | None, owner: str, request_id: str = ""
    ) -> "SamplingTask":
        """Turn a client's request into a task; done nowhere else."""
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
            request_id=request_id,
        )


ChatEndpoint = Literal["chat_completions", "completions", "messages", "count_tokens"]
"""OpenAI's /chat/completions and /completions, Anthropic's /messages and /messages/count_tokens."""


@dataclass(frozen=True)
class ChatTask:
    """A request of one of the chat endpoints, without the fields that the server has handled itself."""

    endpoint: ChatEndpoint
    body: Mapping[str, Any]
    """The body as its vendor defines it; every image is a data URI."""
    weights: Path | None
    """As in SamplingTask."""
    owner: str
    """As in SamplingTask."""
    kept_bytes: int = 0
    """Largest size of a prompt with its continuations that is returned for people to read; 0: none is."""
    num_sequences: int = 1
    """Number of sequences that the engine samples: choices of each prompt."""
    image_fields: tuple[str, ...] = ()
    """Fields of the body that are images, as `messages.0.content.1.image_url.url`."""


@dataclass(frozen=True)
class ChatUsage:
    """Number of tokens of a request."""

    prompt: int = 0
    """Tokens of its prompts, with images expanded."""
    cached: int = 0
    """Prompt tokens found in the prefix cache."""
    sampled: int = 0
    drawn: tuple[tuple[SampleRequest, SampleResponse], ...] = ()
    """Each prompt as if a sample had been asked for, unless it is larger than the task's `kept_bytes`."""


class Sampler(Protocol):
    """Continuations and prompt scores from one base model and any saved adapter."""

    async def sample(self, task: SamplingTask) -> SampleResponse:
        """Do the task. Cancelling the call stops the work.

        Raises InvalidInput if the prompt's images do not decode or the weights are gone or diverged, and BackendFailed
        if the engine cannot do this task. If the engine dies, the task runs again, on another or the next one.
        """

    async def chat(self, task: ChatTask, emit: Callable[[str], None]) -> ChatUsage:
        """Answer the task in its vendor's form: `emit` gets the whole as JSON, or each event of a stream. Cancelling
        the call stops the work.

        Raises as `sample`, and InvalidInput for a body that is not what its vendor defines; errors are raised, not
        emitted. If the engine dies, the task runs again, unless a part was emitted: then BackendFailed is raised.
        """

    async def publish(self, weights: Path, owner: str) -> None:
        """Load what was saved as `sampler` or `export` into every living engine, before its first sample. Raises
        BackendFailed if an engine does not score a test text as the trainer did, and otherwise as `sample`. An engine
        that is not living loads and checks it before its own first sample of it."""


class PromptSize(NamedTuple):
    """Size of a prompt with its images expanded."""

    num_tokens: int
    pixel_bytes: int
    """As `BaseModel.pixel_bytes`."""


class BaseModel(Protocol):
    """A served base model."""

    @property
    def info(self) -> BaseModelInfo: ...
    @property
    def trainer(self) -> Trainer: ...
    @property
    def sampler(self) -> Sampler: ...

    def check_sample(self, request: SampleRequest) -> PromptSize:
        """Return the prompt's size. Raises InvalidInput for errors that can be found without computing: ids, images,
        lengths, parameters."""

    def pixel_bytes(self, images: Sequence[bytes]) -> int:
        """Return the bytes of the pixels of image files, three a pixel, from their headers; 0 for what is no image."""

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return what each token adds to the text. A character of several tokens belongs to its last token."""

    def special_ids(self) -> frozenset[int]:
        """Return the ids of tokens that stand for no text, such as the end of a turn."""

    def processes(self) -> list[ProcessState]:
        """Return the states of the trainer's ranks and the sampler."""

    async def engine_use(self) -> EngineUse | None:
        """Return the load of all engines; None if each is being started, or does not answer at once."""


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
        """Return the GPUs that are used; none on the CPU. Takes some milliseconds."""

    def nodes(self) -> list[NodeState]:
        """Return the other machines of the cluster; none without one."""
