"""Of an operation, a hash of its body, and how it failed: both are known when body and result are gone."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("futures", sa.Column("digest", sa.String))
    op.add_column("futures", sa.Column("failure_category", sa.String))
