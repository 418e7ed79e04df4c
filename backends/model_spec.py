"""The description of a served base model, passed whole from configuration to clients, trainer ranks and sampler."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tinker_server.backends.protocol import BaseModelInfo

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]
BasePrecision = Literal["fp8", "mxfp4"]
ENGINE_GRAPHS_BYTES = 7 << 28
"""Bytes that an engine's captured CUDA graphs take of its part of a GPU: 1.54 GiB on an H100, with 8 layers of a dense
model of 4 billion."""
MAX_SUMMED_RANK = 256
"""Summed ranks of a microbatch's models: above, they cost more than another microbatch (on an H200)."""
ENGINE_TOKENS = 8192
"""Tokens of an engine's step on CUDA, unless its GPUs are small."""
DRAWN_TOKENS = 1
"""Tokens by which an engine's sequence may be longer than the served context: vLLM draws one behind every prompt, even
if only the prompt's scores are asked for. It is never computed."""


@dataclass(frozen=True)
class Mesh:
    """The axes along which a trainer's ranks on one machine divide the work. Other machines that have as many are one
    more axis: each has the base once more, and computes different samples."""

    replicate: int = 1
    """Ranks with the whole base each."""
    shard: int = 1
    """Ranks that have the base's weights between them (FSDP2)."""
    context: int = 1
    """Of all these ranks so many consecutive ranks compute the same samples, each a slice of a microbatch's tokens."""

    def __post_init__(self) -> None:
        """Raise ValueError unless the ranks are groups of as many as there are slices."""
        if self.size % self.context:
            raise ValueError(f"{self.size} ranks are no groups of {self.context} that compute a slice each")

    @property
    def size(self) -> int:
        """Number of ranks on a machine."""
        return self.replicate * self.shard


@dataclass(frozen=True)
class Placement:
    """The GPUs of a base model, and its parts of their memory."""

    gpus: tuple[int, ...] = ()
    """A GPU for each trainer rank, by the server's numbers; none on the CPU."""
    trainer_fraction: float = 1.0
    """Part of each of its GPUs that torch may fill in the trainer."""
    sampler_fraction: float = 1.0
    """Part of each GPU of an engine that the engine fills."""
    trainer_bytes: int = 0
    """`trainer_fraction` of the smallest of its GPUs, into which microbatches are made to fit; 0: they are not."""
    engines: tuple[tuple[int, ...], ...] = ((),)
    """The GPUs of each engine of the sampler; none on the CPU."""
    gpu_fraction: float = 1.0
    """Part of each GPU that all processes of the server together may fill."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec(BaseModelInfo):
    """A served base model, as the server knows it, and with the settings by which trainer and sampler run it.
    BackendConfig explains the settings."""

    directory: str
    """The local directory of its files."""
    files_fingerprint: str
    """That of the files alone, which other machines have too: `fingerprint` tells in which form matrices are made of
    them at load."""
    device: Device
    dtype: Dtype
    weight_bytes: int = 0
    """Bytes of a copy."""
    mesh: Mesh = Mesh()
    across_dtype: Dtype = "float32"
    """Precision in which adapters' gradients travel between the machines of a trainer."""
    placement: Placement = Placement()
    max_tokens_per_microbatch: int
    shares_microbatches: bool = False
    """True if datums of several models may be computed in the same microbatch."""
    summed_lora_rank: int = MAX_SUMMED_RANK
    """To which the ranks of such models may sum: memory is planned for it."""
    stable_reinforce: str | None = None
    max_concurrent_samples: int
    engine_tokens: int = ENGINE_TOKENS
    """Tokens of an engine's step on CUDA, if its sequences are not more."""
    offloads_inputs: bool = False
    """True if inputs of layers that recompute wait in main memory."""
    adapter_slots: int
    max_images_per_prompt: int
    image_cache_bytes: int
    max_image_pixels: int
    kv_cache_bytes: int | None
    """None, on CUDA alone: what weights and activations leave of `placement.sampler_fraction`."""
    silence_s: float
    """A sampler that has work and takes no step for so long is ended."""
    scratch_dir: Path
    """The sampler's own links to the base's files and to adapters in use, on its machine; each of several engines has a
    part of it."""
    compiled_dir: Path | None = None
    """Directory of the caches of torch, Triton and vLLM, which they keep from one start to the next; None: their
    own."""
    routing_dir: Path | None = None
    """Directory in which the sampler records the experts of tokens, for a trainer on the same machine; None: routers
    choose."""
    tensor_parallel: int = 1
    """Ranks of each engine, which have its weights between them."""
    is_quantised: bool = False
    """True if trainer and engine dequantise the base as they read its files."""
    base_precision: BasePrecision | None = None
    """Precision in which trainer and engine keep the linears and experts of the base's decoder, or its experts alone
    (mxfp4); None: `dtype`."""
    base_copies: int = 2
    """2: trainer and engine have a copy of the base each; 1: they map one that another process holds."""
    base_dir: Path | None = None
    """Directory of the sockets at which the one copy on each GPU is asked for; None: there are two."""
    received_dir: Path | None = None
    """Directory of the weights that were sent to a machine, for all of its engines; None: the engine is on the server's
    own machine."""
    engine: int | None = None
    """Number of the engine that this describes; None: it describes all, or the only one."""

    @property
    def makes_fp8(self) -> bool:
        """True if trainer and engine quantise the base as they read its files."""
        return self.base_precision == "fp8" and not self.is_quantised

    @property
    def divides_base(self) -> bool:
        """True if the ranks of the engine have the one copy of the base between them, and those of the trainer map
        it."""
        return self.base_copies == 1 and self.tensor_parallel > 1

    @property
    def base_gpus(self) -> tuple[int | None, ...]:
        """The GPUs that have the base, by the server's numbers; one of no number if none was chosen, as on the CPU,
        where parts of a divided one have the numbers of the engine's ranks."""
        if self.divides_base:  # by rank
            return self.placement.engines[0] or tuple(range(self.tensor_parallel))
        numbers = {gpu for gpus in (self.placement.gpus, *self.placement.engines) for gpu in gpus}
        return tuple(sorted(numbers)) or (None,)

    def base_socket(self, gpu: int | None) -> Path:
        """Return the socket at which the one copy on a GPU is asked for."""
        assert self.base_dir is not None
        return self.base_dir / ("base.sock" if gpu is None else f"gpu-{gpu}.sock")

    def of_engine(self, number: int) -> "ModelSpec":
        """Return the spec of an engine of several: with its own GPUs and a scratch directory that no other empties."""
        if len(self.placement.engines) == 1:
            return self
        placement = replace(self.placement, engines=(self.placement.engines[number],))
        return replace(self, engine=number, placement=placement, scratch_dir=self.scratch_dir / f"engine-{number}")
