"""Creates the first tables: sessions, training runs, sampling sessions, checkpoints, futures."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.String, primary_key=True),
        sa.Column("idempotency_key", sa.String, unique=True),
        sa.Column("tags", sa.JSON, nullable=False),
        sa.Column("user_metadata", sa.JSON, nullable=False),
        sa.Column("project_id", sa.String),
        sa.Column("display_name", sa.String),
        sa.Column("sdk_version", sa.String, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("last_heartbeat", sa.Double, nullable=False),
        sa.Column("finished_at", sa.Double),
        sa.Column("finish_reason", sa.String),
        sa.Column("finish_detail", sa.String),
    )
    op.create_table(
        "training_runs",
        sa.Column("model_id", sa.String, primary_key=True),
        sa.Column("session_id", sa.String, sa.ForeignKey("sessions.session_id"), nullable=False, index=True),
        sa.Column("model_seq_id", sa.BigInteger, nullable=False),
        sa.Column("base_model", sa.String, nullable=False),
        *lora_columns(),
        sa.Column("user_metadata", sa.JSON),
        sa.Column("optimizer_config", sa.JSON, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    op.create_table(
        "sampling_sessions",
        sa.Column("sampling_session_id", sa.String, primary_key=True),
        sa.Column("session_id", sa.String, sa.ForeignKey("sessions.session_id"), nullable=False, index=True),
        sa.Column("base_model", sa.String, nullable=False),
        sa.Column("model_path", sa.String),
        sa.Column("directory", sa.String),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    op.create_table(
        "checkpoints",
        sa.Column("tinker_path", sa.String, primary_key=True),
        sa.Column("run_id", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("directory", sa.String, nullable=False),
        sa.Column("base_model", sa.String, nullable=False),
        *lora_columns(),
        sa.Column("user_metadata", sa.JSON),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, index=True),
        sa.UniqueConstraint("run_id", "kind", "name"),
    )
    op.create_table(
        "futures",
        sa.Column("request_id", sa.String, primary_key=True),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("lane", sa.String, nullable=False),
        sa.Column("seq_id", sa.BigInteger, nullable=False),
        sa.Column("request", sa.LargeBinary, nullable=False),
        sa.Column("request_type", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("result", sa.LargeBinary),
        sa.Column("result_type", sa.String),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("finished_at", sa.Double),
        sa.UniqueConstraint("lane", "seq_id"),
    )
    op.create_index("ix_futures_status_finished_at", "futures", ["status", "finished_at"])


def lora_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("lora_rank", sa.BigInteger, nullable=False),
        sa.Column("lora_seed", sa.BigInteger, nullable=False),
        sa.Column("train_unembed", sa.Boolean, nullable=False),
        sa.Column("train_mlp", sa.Boolean, nullable=False),
        sa.Column("train_attn", sa.Boolean, nullable=False),
    ]
