"""Adds a number that each server raises when it takes the database, so that an earlier one notices."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    lease = op.create_table("lease", sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False))
    op.bulk_insert(lease, [{"epoch": 0}])
