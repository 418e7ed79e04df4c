"""Models come back by themselves after their trainer has ended, whether a client waits for them or not."""

import asyncio
import logging

from backends.protocol import ModelLost, Trainer
from tinker_server.models.registry import Models

log = logging.getLogger(__name__)
TRIES = 2
"""Of a model under whose restoration the trainer ends; after these it waits for its next operation."""


async def bring_back_lost(models: Models) -> None:
    """For as long as the server lives."""
    async with asyncio.TaskGroup() as following:
        for trainer in models.trainers():
            following.create_task(_follow(models, trainer))


async def _follow(models: Models, trainer: Trainer) -> None:
    seen, tries = 0, dict[str, int]()
    while True:
        seen = await trainer.restarted(seen)
        tries = dict.fromkeys(models.lost_with(trainer), 0) | tries
        for model_id in list(tries):
            try:
                await models.bring_back(model_id)
            except ModelLost as error:
                tries[model_id] += 1
                if tries[model_id] < TRIES:
                    break  # the trainer will be there again
                log.error("model %s is left until its next operation: %s", model_id, error)
            except Exception:  # one model must not stop the others
                log.exception("model %s is left until its next operation", model_id)
            del tries[model_id]
