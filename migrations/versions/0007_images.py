"""Stores images of requests that may be replayed once, apart from the bodies that have them."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.create_table(
        "images",
        sa.Column("digest", sa.String, primary_key=True),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "image_places",
        sa.Column("request_id", sa.String, primary_key=True),
        sa.Column("start", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.String, nullable=False),
    )
    op.create_index("ix_image_places_digest", "image_places", ["digest"])
