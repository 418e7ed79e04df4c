"""The tables. Times are Unix seconds; ids are text; numbers of clients reach 10^18.

Rows stay in this folder. It returns the frozen records of `records.py`.
"""

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Computed,
    Dialect,
    Double,
    ForeignKey,
    Index,
    LargeBinary,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from tinker_server.api_schemas.training import Trainable


class TrainableJson(TypeDecorator[Trainable]):
    """A `Trainable` as a JSON value."""

    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: Trainable | None, dialect: Dialect) -> dict[str, object] | None:
        return None if value is None else value.model_dump()

    def process_result_value(self, value: object, dialect: Dialect) -> Trainable | None:
        return None if value is None else Trainable.model_validate(value)


_LOGGED = text("position IS NOT NULL")
_HELD = text("held_bytes > 0")


class Table(DeclarativeBase):
    type_annotation_map = {
        float: Double,
        int: BigInteger,
        bytes: LargeBinary,
        dict[str, Any]: JSON,
        dict[str, str]: JSON,
        list[str]: JSON,
    }


class SessionRow(Table):
    """A client, with its heartbeat."""

    __tablename__ = "sessions"

    session_id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(server_default="local")
    """Name of the API key it was created with; likewise in all tables."""
    idempotency_key: Mapped[str | None] = mapped_column(unique=True)
    """Owner and idempotency key of the request that created it, so that a retry finds it."""
    tags: Mapped[list[str]]
    user_metadata: Mapped[dict[str, str]]
    project_id: Mapped[str | None]
    display_name: Mapped[str | None]
    sdk_version: Mapped[str]
    created_at: Mapped[float]
    last_heartbeat: Mapped[float]
    finished_at: Mapped[float | None]
    finish_reason: Mapped[str | None]
    finish_detail: Mapped[str | None]


class TrainingRunRow(Table):
    """A model that was created. The row stays when the model is gone from memory."""

    __tablename__ = "training_runs"

    model_id: Mapped[str] = mapped_column(primary_key=True)
    """`{session_id}:train:{model_seq_id}`"""
    owner: Mapped[str] = mapped_column(server_default="local")
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.session_id"), index=True)
    model_seq_id: Mapped[int]
    base_model: Mapped[str]
    base_fingerprint: Mapped[str | None]
    """Fingerprint of the base model's files; null: made before it was recorded."""
    trainable: Mapped[Trainable] = mapped_column(TrainableJson)
    user_metadata: Mapped[dict[str, Any] | None]
    name: Mapped[str | None]
    """Name that its owner gave it on the dashboard; likewise notes and tags."""
    notes: Mapped[str | None]
    tags: Mapped[list[str] | None]
    optimizer_config: Mapped[dict[str, Any]]
    status: Mapped[str]
    """`active`; `suspended`: on disk until its next operation; `lost`: unloaded."""
    snapshot: Mapped[str | None]
    """Directory, below the data directory, of the snapshot that the log is run on; null: on a fresh model."""
    computed_with: Mapped[dict[str, str] | None]
    """`BaseModelInfo.numerics` when the snapshot was taken: what results depend on beside model and operation."""
    created_at: Mapped[float]
    archived_at: Mapped[float | None]
    """Time at which its owner archived it, so that lists of the dashboard leave it out."""


class SamplingSessionRow(Table):
    """The base model, or the saved weights on it, that a sampling client samples from."""

    __tablename__ = "sampling_sessions"

    sampling_session_id: Mapped[str] = mapped_column(primary_key=True)
    """`{session_id}:sample:{sampling_session_seq_id}`"""
    owner: Mapped[str] = mapped_column(server_default="local")
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.session_id"), index=True)
    base_model: Mapped[str]
    model_path: Mapped[str | None]
    """tinker:// path of named weights."""
    directory: Mapped[str | None]
    """Directory of the weights, below the data directory; null: the base model alone."""
    weights_deleted_at: Mapped[float | None]
    """When weights without a name were deleted, because nobody had sampled from them for long."""
    size_bytes: Mapped[int | None]
    """Bytes of weights without a name."""
    base_fingerprint: Mapped[str | None]
    """Fingerprint of the base model's files that the weights are for; null: not known, or no weights."""
    created_at: Mapped[float]
    used_at: Mapped[float | None]
    """Time of the last sample; written from time to time."""


