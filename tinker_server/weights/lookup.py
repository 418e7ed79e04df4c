"""Look-up of the weights to sample from: a base model's, sampler weights, or a training checkpoint's."""

import time
from dataclasses import dataclass
from typing import NamedTuple

from api_schemas.weights import TinkerPath
from tinker_server.errors import BadRequest
from tinker_server.models.base_models import BaseModels
from tinker_server.store.checkpoints import CheckpointStore, parse_path
from tinker_server.store.directories import Storage
from tinker_server.store.holdings import Holdings
from tinker_server.store.samplers import SamplerStore
from tinker_server.store.usage import UsageStore


@dataclass(frozen=True)
class WeightStores:
    """The stores that training, saving, sampling and chats share."""

    bases: BaseModels
    checkpoints: CheckpointStore
    samplers: SamplerStore
    storage: Storage
    usage: UsageStore
    holdings: Holdings


class FoundWeights(NamedTuple):
    """The weights to sample from."""

    base_model: str
    directory: str | None = None
    """Directory of the weights; None: the base model alone."""
    base_fingerprint: str | None = None
    """Fingerprint of the base model that the weights are for."""


async def find_weights(
    bases: BaseModels, checkpoints: CheckpointStore, base_model: str | None, model_path: str | None, owner: str
) -> FoundWeights:
    """Find the weights that a request names. Raises BadRequest, UnknownCheckpoint, UnknownBaseModel."""
    if model_path is not None:
        checkpoint = await checkpoints.require_readable(_path(model_path), {owner}, time.time())
        if base_model not in (None, checkpoint.base_model):
            raise BadRequest(f"{model_path} is of {checkpoint.base_model}, not of {base_model}")
        bases.require_same(checkpoint.base_model, checkpoint.base_fingerprint, model_path)
        return FoundWeights(checkpoint.base_model, checkpoint.directory, checkpoint.base_fingerprint)
    if base_model is None:
        raise BadRequest("give base_model or model_path")
    bases.base(base_model)
    return FoundWeights(base_model)


def _path(text: str) -> TinkerPath:
    path = parse_path(text)
    if path.kind == "external_weights":
        raise BadRequest(
            f"{text} cannot be sampled from; take a .../sampler_weights/<name> (save_weights_for_sampler)"
            " or a .../weights/<name> (save_state)"
        )
    return path
