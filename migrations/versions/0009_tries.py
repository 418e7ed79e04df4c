"""Counts the servers that began an operation that an earlier one left unfinished."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("futures", sa.Column("tries", sa.BigInteger, nullable=False, server_default="0"))