class CheckpointRow(Table):
    """Saved weights, with everything needed to make a model from them."""

    __tablename__ = "checkpoints"
    __table_args__ = (UniqueConstraint("run_id", "kind", "name"),)

    tinker_path: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(server_default="local")
    run_id: Mapped[str]
    kind: Mapped[str]
    name: Mapped[str]
    directory: Mapped[str]
    """Relative to the data directory."""
    base_model: Mapped[str]
    base_fingerprint: Mapped[str | None]
    """Fingerprint of the base model's files; null: made before it was recorded."""
    trainable: Mapped[Trainable] = mapped_column(TrainableJson)
    user_metadata: Mapped[dict[str, Any] | None]
    size_bytes: Mapped[int]
    created_at: Mapped[float] = mapped_column(index=True)
    expires_at: Mapped[float | None] = mapped_column(index=True)
    public: Mapped[bool] = mapped_column(default=False, server_default=false(), index=True)
    """True if every client may load it."""
    saved_as: Mapped[int | None]
    """Number of the operation that saved it; null: a copy, or saved before numbers were recorded."""
    copied_from: Mapped[str | None]
    """tinker:// path of the weights it was copied from."""


class Future(Table):
    """An accepted operation and its result."""

    __tablename__ = "futures"
    __table_args__ = (
        UniqueConstraint("lane", "seq_id"),
        Index("ix_futures_status_finished_at", "status", "finished_at"),
        Index("ix_futures_held", "owner", "held_bytes", sqlite_where=_HELD, postgresql_where=_HELD),
        Index("ix_futures_log", "lane", "position", sqlite_where=_LOGGED, postgresql_where=_LOGGED),
    )

    request_id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(server_default="local")
    kind: Mapped[str]
    lane: Mapped[str]
    """model_id for training work, sampling_session_id for samples."""
    seq_id: Mapped[int]
    request: Mapped[bytes]
    """The body as received, without its images (`image_places`). It is emptied once the operation is finished and not
    in the log of its model."""
    request_type: Mapped[str]
    digest: Mapped[str | None]
    """Hash of the body; null: accepted before it was recorded."""
    status: Mapped[str]
    """`queued`, `done`, `failed`, or `expired`: the result was deleted."""
    result: Mapped[bytes | None]
    """The result ready to send; a FutureFailed if the operation failed."""
    result_type: Mapped[str | None]
    failure_category: Mapped[str | None]
    """`user` or `server` if the operation failed, also after its result has expired."""
    created_at: Mapped[float]
    finished_at: Mapped[float | None]
    position: Mapped[int | None]
    """Position in its model's log (`replay_log.py`); null: it changed nothing, or the model's snapshot holds it."""
    loaded_directory: Mapped[str | None]
    """Directory, below the data directory, of the checkpoint that a load_weights read; null: it read none, or ended
    before this was recorded."""
    tries: Mapped[int] = mapped_column(default=0, server_default="0")
    """Servers that began it after an earlier server left it unfinished, since the last stop on request."""
    held_bytes: Mapped[int] = mapped_column(Computed("length(request) + coalesce(length(result), 0)", persisted=True))
    """Bytes of body and result. The database computes it, and the index has it: an owner's sum reads no rows."""


class FetchedRow(Table):
    """A result that was sent to its client. Apart from `futures`, where SQLite would write the result again."""

    __tablename__ = "fetched"
    __table_args__ = (Index("ix_fetched_owner_at", "owner", "at"),)

    request_id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    at: Mapped[float] = mapped_column(index=True)
    """Time at which it was sent last."""
    size_bytes: Mapped[int] = mapped_column(index=True)
    """Bytes of the result."""


class Image(Table):
    """An image of bodies that may be needed, as they have it (in JSON, base64). Deleted with the last of them."""

    __tablename__ = "images"

    digest: Mapped[str] = mapped_column(primary_key=True)
    """SHA-256, in hexadecimal digits."""
    data: Mapped[bytes]


