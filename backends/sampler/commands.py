"""What the server asks of a sampler process, matched there by type."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from api_schemas.sampling import SampleResponse
from backends.processes.rpc import Command
from backends.protocol import ChatTask, ChatUsage, EngineUse, SamplingTask


@dataclass(frozen=True)
class SamplerConfig:
    """One base model's sampler; the fields mean what BackendConfig says of them."""

    name: str
    source: str
    """A local directory."""
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    max_context_length: int
    max_lora_rank: int
    max_concurrent_samples: int
    adapter_slots: int
    max_images_per_prompt: int
    gpu_memory_fraction: float
    kv_cache_bytes: int | None
    """None, on CUDA alone: what weights and activations leave of `gpu_memory_fraction`."""
    image_cache_bytes: int
    max_image_pixels: int
    scratch_dir: Path
    silence_s: float
    """A process that has work and takes no step for so long is taken to hang."""
    gpus: tuple[int, ...] = ()
    """The GPUs it may use, by the server's numbers; none named: all that the server sees."""
    train_vision: bool = False
    full: bool = False
    """Whether what is sampled from are whole models, one at a time, and no adapters."""
    routing_dir: Path | None = None
    """Where to keep which experts tokens were sent to, for the trainer; None: it is not asked for."""


@dataclass(frozen=True)
class Start(Command[None]):
    """Load the model; the first command of a process."""

    config: SamplerConfig


@dataclass(frozen=True)
class Sample(Command[SampleResponse]):
    """Do the task; the answer comes when all its samples are done."""

    task: SamplingTask


@dataclass(frozen=True)
class Chat(Command[ChatUsage]):
    """`protocol.Sampler.chat`; the answer itself comes before, in parts."""

    task: ChatTask


@dataclass(frozen=True)
class Publish(Command[None]):
    """`protocol.Sampler.publish`."""

    weights: Path
    owner: str


@dataclass(frozen=True)
class CountProgress(Command[int]):
    """A number that grows with every step of the engine and every task done."""


@dataclass(frozen=True)
class CountRows(Command[EngineUse]):
    """What the engine has to do now."""


GrammarKind = Literal["json", "regex", "grammar", "structural_tag"]


@dataclass(frozen=True)
class StartGrammars(Command[None]):
    """Read a tokenizer, in xgrammar's form; the first command of a process that tries grammars."""

    tokenizer: str
    limit_s: float
    """CPU time of each grammar."""


@dataclass(frozen=True)
class TryGrammar(Command[None]):
    """Compile a grammar. The process ends where that takes too long."""

    kind: GrammarKind
    text: str
