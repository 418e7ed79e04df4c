"""Runs in the database of a test, without a model."""

from tinker_server.api_schemas.sessions import CreateSessionRequest
from tinker_server.api_schemas.training import Trainable
from tinker_server.store.database import Database
from tinker_server.store.records import TrainingRun
from tinker_server.store.runs import RunStore
from tinker_server.store.sessions import SessionStore

TRAINABLE = Trainable(rank=8, seed=1)


async def run_of(db: Database, owner: str, number: int = 0) -> TrainingRun:
    """Store a run of a new session of the owner."""
    session_id = await SessionStore(db).create(CreateSessionRequest(), None, owner)
    run = TrainingRun(
        model_id=f"{session_id}:train:{number}",
        owner=owner,
        session_id=session_id,
        model_seq_id=number,
        base_model="tiny",
        trainable=TRAINABLE,
        optimizer_config={},
        status="active",
        created_at=1.0,
    )
    await RunStore(db).add(run)
    return run
