"""Adds the hash of a step's body, for the proof sheet of its run."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.add_column("steps", sa.Column("digest", sa.String))
