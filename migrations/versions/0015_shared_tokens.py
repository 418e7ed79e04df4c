"""Adds the tokens of a forward_backward that were not computed, since its datums share them."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.add_column("steps", sa.Column("shared_tokens", sa.Double))