class ImagePlaceRow(Table):
    """The position in a body of an image that is stored apart."""

    __tablename__ = "image_places"
    __table_args__ = (Index("ix_image_places_owner", "owner", "digest", "size_bytes"),)

    request_id: Mapped[str] = mapped_column(primary_key=True)
    start: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Byte of the whole body."""
    size_bytes: Mapped[int]
    digest: Mapped[str] = mapped_column(index=True)
    owner: Mapped[str] = mapped_column(server_default="local")


class StepRow(Table):
    """A finished forward_backward or optim_step, for the curves of its run. Unknown numbers are null."""

    __tablename__ = "steps"

    model_id: Mapped[str] = mapped_column(primary_key=True)
    seq_id: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int]
    """Number of the run's optim_steps before: all operations of a step have the same number."""
    at: Mapped[float] = mapped_column(index=True)
    """Time at which it finished."""
    tokens: Mapped[int]
    """Positions that were computed; 0 for an optim_step."""
    total_tokens: Mapped[int]
    """Positions of the run so far, including these."""
    loss: Mapped[float | None]
    """Sum over positions, as it was answered."""
    loss_tokens: Mapped[int | None]
    """Positions that train; the loss is divided by their number where it is shown."""
    learning_rate: Mapped[float | None]
    grad_norm: Mapped[float | None]
    sampler_gap: Mapped[float | None]
    """Mean distance between the trainer's log probabilities and those that were sent, in nats."""
    divergence: Mapped[float | None]
    """Estimate (k3) of the KL divergence of the sampling policy from the current policy."""
    clip_fraction: Mapped[float | None]
    advantage: Mapped[float | None]
    """Mean over positions that train."""
    shared_tokens: Mapped[float | None]
    """Positions that were not computed, since another datum has them too."""
    digest: Mapped[str | None]
    """Hash of the body; null: recorded before it was."""
    waited_s: Mapped[float]
    """Seconds from acceptance until it ran: waiting for earlier operations and for the trainer."""
    run_s: Mapped[float]


class ClientMetricRow(Table):
    """A number that a client reported of its run, such as a reward."""

    __tablename__ = "client_metrics"

    model_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The client's own count of steps."""
    value: Mapped[float]
    at: Mapped[float] = mapped_column(index=True)
    """Time at which it was reported last."""


class MachineLoadRow(Table):
    """The mean of a measure of the machine's load over a minute."""

    __tablename__ = "machine_loads"

    measure: Mapped[str] = mapped_column(primary_key=True)
    of: Mapped[str] = mapped_column(primary_key=True)
    """Its base model or GPU; empty for the whole machine."""
    at: Mapped[float] = mapped_column(primary_key=True, index=True)
    """End of the minute."""
    value: Mapped[float]


class UnreferencedDirectory(Table):
    """A directory that no other row references: weights are being written into it, or were given up.

    Directories that are listed when a server starts were left by a crash, and are deleted.
    """

    __tablename__ = "loose_directories"

    directory: Mapped[str] = mapped_column(primary_key=True)
    """Relative to the data directory."""
    since: Mapped[float]


class UsageRow(Table):
    """The amount of a kind of work for an owner on a base model, in a session and hour."""

    __tablename__ = "usage"

    hour: Mapped[float] = mapped_column(primary_key=True)
    """Start of the hour."""
    kind: Mapped[str] = mapped_column(primary_key=True)
    """`training`, `prefill`, `cached_prefill`, `sampled` (tokens), `checkpoint` (their number), or
    `trainer_ms` (milliseconds of the trainer, times its ranks)."""
    owner: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(primary_key=True)
    """Empty for samples outside any session."""
    base_model: Mapped[str] = mapped_column(primary_key=True)
    amount: Mapped[int]


class LeaseRow(Table):
    """A row that counts the servers that have taken the database. Only the last of them may write (`lease.py`)."""

    __tablename__ = "lease"

    epoch: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class AuditEntryRow(Table):
    """A change of saved weights or of a session's project."""

    __tablename__ = "audit"

    entry_id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(server_default="local")
    at: Mapped[float] = mapped_column(index=True)
    event: Mapped[str]
    """`<resource>_<action>`"""
    details: Mapped[dict[str, Any]]
