"""Adds the bytes that each operation holds, the owner of a body's images, and the results that clients have fetched."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    # SQLite cannot add a stored column, and PostgreSQL has no index on one that is not stored.
    is_stored = op.get_bind().dialect.name != "sqlite"
    held = sa.Computed("length(request) + coalesce(length(result), 0)", persisted=is_stored)
    op.add_column("futures", sa.Column("held_bytes", sa.BigInteger, held, nullable=False))
    where = sa.text("held_bytes > 0")
    op.create_index("ix_futures_held", "futures", ["owner", "held_bytes"], sqlite_where=where, postgresql_where=where)
    op.add_column("image_places", sa.Column("owner", sa.String, nullable=False, server_default="local"))
    op.execute(
        "UPDATE image_places SET owner = coalesce((SELECT owner FROM futures"
        " WHERE futures.request_id = image_places.request_id), 'local')"
    )
    op.create_index("ix_image_places_owner", "image_places", ["owner", "digest", "size_bytes"])
    op.create_table(
        "fetched",
        sa.Column("request_id", sa.String, primary_key=True),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_fetched_owner_at", "fetched", ["owner", "at"])
    op.create_index("ix_fetched_at", "fetched", ["at"])
    op.create_index("ix_fetched_size_bytes", "fetched", ["size_bytes"])
