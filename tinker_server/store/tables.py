"""The tables. Times are Unix seconds; ids are text; numbers of clients reach 10^18.

Rows stay in this folder: what leaves it are the frozen records of `records.py`.
"""

from typing import Any

from sqlalchemy import JSON, BigInteger, Dialect, Double, ForeignKey, Index, LargeBinary, UniqueConstraint, false, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from api_schemas.training import Trainable


class TrainableJson(TypeDecorator[Trainable]):
    """What a model trains, as one JSON value."""

    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: Trainable | None, dialect: Dialect) -> Any:
        return None if value is None else value.model_dump()

    def process_result_value(self, value: Any, dialect: Dialect) -> Trainable | None:
        return None if value is None else Trainable.model_validate(value)


_LOGGED = text("position IS NOT NULL")


class Table(DeclarativeBase):
    type_annotation_map = {float: Double, int: BigInteger, bytes: LargeBinary, dict[str, Any]: JSON, list[str]: JSON}


class SessionRow(Table):
    """One client, with its heartbeat."""

    __tablename__ = "sessions"

    session_id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(server_default="local")
    """Name of the API key it was created with; so for all tables."""
    idempotency_key: Mapped[str | None] = mapped_column(unique=True)
    """Of the request that created it and its owner, so that a retry finds it."""
    tags: Mapped[list[str]]
    user_metadata: Mapped[dict[str, Any]]
    project_id: Mapped[str | None]
    display_name: Mapped[str | None]
    sdk_version: Mapped[str]
    created_at: Mapped[float]
    last_heartbeat: Mapped[float]
    finished_at: Mapped[float | None]
    finish_reason: Mapped[str | None]
    finish_detail: Mapped[str | None]


class TrainingRunRow(Table):
    """A LoRA model that was created; a row stays when the model is gone from memory."""

    __tablename__ = "training_runs"

    model_id: Mapped[str] = mapped_column(primary_key=True)
    """`{session_id}:train:{model_seq_id}`"""
    owner: Mapped[str] = mapped_column(server_default="local")
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.session_id"), index=True)
    model_seq_id: Mapped[int]
    base_model: Mapped[str]
    base_fingerprint: Mapped[str | None]
    """Of the base model's files; none: made before they were noted."""
    trainable: Mapped[Trainable] = mapped_column(TrainableJson)
    user_metadata: Mapped[dict[str, Any] | None]
    optimizer_config: Mapped[dict[str, Any]]
    status: Mapped[str]
    """`active`; `suspended`: it is on disk until its next operation; `lost`: it was unloaded."""
    snapshot: Mapped[str | None]
    """Directory of what the log is to be run on, below the data directory; none: on a fresh model."""
    computed_with: Mapped[dict[str, Any] | None]
    """What a result depends on beside model and operation (`BaseModelInfo.numerics`), when the snapshot was taken."""
    created_at: Mapped[float]


class SamplingSessionRow(Table):
    """What a sampling client samples from: a base model, or saved weights on it."""

    __tablename__ = "sampling_sessions"

    sampling_session_id: Mapped[str] = mapped_column(primary_key=True)
    """`{session_id}:sample:{sampling_session_seq_id}`"""
    owner: Mapped[str] = mapped_column(server_default="local")
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.session_id"), index=True)
    base_model: Mapped[str]
    model_path: Mapped[str | None]
    """tinker:// path of named weights."""
    directory: Mapped[str | None]
    """Of the weights, below the data directory; none: the base model alone."""
    weights_deleted_at: Mapped[float | None]
    """When weights without a name were deleted, for nobody had sampled from them for long."""
    size_bytes: Mapped[int | None]
    """Of weights without a name."""
    base_fingerprint: Mapped[str | None]
    """Of the base model's files that the weights are for; none: not known, or no weights."""
    created_at: Mapped[float]
    used_at: Mapped[float | None]
    """When it was last sampled from; written from time to time."""


class CheckpointRow(Table):
    """Saved weights, with all that is needed to make a model of them again."""

    __tablename__ = "checkpoints"
    __table_args__ = (UniqueConstraint("run_id", "kind", "name"),)

    tinker_path: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(server_default="local")
    run_id: Mapped[str]
    kind: Mapped[str]
    name: Mapped[str]
    directory: Mapped[str]
    """Below the data directory."""
    base_model: Mapped[str]
    base_fingerprint: Mapped[str | None]
    """Of the base model's files; none: made before they were noted."""
    trainable: Mapped[Trainable] = mapped_column(TrainableJson)
    user_metadata: Mapped[dict[str, Any] | None]
    size_bytes: Mapped[int]
    created_at: Mapped[float] = mapped_column(index=True)
    expires_at: Mapped[float | None] = mapped_column(index=True)
    public: Mapped[bool] = mapped_column(default=False, server_default=false(), index=True)
    """Whether every client may load it."""
    saved_as: Mapped[int | None]
    """Number of the operation that saved it; none: a copy, or saved before numbers were noted."""
    copied_from: Mapped[str | None]
    """tinker:// path of the weights it is a copy of."""


