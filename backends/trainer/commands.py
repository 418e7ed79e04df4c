"""Commands to a trainer's ranks: every rank gets the same command and matches it by type."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tinker_server.api_schemas.training import (
    AdamParams,
    ForwardBackwardOutput,
    Layout,
    OptimStepResponse,
    Trainable,
)
from tinker_server.backends.formats.load_check import LoadCheck
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.processes.rpc import Command
from tinker_server.backends.protocol import EncodedBatch, SavedForm


@dataclass(frozen=True)
class Start(Command[LoadCheck]):
    """Load the base, and score a text by it. Always the first command."""

    spec: ModelSpec


class Made(NamedTuple):
    """A model as `protocol.LoadedModel` describes it."""

    size_bytes: int
    layout: Layout


@dataclass(frozen=True)
class CreateModel(Command[Made]):
    """`protocol.Trainer.create_model`."""

    model_id: str
    lora: Trainable
    snapshot: Path | None


@dataclass(frozen=True)
class DeleteModel(Command[None]):
    """`protocol.Trainer.delete_model`."""

    model_id: str


@dataclass(frozen=True)
class NewRequest:
    """`protocol.Trainer.forward_backward`."""

    number: int
    """Identifies the request until it is finished."""
    model_id: str
    owner: str
    batch: EncodedBatch
    backward: bool


FinishedRequest = tuple[int, ForwardBackwardOutput | Exception]
"""The number of a forward_backward, and its output or error."""


@dataclass(frozen=True)
class ComputedMicrobatch:
    """Outcome of a microbatch."""

    finished: list[FinishedRequest]
    """Requests that are now done, on rank 0 alone, and those that failed, on all ranks."""
    members: tuple[int, ...]
    """Numbers of the requests that had datums in it."""


@dataclass(frozen=True)
class ComputeMicrobatch(Command[ComputedMicrobatch]):
    """Admit forward_backwards, then compute the next microbatch; only rank 0 answers with outputs."""

    new: tuple[NewRequest, ...]
    order: tuple[int, ...]
    """Numbers of the requests that may be in the microbatch; the first one must be."""


@dataclass(frozen=True)
class CancelRequests(Command[None]):
    """Cancel forward_backwards that nobody waits for any more."""

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
class Save(Command[None]):
    """`protocol.Trainer.save`."""

    model_id: str
    directory: Path
    form: SavedForm


@dataclass(frozen=True)
class LoadState(Command[Made]):
    """`protocol.Trainer.load_state`. Returns what CreateModel does."""

    model_id: str
    directory: Path
    with_optimizer: bool


@dataclass(frozen=True)
class Snapshot(Command[None]):
    """`protocol.Trainer.snapshot`, up to the copy."""

    model_id: str
    directory: Path


@dataclass(frozen=True)
class AwaitSnapshot(Command[None]):
    """Wait until the directory of a snapshot is there; sent to rank 0 alone."""

    directory: Path


ModelCommand = (
    CreateModel
    | DeleteModel
    | ComputeMicrobatch
    | CancelRequests
    | MarkIncomplete
    | OptimStep
    | Save
    | LoadState
    | Snapshot
    | AwaitSnapshot
)
