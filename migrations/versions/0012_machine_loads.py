"""Adds the machine's load over the last day."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_table(
        "machine_loads",
        sa.Column("measure", sa.String, primary_key=True),
        sa.Column("of", sa.String, primary_key=True),
        sa.Column("at", sa.Double, primary_key=True),
        sa.Column("value", sa.Double, nullable=False),
    )
    op.create_index("ix_machine_loads_at", "machine_loads", ["at"])
