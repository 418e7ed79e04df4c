"""Adds a row for each finished forward_backward and optim_step, for the curves of their runs."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

NUMBERS = ("learning_rate", "grad_norm", "sampler_gap", "divergence", "clip_fraction", "advantage")


def upgrade() -> None:
    op.create_table(
        "steps",
        sa.Column("model_id", sa.String, primary_key=True),
        sa.Column("seq_id", sa.BigInteger, primary_key=True),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("total_tokens", sa.BigInteger, nullable=False),
        sa.Column("loss", sa.Double),
        sa.Column("loss_tokens", sa.BigInteger),
        *(sa.Column(name, sa.Double) for name in NUMBERS),
        sa.Column("waited_s", sa.Double, nullable=False),
        sa.Column("run_s", sa.Double, nullable=False),
    )
    op.create_index("ix_steps_at", "steps", ["at"])
