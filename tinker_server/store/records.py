"""The records that the store returns: frozen values, which no later change of the database affects."""

import sys
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tinker_server.api_schemas.training import Trainable
from tinker_server.api_schemas.weights import TinkerPath
from tinker_server.store import tables

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R")
NO_SESSION = ""
"""The session_id of samples outside any session."""
UsageKind = Literal["training", "prefill", "cached_prefill", "sampled", "checkpoint", "trainer_ms"]


@dataclass(frozen=True, kw_only=True)
class Session:
    """A client, with its heartbeat."""

    session_id: str
    owner: str
    tags: list[str]
    user_metadata: dict[str, str]
    project_id: str | None = None
    display_name: str | None = None
    created_at: float
    last_heartbeat: float
    finished_at: float | None = None
    finish_reason: str | None = None
    finish_detail: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A model that was created, in memory or not; see `tables.TrainingRunRow`."""

    model_id: str
    owner: str
    session_id: str
    model_seq_id: int
    base_model: str
    base_fingerprint: str | None = None
    trainable: Trainable
    user_metadata: dict[str, Any] | None = None
    name: str | None = None
    notes: str | None = None
    tags: list[str] | None = None
    optimizer_config: dict[str, object]
    status: str
    snapshot: str | None = None
    computed_with: dict[str, str] | None = None
    created_at: float
    archived_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class SamplingSession:
    """The weights that a sampling client samples from; see `tables.SamplingSessionRow`."""

    sampling_session_id: str
    owner: str
    session_id: str
    base_model: str
    base_fingerprint: str | None = None
    model_path: str | None = None
    directory: str | None = None
    weights_deleted_at: float | None = None
    size_bytes: int | None = None
    created_at: float
    used_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Saved weights; see `tables.CheckpointRow`."""

    tinker_path: str
    owner: str
    run_id: str
    kind: str
    name: str
    directory: str
    base_model: str
    base_fingerprint: str | None = None
    trainable: Trainable
    user_metadata: dict[str, Any] | None = None
    size_bytes: int
    created_at: float
    expires_at: float | None = None
    public: bool = False
    saved_as: int | None = None
    copied_from: str | None = None

    def has_expired(self, now: float) -> bool:
        """Return whether its time is over; its files may still be there."""
        return self.expires_at is not None and self.expires_at <= now

    @classmethod
    def of_run(
        cls, run: "TrainingRun", path: TinkerPath, directory: str, size_bytes: int, created_at: float
    ) -> "Checkpoint":
        """Return the record of weights of a run that have just been saved."""
        return cls(
            tinker_path=str(path),
            owner=run.owner,
            run_id=path.run_id,
            kind=path.kind,
            name=path.name,
            directory=directory,
            base_model=run.base_model,
            base_fingerprint=run.base_fingerprint,
            trainable=run.trainable,
            size_bytes=size_bytes,
            created_at=created_at,
        )


@dataclass(frozen=True)
class Snapshot:
    """A copy of a model on disk."""

    directory: str
    position: int
    """That of the model's log."""
    trainable: Trainable
    """What its weights are, of which those that were loaded may have another layout than the model was made with."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A finished forward_backward or optim_step; see `tables.StepRow`."""

    model_id: str
    seq_id: int
    step: int
    at: float
    tokens: int = 0
    total_tokens: int = 0
    loss: float | None = None
    loss_tokens: int | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    sampler_gap: float | None = None
    divergence: float | None = None
    clip_fraction: float | None = None
    advantage: float | None = None
    shared_tokens: float | None = None
    digest: str | None = None
    waited_s: float
    run_s: float


def record(kind: type[R], row: tables.Table) -> R:
    """Make the record of a row, which has all attributes of the record."""
    return kind(**{field.name: getattr(row, field.name) for field in fields(kind)})  # type: ignore[arg-type]


def held_bytes(value: object) -> int:
    """Return the bytes of memory that a record, or a value in it, takes."""
    num_bytes = sys.getsizeof(value)
    match value:
        case dict():
            return num_bytes + sum(held_bytes(part) for part in (*value, *value.values()))
        case list():
            return num_bytes + sum(map(held_bytes, value))
        case None | bool() | int() | float() | str():
            return num_bytes
    return num_bytes + sum(held_bytes(part) for part in vars(value).values())


def columns(record: "DataclassInstance") -> dict[str, object]:
    """Return the columns of the record's row."""
    return {field.name: getattr(record, field.name) for field in fields(record)}
