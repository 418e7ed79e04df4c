"""Makes what a model trains one value, gives usage an owner, and lists directories that no row references.

Runs and checkpoints get the fingerprint of their base model's files, sampling sessions the time of their last use.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

AT_ONCE = 1000
LORA = {
    "lora_rank": sa.BigInteger,
    "lora_seed": sa.BigInteger,
    "train_unembed": sa.Boolean,
    "train_mlp": sa.Boolean,
    "train_attn": sa.Boolean,
}
USAGE = [
    sa.Column("hour", sa.Double, primary_key=True),
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("owner", sa.String, primary_key=True),
    sa.Column("session_id", sa.String, primary_key=True),
    sa.Column("base_model", sa.String, primary_key=True),
    sa.Column("amount", sa.BigInteger, nullable=False),
]


def upgrade() -> None:
    for table, key in (("training_runs", "model_id"), ("checkpoints", "tinker_path")):
        unite_lora_columns(table, key)
        op.add_column(table, sa.Column("base_fingerprint", sa.String))
    op.add_column("sampling_sessions", sa.Column("size_bytes", sa.BigInteger))
    op.add_column("sampling_sessions", sa.Column("base_fingerprint", sa.String))
    op.add_column("sampling_sessions", sa.Column("used_at", sa.Double))
    op.create_table(
        "loose_directories",
        sa.Column("directory", sa.String, primary_key=True),
        sa.Column("since", sa.Double, nullable=False),
    )
    give_usage_an_owner()


def unite_lora_columns(name: str, key: str) -> None:
    # SQLite adds a column that must not be null only with a default.
    op.add_column(name, sa.Column("trainable", sa.JSON, nullable=False, server_default="{}"))
    columns: list[sa.Column[Any]] = [sa.Column(column, kind) for column, kind in LORA.items()]
    table = sa.Table(name, sa.MetaData(), sa.Column(key, sa.String), sa.Column("trainable", sa.JSON), *columns)
    change = sa.update(table).where(table.c[key] == sa.bindparam("key")).values(trainable=sa.bindparam("value"))
    connection = op.get_bind()
    rows = connection.execute(sa.select(table.c[key], *(table.c[column] for column in LORA))).all()
    for start in range(0, len(rows), AT_ONCE):
        values = [{"key": row[0], "value": trainable(*row[1:])} for row in rows[start : start + AT_ONCE]]
        connection.execute(change, values)
    for column in LORA:
        op.drop_column(name, column)


def trainable(rank: int, seed: int, unembed: bool, mlp: bool, attn: bool) -> dict[str, int | bool]:
    return {"rank": rank, "seed": seed, "train_unembed": unembed, "train_mlp": mlp, "train_attn": attn}


def give_usage_an_owner() -> None:
    """Add the owner to the primary key. SQLite cannot change one, so the table is made again.

    Samples drawn outside of any session name no owner: they belong to `local`, who owns everything without keys.
    """
    metadata = sa.MetaData()
    sessions = sa.Table("sessions", metadata, sa.Column("session_id", sa.String), sa.Column("owner", sa.String))
    names = [column.name for column in USAGE if column.name != "owner"]
    usage = sa.Table("usage", metadata, *(sa.Column(name) for name in names))
    owner = sa.func.coalesce(sessions.c.owner, "local").label("owner")
    columns = [owner, *(usage.c[name] for name in names)]
    query = sa.select(*columns).outerjoin_from(usage, sessions, usage.c.session_id == sessions.c.session_id)
    rows = [dict(row._mapping) for row in op.get_bind().execute(query)]
    op.drop_table("usage")
    table = op.create_table("usage", *USAGE)
    if rows:
        op.bulk_insert(table, rows)
