"""The backend's settings, read once as part of the server's, and the report on serving them from this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tinker_server.api_schemas.training import Layout
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.protocol import BackendFailed

Process = Literal["trainer", "engine", "holder"]


class BackendConfig(BaseModel):
    """Plain values; the defaults fit a small machine."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    models: dict[str, str] = {}
    """Served base models: each public name with a local directory or a hub id. Two names may have the same source."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto takes CUDA if torch sees a GPU."""
    ranks: int | None = Field(default=None, ge=1)
    """Trainer processes for each base model. If absent: one for each of trainer_gpus; else context_parallel on a CPU,
    and on CUDA all GPUs, divided over the models; with sampler_gpus or base_precision as few as fit. They shard the
    base (FSDP2) unless each has room for all of it. They always shard a model's masters and moments."""
    context_parallel: int = Field(default=1, ge=1)
    """Trainer ranks that compute each packed microbatch together, each a slice of its tokens. Activations on each GPU
    are smaller by this factor. Must divide ranks and the model's heads."""
    trainer_gpus: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Numbers of the GPUs that trainers may use. If absent: any GPU."""
    engines: int | None = Field(default=None, ge=1)
    """vLLM engines for each base model. If absent: one on a CPU; on CUDA one on each GPU with room: of sampler_gpus,
    else of the model's trainer, and unless trainer_gpus is set, of those without a trainer."""
    sampler_gpus: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Numbers of the GPUs that engines may use, which may be the trainers'. If absent: any GPU, first those of the
    trainers."""
    tensor_parallel: int | None = Field(default=None, ge=1)
    """GPUs, or processes on a CPU, over which the weights of each engine are divided. If absent: one, or on CUDA as
    many as an engine needs."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the frozen base. auto is float32 on a CPU and bfloat16 on CUDA. Adapters and the residual stream are
    always float32."""
    max_context_length: int | None = Field(default=None, ge=16)
    """Longest sequence in tokens. If absent: the model's own length, at most 8192 on a CPU and 32768 on CUDA, or less
    on CUDA if memory is small."""
    max_lora_rank: Literal[8, 16, 32, 64, 128, 256] | None = None
    """Largest LoRA rank that a client may ask for. Trainer and engines reserve memory for it. If absent: 128, or less
    if memory is small."""
    models_at_once: int | None = Field(default=None, ge=1, le=64)
    """LoRA models of the largest rank for which the trainer reserves memory. If absent: 2 of rank 128, 4 of rank 64,
    else 1; then as many as leave room for a KV cache of 128 sequences of 2,048 tokens, at most 8. Further or smaller
    models use memory of the microbatches."""
    train_vision: bool = False
    """Train the vision tower too, except in models whose user_metadata has train_vision false."""
    lora_layout: Layout = "service"
    """LoRA of new models whose user_metadata has no `experts`. service: as at the hosted service, the experts of a
    layer share the factors on the hidden side, and linear attention, Mamba2 and latent attention have its target
    modules. own: every expert and every linear has an adapter of its own. Models without these are the same. The
    engine's slots for experts have this layout; those of own take both."""
    replay_routing: bool = False
    """In mixtures of experts, send sampled tokens to the same experts in training as in the sampler."""
    stable_reinforce: Literal["importance_sampling", "ppo", "cispo"] | None = None
    """Published loss that is computed for stable_reinforce, whose own formula is not published. If absent:
    stable_reinforce is refused."""
    base_copies: Literal[1, 2] | None = None
    """Copies of a base on a GPU: 2, of trainer and engine; or 1, which a third process holds for both. If absent: 1 on
    CUDA in bfloat16 if trainer and engine are on one GPU and each has the whole base, but 2 where they lay it out
    differently, and with cluster. 1 with tensor_parallel: the GPUs have one copy between them, as they do by default
    where a base in bfloat16 fits in no other way."""
    base_precision: Literal["fp8", "mxfp4"] | None = None
    """fp8: trainers and engines keep the linears and experts of a base in fp8 by blocks, and dequantise them for each
    use: as the files have them, or, if these are not quantised, made of them at load. mxfp4: the same of experts that
    the files have in MXFP4. If absent: those of files in fp8 or MXFP4 are dequantised once, to twice or four times the
    memory, with equal numbers."""
    gpu_memory_bytes: int | None = Field(default=None, ge=1 << 30)
    """Memory of each GPU that the server takes in all, where others use the rest. The GPUs must be alike. If absent:
    all of it."""
    max_tokens_per_microbatch: int | None = Field(default=None, ge=16)
    """Tokens of one forward pass on a rank in training. A longer datum runs alone. If absent: 1024 on a CPU, 16384 on
    CUDA."""
    max_concurrent_samples: int | None = Field(default=None, ge=1)
    """Sequences that an engine decodes at once. Further sequences wait. Eight more are reserved for owners without a
    running sequence. If absent: 256, or 64 if all GPUs have less than 28 GiB."""
    adapter_slots: int | None = Field(default=None, ge=1, le=64)
    """Adapters with which an engine decodes at once, each with memory for the largest rank. Further adapters take turns
    in these slots. If absent: as many as models_at_once, or up to 4 that leave room for the same KV cache."""
    kv_cache_bytes: int | None = Field(default=None, ge=1 << 20)
    """KV cache of an engine. If absent: on a CPU two whole contexts, at least 512 MiB; on CUDA one context, and part of
    the remaining memory."""
    image_cache_bytes: int = Field(default=512 << 20, ge=0)
    """Size of the image cache of each process: pixels in the sampler, features of the vision tower in the trainer."""
    max_image_pixels: int = Field(default=50_000_000, ge=1)
    """Largest number of pixels of an image. Larger images are refused before they are decoded."""
    max_images_per_prompt: int = Field(default=64, ge=1)
    """Largest number of images in one sampling prompt."""
    cluster: bool = False
    """Let other machines join, which then sample and train too. Needs the extra `cluster`."""
    cluster_gradients: Literal["float32", "bfloat16"] = "float32"
    """Precision in which the machines of a trainer exchange gradients of adapters."""
    cluster_address: str | None = None
    """Address by which other machines reach this one. If absent: the address by which this machine reaches its
    network."""
    cluster_port: int = Field(default=8100, ge=1024, le=65533)
    """Port at which other machines join. Ray uses the next two ports, and free ones."""
    cluster_token_file: Path = Path("cluster-token")
    """File of the secret with which other machines join. It is created at the first start."""
    cluster_ray_address: str | None = None
    """HOST:PORT, or `auto`, of an existing Ray cluster, whose machines join by themselves. If absent: RAY_ADDRESS, else
    the server starts its own Ray."""
    scratch_dir: Path = Path("scratch")
    """Directory of the sampler's links to models and adapters in use, which are deleted at start, and of the caches of
    torch, Triton and vLLM, which are kept, unless `TORCHINDUCTOR_CACHE_DIR`, `TRITON_CACHE_DIR` or `VLLM_CACHE_ROOT`
    name other places. Machines of an existing Ray cluster use the same path, each in nodes/NAME."""

    @property
    def samples_at_once(self) -> int:
        """Sequences that an engine decodes at once, at most."""
        return self.max_concurrent_samples or 256

    @property
    def names_gpus(self) -> bool:
        """True if a setting says how many GPUs a model has, or which."""
        return any((self.ranks, self.trainer_gpus, self.sampler_gpus))


