"""Adds the positions of operations in the logs of their models, and the numerics that runs were computed with.

Models that an earlier server left in memory have no complete log: those without a snapshot are lost.
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("futures", sa.Column("position", sa.BigInteger))
    logged = sa.text("position IS NOT NULL")
    op.create_index("ix_futures_log", "futures", ["lane", "position"], sqlite_where=logged, postgresql_where=logged)
    op.add_column("training_runs", sa.Column("computed_with", sa.JSON))
    op.add_column("checkpoints", sa.Column("saved_as", sa.BigInteger))
    runs = sa.table("training_runs", sa.column("status", sa.String), sa.column("snapshot", sa.String))
    active = sa.update(runs).where(runs.c.status == "active")
    op.execute(active.where(runs.c.snapshot.is_(None)).values(status="lost"))
    op.execute(active.values(status="suspended"))
