"""Adds public and copied checkpoints, usage, and the audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("public", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("checkpoints", sa.Column("copied_from", sa.String))
    op.create_index("ix_checkpoints_created_at", "checkpoints", ["created_at"])
    op.create_table(
        "usage",
        sa.Column("hour", sa.Double, primary_key=True),
        sa.Column("kind", sa.String, primary_key=True),
        sa.Column("session_id", sa.String, primary_key=True),
        sa.Column("base_model", sa.String, primary_key=True),
        sa.Column("amount", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "audit",
        sa.Column("entry_id", sa.String, primary_key=True),
        sa.Column("at", sa.Double, nullable=False, index=True),
        sa.Column("event", sa.String, nullable=False),
        sa.Column("details", sa.JSON, nullable=False),
    )
