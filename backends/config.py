"""The backend's settings, read once as part of the server's, and the report on serving them from this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from backends.model_spec import Placement

Process = Literal["trainer", "engine", "holder"]


class BackendConfig(BaseModel):
    """Plain values; the defaults fit a small machine."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    models: dict[str, str] = {}
    """Served base models: public name to a local directory or a hub id. Two names may share a source."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto takes CUDA if torch sees a GPU."""
    ranks: int | None = Field(default=None, ge=1)
    """Trainer processes per base model; absent: one for each of trainer_gpus, else one, on CUDA more if it does not
    fit. They shard the base (FSDP2) unless each has room for all of it, and always a model's masters and moments."""
    trainer_gpus: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Numbers of the GPUs that trainers may use; absent: any."""
    engines: int | None = Field(default=None, ge=1)
    """vLLM engines per base model; absent: one on CPU, on CUDA one for each of sampler_gpus, else of its trainer's
    GPUs, that has room for it."""
    sampler_gpus: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Numbers of the GPUs that engines may use, the trainers' or others; absent: any, the trainers' first."""
    tensor_parallel: int | None = Field(default=None, ge=1)
    """GPUs, or on CPU processes, that have the weights of each engine between them; absent: one, on CUDA more if an
    engine does not fit."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the frozen base; auto is float32 on CPU and bfloat16 on CUDA. Adapters and the residual stream are
    float32."""
    max_context_length: int | None = Field(default=None, ge=16)
    """Largest sequence in tokens; absent: the model's own, at most 8192 on CPU and 32768 on CUDA, less there if
    memory is small."""
    max_lora_rank: Literal[8, 16, 32, 64, 128, 256] | None = None
    """Largest rank a client may ask for; trainer and engines have memory for it; absent: 128, or less if memory is
    small."""
    models_at_once: int | None = Field(default=None, ge=1, le=64)
    """LoRA models of the largest rank that the trainer has memory for; absent: as many as fit, at most 8. More, or
    smaller ones, take the memory that microbatches leave."""
    train_vision: bool = False
    """Train the vision tower too, except in models whose user_metadata has train_vision false."""
    replay_routing: bool = False
    """In mixtures of experts, send sampled tokens to the same experts in training as in the sampler."""
    stable_reinforce: Literal["importance_sampling", "ppo", "cispo"] | None = None
    """Published loss that answers stable_reinforce, whose own formula is not published; absent: it is refused."""
    base_copies: Literal[1, 2] | None = None
    """Copies of a base on a GPU: 2, the trainer's and the engine's; or 1, which a third process holds for both. Absent:
    1 on CUDA in bfloat16, where trainer and engine are on one GPU and each has the whole base."""
    base_precision: Literal["fp8"] | None = None
    """fp8: trainers keep the linears of a base whose files are in fp8 by blocks as they are, and dequantise them for
    each use. Absent: they are dequantised once, to twice the memory. The numbers are the same."""
    full: bool = False
    """Train all weights of decoder, embeddings and head instead of adapters: one model at a time on each base."""
    max_tokens_per_microbatch: int | None = Field(default=None, ge=16)
    """Tokens of one forward pass in training, a longer datum running alone; absent: 1024 on CPU, 16384 on CUDA."""
    max_concurrent_samples: int = Field(default=256, ge=1)
    """Sequences that an engine decodes at once; more wait. Eight more are reserved for owners with none running."""
    adapter_slots: int | None = Field(default=None, ge=1, le=64)
    """Adapters an engine decodes with at once, each with memory for the largest rank; more share the slots. Absent: as
    many as models_at_once."""
    kv_cache_bytes: int | None = Field(default=None, ge=1 << 20)
    """KV cache of an engine; absent: two whole contexts, at least 512 MiB, on CPU; on CUDA a context, and what the plan
    leaves over."""
    image_cache_bytes: int = Field(default=512 << 20, ge=0)
    """Images cached per process, by content: pixels in the sampler, the vision tower's output in the trainer."""
    max_image_pixels: int = Field(default=50_000_000, ge=1)
    """Larger images are refused before they are decoded."""
    max_images_per_prompt: int = Field(default=64, ge=1)
    """Images in one sampling prompt."""
    cluster: bool = False
    """Let other machines join, which sample and train too; needs the extra `cluster`."""
    cluster_gradients: Literal["float32", "bfloat16"] = "float32"
    """Precision in which adapters' gradients travel between the machines of a trainer."""
    cluster_address: str | None = None
    """Address of this machine by which the others reach it; absent: the one by which it reaches its network."""
    cluster_port: int = Field(default=8100, ge=1024, le=65533)
    """Port at which other machines join; Ray takes the two behind it, and free ones."""
    cluster_token_file: Path = Path("cluster-token")
    """File of the secret with which other machines join, made at the first start."""
    cluster_ray_address: str | None = None
    """HOST:PORT, or `auto`, of a Ray cluster that exists, whose machines join by themselves; absent: RAY_ADDRESS, else
    a Ray of the server's own."""
    scratch_dir: Path = Path("scratch")
    """Directory of the sampler's own links to adapters in use, emptied at start, and of compiled kernels, kept.
    Machines of a Ray cluster that exists have theirs at the same path, each in nodes/NAME."""


@dataclass(frozen=True)
class MemoryPart:
    """What one process of a model takes of one GPU for one purpose."""

    model: str
    gpu: int
    """Number of the GPU; on the CPU 0, for the main memory."""
    process: Process
    name: str
    size_bytes: int


@dataclass(frozen=True)
class ExaminedModel:
    """A model as it would be served here, according to its files."""

    name: str
    arch: str
    takes_images: bool
    dtype: str
    weight_bytes: int
    """Bytes of one copy; the trainer and each engine have one."""
    kv_cache_bytes: int
    """Least KV cache of its sampler."""
    context: int
    max_lora_rank: int
    adapter_slots: int
    replicates: bool
    """True if each of its trainer's ranks has the whole base."""
    placement: Placement | None
    """Its place; None if the models do not fit."""


@dataclass(frozen=True)
class ExaminedPatch:
    """A change inside another project's code, compared with the installed version."""

    name: str
    target: str
    state: str
    """`as written`, `changed` or `absent`: that of the code that it changes."""
    why: str


@dataclass(frozen=True)
class Examination:
    """Resources of this machine, and what the configured models need."""

    versions: Mapping[str, str]
    device: str
    main_bytes: int
    """Free main memory."""
    gpus: Sequence[tuple[str, int]]
    """Name and memory of each."""
    models: Sequence[ExaminedModel]
    parts: Sequence[MemoryPart]
    """Their parts on every GPU, as planned; empty if the models do not fit."""
    patches: Sequence[ExaminedPatch]
    idle: str | None
    """Sentence about the GPUs that the plan leaves idle."""
    problem: str | None
    """Reason why they cannot be served."""
