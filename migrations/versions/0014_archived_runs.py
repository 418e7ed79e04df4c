"""Adds the time at which a run was archived by its owner."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column("training_runs", sa.Column("archived_at", sa.Double))
