"""What one served base model is: read by configuration, clients, trainer ranks and sampler alike, and passed whole."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from backends.protocol import BaseModelInfo

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Mesh:
    """How a trainer's ranks divide the work: `size` of them, along three axes."""

    replicate: int = 1
    """Ranks with the whole base each, which compute different samples."""
    shard: int = 1
    """Ranks that have the base's weights between them (FSDP2), and compute different samples too."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.replicate * self.shard


@dataclass(frozen=True)
class Placement:
    """Where one base model computes."""

    gpus: tuple[int, ...] = ()
    """One for each trainer rank, by the server's numbers, and the first for the sampler too; none on the CPU."""
    trainer_fraction: float = 1.0
    """Part of each of its GPUs that torch may fill in the trainer."""
    sampler_fraction: float = 1.0
    """Part of its first GPU that the sampler fills."""
    trainer_bytes: int = 0
    """`trainer_fraction` of the smallest of its GPUs, into which microbatches are made to fit; 0: they are not."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec(BaseModelInfo):
    """One served base model: what the server says of it, and how trainer and sampler run it. Settings mean what
    BackendConfig says of them."""

    directory: str
    """The local directory of its files."""
    device: Device
    dtype: Dtype
    weight_bytes: int = 0
    """Bytes of one copy."""
    mesh: Mesh = Mesh()
    placement: Placement = Placement()
    max_tokens_per_microbatch: int
    shares_rows: bool = False
    """Whether datums of several models are computed in one microbatch, where that of one model leaves room."""
    stable_reinforce: str | None = None
    max_concurrent_samples: int
    adapter_slots: int
    max_images_per_prompt: int
    image_cache_bytes: int
    max_image_pixels: int
    kv_cache_bytes: int | None
    """None, on CUDA alone: what weights and activations leave of `placement.sampler_fraction`."""
    silence_s: float
    """A sampler that has work and takes no step for so long is taken to hang."""
    scratch_dir: Path
    """The sampler's own links to adapters in use, on its machine."""
    routing_dir: Path | None = None
    """Where the sampler keeps which experts it sent tokens to, for a trainer on the same machine; None: routers
    choose."""
