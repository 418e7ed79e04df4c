"""Look-up of the weights to sample from or to train on: a base model's, or those of a checkpoint of any kind."""

import time
from dataclasses import dataclass
from typing import NamedTuple

from tinker_server.auth.keys import Keys
from tinker_server.backends.protocol import ADAPTER_FILE
from tinker_server.errors import BadRequest
from tinker_server.models.base_models import BaseModels, require_adapter
from tinker_server.store.audit import AuditStore
from tinker_server.store.checkpoints import CheckpointStore, parse_path
from tinker_server.store.directories import Storage
from tinker_server.store.holdings import Holdings
from tinker_server.store.records import Checkpoint
from tinker_server.store.samplers import SamplerStore
from tinker_server.store.usage import UsageStore
from tinker_server.weights.encryption import SUFFIX
from tinker_server.weights.export import PEFT


@dataclass(frozen=True)
class WeightStores:
    """The stores that the functions of operations and chats share."""

    bases: BaseModels
    checkpoints: CheckpointStore
    samplers: SamplerStore
    storage: Storage
    usage: UsageStore
    holdings: Holdings
    keys: Keys
    audit: AuditStore


class FoundWeights(NamedTuple):
    """The weights to sample from."""

    base_model: str
    directory: str | None = None
    """Directory of the weights; None: the base model alone."""
    base_fingerprint: str | None = None
    """Fingerprint of the base model that the weights are for."""


def loadable_directory(checkpoint: Checkpoint, storage: Storage) -> str:
    """Return the directory of a checkpoint's files as trainer and engines load them. Raises BadRequest."""
    require_adapter(checkpoint.trainable, checkpoint.tinker_path)
    directory = checkpoint.directory
    if checkpoint.kind != "external_weights":
        return directory
    if storage.path(f"{directory}/{PEFT}/{ADAPTER_FILE}{SUFFIX}").exists():
        raise BadRequest(
            f"{checkpoint.tinker_path} is encrypted; take a .../sampler_weights/<name> (save_weights_for_sampler) or a"
            " .../weights/<name> (save_state)"
        )
    return f"{directory}/{PEFT}"


async def find_weights(
    stores: WeightStores, base_model: str | None, model_path: str | None, owner: str
) -> FoundWeights:
    """Find the weights that a request names. Raises BadRequest, UnknownCheckpoint, UnknownBaseModel."""
    if model_path is not None:
        checkpoint = await stores.checkpoints.require_readable(parse_path(model_path), {owner}, time.time())
        if base_model not in (None, checkpoint.base_model):
            raise BadRequest(f"{model_path} is of {checkpoint.base_model}, not of {base_model}")
        stores.bases.require_same(checkpoint.base_model, checkpoint.base_fingerprint, model_path)
        directory = loadable_directory(checkpoint, stores.storage)
        return FoundWeights(checkpoint.base_model, directory, checkpoint.base_fingerprint)
    if base_model is None:
        raise BadRequest("give base_model or model_path")
    stores.bases.base(base_model)
    return FoundWeights(base_model)
