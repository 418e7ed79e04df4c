"""Adds the directory that a load_weights read, so that its model is restored from the same weights or not at all."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.add_column("futures", sa.Column("loaded_directory", sa.String))
