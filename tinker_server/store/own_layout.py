"""Which base models have runs and weights of the layout `own`, for which engines need slots."""

from sqlalchemy import JSON, exists, or_, select, true, type_coerce
from sqlalchemy.ext.asyncio import AsyncSession

from tinker_server.backends.protocol import OwnLayout
from tinker_server.store.tables import CheckpointRow, SamplingSessionRow, TrainingRunRow


async def bases_of_own_layout(session: AsyncSession) -> OwnLayout:
    """Return the base models with a run that can go on, or saved weights, of the layout `own`, which is that of
    records that name none. Weights without a name are those of a run of the same client."""
    found: dict[str, set[str]] = {"train_mlp": set(), "train_attn": set()}
    run, sampler = TrainingRunRow, SamplingSessionRow
    has_weights = (sampler.session_id == run.session_id) & (sampler.base_model == run.base_model)
    has_weights &= sampler.directory.is_not(None) & sampler.model_path.is_(None) & sampler.weights_deleted_at.is_(None)
    is_of_use = or_(run.status != "lost", exists().where(has_weights))
    for row, is_there in ((run, is_of_use), (CheckpointRow, true())):
        trainable = type_coerce(row.trainable, JSON)
        layout = trainable["layout"].as_string()
        is_own = or_(layout.is_(None), layout == "own")
        for flag, names in found.items():
            trains = trainable[flag].as_boolean()
            query = select(row.base_model).where(is_there, is_own, or_(trains.is_(None), trains))
            names.update(await session.scalars(query.distinct()))
    return OwnLayout(frozenset(found["train_mlp"]), frozenset(found["train_attn"]))
