"""Adds the metrics that clients report of their runs, and a run's name, notes and tags."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "client_metrics",
        sa.Column("model_id", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("value", sa.Double, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
    )
    op.create_index("ix_client_metrics_at", "client_metrics", ["at"])
    op.add_column("training_runs", sa.Column("name", sa.String))
    op.add_column("training_runs", sa.Column("notes", sa.String))
    op.add_column("training_runs", sa.Column("tags", sa.JSON))
