"""Gives every row an owner, the name of the API key it was made with; existing rows are `local`'s.

Records snapshots of suspended models, and the deletion of sampler weights without a name.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    for table in ("sessions", "training_runs", "sampling_sessions", "checkpoints", "futures", "audit"):
        op.add_column(table, sa.Column("owner", sa.String, nullable=False, server_default="local"))
    op.create_index("ix_checkpoints_public", "checkpoints", ["public"])
    op.add_column("training_runs", sa.Column("snapshot", sa.String))
    op.add_column("sampling_sessions", sa.Column("weights_deleted_at", sa.Double))
