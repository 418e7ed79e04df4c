"""Adds a hash of an operation's body and its failure category, which are known when body and result are deleted."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("futures", sa.Column("digest", sa.String))
    op.add_column("futures", sa.Column("failure_category", sa.String))
