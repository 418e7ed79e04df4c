"""What the server asks of a trainer's ranks: every rank gets the same command, matched there by type."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from api_schemas.training import (
    AdamParams,
    ForwardBackwardOutput,
    OptimStepResponse,
    Trainable,
)
from backends.processes.rpc import Command
from backends.protocol import EncodedBatch


@dataclass(frozen=True)
class TrainerConfig:
    """What every rank is started with; the fields mean what BackendConfig says of them."""

    name: str
    source: str
    """A local directory."""
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    max_context_length: int
    max_lora_rank: int
    max_tokens_per_microbatch: int
    image_cache_bytes: int
    max_image_pixels: int
    gpus: tuple[int, ...] = ()
    """The GPUs it may use, by the server's numbers; none named: all that the server sees."""
    gpu_memory_fraction: float = 1.0
    """Part of its GPU's memory that each rank may take."""
    gpu_memory_bytes: int | None = None
    """The same in bytes, into which rows are made to fit; absent: they are not."""
    shares_rows: bool = False
    """Whether datums of several models are computed in one row, where a row of one model's leaves room."""
    stable_reinforce: str | None = None
    train_vision: bool = False
    full: bool = False
    """Whether the model on it trains all weights, and is the only one."""
    routing_dir: Path | None = None
    """Where the sampler keeps which experts it sent tokens to; None: routers choose."""


@dataclass(frozen=True)
class Start(Command[None]):
    """Load the base; the first command of a process."""

    config: TrainerConfig


@dataclass(frozen=True)
class CreateModel(Command[None]):
    """`protocol.Trainer.create_model`."""

    model_id: str
    lora: Trainable


@dataclass(frozen=True)
class DeleteModel(Command[None]):
    """`protocol.Trainer.delete_model`."""

    model_id: str


@dataclass(frozen=True)
class NewPass:
    """`protocol.Trainer.forward_backward`."""

    number: int
    """Names it until it is finished."""
    model_id: str
    owner: str
    batch: EncodedBatch
    backward: bool


FinishedPass = tuple[int, ForwardBackwardOutput | Exception]
"""The number of a forward_backward, and its output or why it failed."""


@dataclass(frozen=True)
class ComputedRows:
    """What came of it."""

    finished: list[FinishedPass]
    """On rank 0 those that are now done, and on all ranks those that failed."""
    in_rows: tuple[int, ...]
    """Numbers of those that had datums in it."""


@dataclass(frozen=True)
class ComputeRows(Command[ComputedRows]):
    """Take up forward_backwards, and compute the next row; only rank 0 answers with outputs."""

    new: tuple[NewPass, ...]
    order: tuple[int, ...]
    """Numbers of those that may be in the row, the first of which must be."""


@dataclass(frozen=True)
class DropPasses(Command[None]):
    """Nobody waits for these forward_backwards any more."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class MarkIncomplete(Command[None]):
    """`protocol.Trainer.mark_incomplete`."""

    model_id: str


@dataclass(frozen=True)
class OptimStep(Command[OptimStepResponse]):
    """`protocol.Trainer.optim_step`."""

    model_id: str
    adam: AdamParams


@dataclass(frozen=True)
class SaveState(Command[None]):
    """`protocol.Trainer.save_state`."""

    model_id: str
    directory: Path


@dataclass(frozen=True)
class LoadState(Command[None]):
    """`protocol.Trainer.load_state`."""

    model_id: str
    directory: Path
    with_optimizer: bool


@dataclass(frozen=True)
class SaveSamplerWeights(Command[None]):
    """`protocol.Trainer.save_sampler_weights`."""

    model_id: str
    directory: Path
    for_elsewhere: bool


@dataclass(frozen=True)
class Snapshot(Command[None]):
    """`protocol.Trainer.snapshot`, up to where the copy is made."""

    model_id: str
    directory: Path


@dataclass(frozen=True)
class SnapshotWritten(Command[None]):
    """Answered when the directory of a snapshot is there; of rank 0 alone."""

    directory: Path


@dataclass(frozen=True)
class Resume(Command[None]):
    """`protocol.Trainer.resume`."""

    model_id: str
    lora: Trainable
    directory: Path


ModelCommand = (
    CreateModel
    | DeleteModel
    | ComputeRows
    | DropPasses
    | MarkIncomplete
    | OptimStep
    | SaveState
    | LoadState
    | SaveSamplerWeights
    | Snapshot
    | SnapshotWritten
    | Resume
)