@dataclass(frozen=True)
class MemoryPart:
    """What one process of a model takes of one GPU for a purpose."""

    model: str
    gpu: int
    """Number of the GPU; on the CPU 0, for the main memory."""
    process: Process
    name: str
    size_bytes: int


@dataclass(frozen=True)
class ExaminedModel:
    """A model as it would be served here, according to its files."""

    spec: ModelSpec
    """Without a placement if the models do not fit."""
    kv_cache_bytes: int
    """Least KV cache of its sampler."""


@dataclass(frozen=True)
class ExaminedPatch:
    """A change inside another project's code, compared with the installed version."""

    name: str
    target: str
    state: str
    """`as written`, `changed` or `absent`: that of the code that it changes."""
    why: str


@dataclass(frozen=True)
class FittingCards:
    """Cards with which the models would fit, whatever this machine has."""

    context: int
    cards: Sequence[tuple[int, str]]
    """A number of cards, and the smallest card of which so many do. Larger ones do too."""


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
    problem: BackendFailed | None
    """Reason why they cannot be served."""
    gpu_limit_bytes: int | None
    """Part of each GPU that may be used, if a setting limits it."""
    fitting: Sequence[FittingCards]
    """Cards that would do, by context; empty without models."""
    cluster: bool = False
    """True if other machines may join."""