class Future(Table):
    """One accepted operation and its result."""

    __tablename__ = "futures"
    __table_args__ = (
        UniqueConstraint("lane", "seq_id"),
        Index("ix_futures_status_finished_at", "status", "finished_at"),
        Index("ix_futures_log", "lane", "position", sqlite_where=_LOGGED, postgresql_where=_LOGGED),
    )

    request_id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(server_default="local")
    kind: Mapped[str]
    lane: Mapped[str]
    """model_id for training work, sampling_session_id for samples."""
    seq_id: Mapped[int]
    request: Mapped[bytes]
    """The body as received, without its images (`image_places`); emptied once nobody needs it: it is finished, and not
    in the log of its model."""
    request_type: Mapped[str]
    digest: Mapped[str | None]
    """Hash of the body; none: accepted before they were noted."""
    status: Mapped[str]
    """`queued`, `done`, `failed`, or `expired`: the result was deleted."""
    result: Mapped[bytes | None]
    """The body ready to send; of a failed one a FutureFailed."""
    result_type: Mapped[str | None]
    failure_category: Mapped[str | None]
    """Of a failed one, also when its result has expired: `user` or `server`."""
    created_at: Mapped[float]
    finished_at: Mapped[float | None]
    position: Mapped[int | None]
    """Its place in the log of its model (`log.py`); none: it changed nothing, or the model's snapshot holds it."""
    tries: Mapped[int] = mapped_column(default=0, server_default="0")
    """Servers that began it after an earlier one had left it unfinished, since the last that was told to stop."""


class Image(Table):
    """An image of bodies that may be needed, as it lies in them (in JSON, base64). It goes with the last of them."""

    __tablename__ = "images"

    digest: Mapped[str] = mapped_column(primary_key=True)
    """SHA-256, in hexadecimal digits."""
    data: Mapped[bytes]


class ImagePlaceRow(Table):
    """Where a body has an image that is stored apart."""

    __tablename__ = "image_places"

    request_id: Mapped[str] = mapped_column(primary_key=True)
    start: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """In the whole body."""
    size_bytes: Mapped[int]
    digest: Mapped[str] = mapped_column(index=True)


class StepRow(Table):
    """One finished forward_backward or optim_step, for the curves of its run. Numbers that are not known are null."""

    __tablename__ = "steps"

    model_id: Mapped[str] = mapped_column(primary_key=True)
    seq_id: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int]
    """How many optim_steps of the run were done before: what belongs to one step has one number."""
    at: Mapped[float] = mapped_column(index=True)
    """When it finished."""
    tokens: Mapped[int]
    """Positions that were computed; 0 of an optim_step."""
    total_tokens: Mapped[int]
    """Those of the run until then, these with them."""
    loss: Mapped[float | None]
    """The sum over positions, as it was answered."""
    loss_tokens: Mapped[int | None]
    """Positions that train: by these the loss is divided where it is shown."""
    learning_rate: Mapped[float | None]
    grad_norm: Mapped[float | None]
    sampler_gap: Mapped[float | None]
    """Mean distance of the trainer's log probabilities from those that were sent, in nats."""
    divergence: Mapped[float | None]
    """Estimate (k3) of the KL divergence of the policy that drew from the current one."""
    clip_fraction: Mapped[float | None]
    advantage: Mapped[float | None]
    """Mean over positions that train."""
    waited_s: Mapped[float]
    """From acceptance on, for earlier operations and for the trainer's turn."""
    run_s: Mapped[float]


class LooseDirectory(Table):
    """A directory that no other row owns: weights are being written into it, or were given up.

    What is listed here when a server starts was left by a crash, and is deleted.
    """

    __tablename__ = "loose_directories"

    directory: Mapped[str] = mapped_column(primary_key=True)
    """Below the data directory."""
    since: Mapped[float]


class UsageRow(Table):
    """How much of one kind of work an owner had done on a base model, in one session and hour."""

    __tablename__ = "usage"

    hour: Mapped[float] = mapped_column(primary_key=True)
    """Its start."""
    kind: Mapped[str] = mapped_column(primary_key=True)
    """`training`, `prefill`, `cached_prefill`, `sampled` (tokens), or `checkpoint` (their number)."""
    owner: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(primary_key=True)
    """Empty for samples drawn outside of any session."""
    base_model: Mapped[str] = mapped_column(primary_key=True)
    amount: Mapped[int]


class LeaseRow(Table):
    """The one row says how many servers have taken the database. The last of them alone may write (`lease.py`)."""

    __tablename__ = "lease"

    epoch: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class AuditEntryRow(Table):
    """Something that was done to saved weights or to a session's project."""

    __tablename__ = "audit"

    entry_id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(server_default="local")
    at: Mapped[float] = mapped_column(index=True)
    event: Mapped[str]
    """`<resource>_<action>`"""
    details: Mapped[dict[str, Any]]
