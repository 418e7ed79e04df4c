"""Build the backend from its configuration: a trainer and a sampler for each base model."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tinker_server.api_schemas.sampling import SampleRequest
from tinker_server.backends import tasks
from tinker_server.backends.base_weights.client import BaseWeights
from tinker_server.backends.cluster.bases import RemoteBases
from tinker_server.backends.cluster.client import Address, Cluster, ExistingRay
from tinker_server.backends.cluster.engines import RemoteEngines
from tinker_server.backends.cluster.replicas import RemoteReplicas
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.describe import FoundModel, describe_models
from tinker_server.backends.configure.examine import examine as examine
from tinker_server.backends.configure.gpus import read_gpus
from tinker_server.backends.inputs.detokenize import TokenTexts
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.processes.launcher import launch_sampler, launch_trainer, local_address
from tinker_server.backends.processes.preloaded import note
from tinker_server.backends.protocol import (
    NO_RUNS,
    EngineUse,
    GpuState,
    NodeState,
    OnLoading,
    OwnLayout,
    ProcessState,
    PromptSize,
    ignore_loading,
)
from tinker_server.backends.sampler.checks import check_sample
from tinker_server.backends.sampler.pool import SamplerPool
from tinker_server.backends.trainer.client import TrainerClient

log = logging.getLogger(__name__)


@dataclass
class LocalModel:
    """`protocol.BaseModel`; names that share a directory share trainer and sampler."""

    spec: ModelSpec
    base: BaseWeights
    trainer: TrainerClient
    sampler: SamplerPool
    renderer: Renderer
    texts: TokenTexts

    def __post_init__(self) -> None:
        self._info = self.spec

    @property
    def info(self) -> ModelSpec:
        """Implement the protocol; numbers depend on the machines that train."""
        if self._info.numerics.get("ranks") != (ranks := self.trainer.ranks):
            self._info = replace(self.spec, numerics={**self.spec.numerics, "ranks": ranks})
        return self._info

    def check_sample(self, request: SampleRequest) -> PromptSize:
        """Implement the protocol."""
        if self.spec.stable_reinforce is not None:  # its loss needs no records: the answer's own logprobs are enough
            request = request.model_copy(update={"record_stability_info": False})
        return check_sample(self.renderer, request, self.spec.max_context_length, self.spec.max_images_per_prompt)

    def pixel_bytes(self, images: Sequence[bytes]) -> int:
        """Implement the protocol."""
        return self.renderer.pixel_bytes(images)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Implement the protocol."""
        return self.texts.of(token_ids)

    def special_ids(self) -> frozenset[int]:
        """Implement the protocol."""
        return self.texts.special_ids

    def processes(self) -> list[ProcessState]:
        """Implement the protocol."""
        return [*self.base.processes(), *self.trainer.processes(), *self.sampler.processes()]

    async def engine_use(self) -> EngineUse | None:
        """Implement the protocol."""
        return await self.sampler.engine_use()


def make_models(found: Mapping[str, FoundModel], *, may_grow: bool = False) -> dict[str, LocalModel]:
    """Make the models, none of which has started, by public name. If they `may_grow`, other machines add engines."""
    made: dict[str, LocalModel] = {}
    for model in found.values():
        if model.spec.directory not in made:
            texts = TokenTexts(Path(model.spec.directory))
            base = BaseWeights(model.spec)
            trainer = TrainerClient(base.spec, base.wrap_start(launch_trainer))
            start_engines = base.wrap_start(launch_sampler, they_wait=True)
            sampler = SamplerPool(base.spec, start_engines, may_grow=may_grow, score_base=trainer.score_base)
            made[model.spec.directory] = LocalModel(model.spec, base, trainer, sampler, model.renderer, texts)
    return {name: replace(made[model.spec.directory], spec=model.spec) for name, model in found.items()}


class LocalBackend:
    """`protocol.Backend` on this machine."""

    def __init__(self, config: BackendConfig, on_loading: OnLoading = ignore_loading, own: OwnLayout = NO_RUNS) -> None:
        """`on_loading` is called whenever a process gets ready; `own` as `describe_models`."""
        self._config, self._own = config, own
        self._on_loading = on_loading
        self.models: dict[str, LocalModel] = {}
        """By public name."""
        self._cluster: Cluster | None = None

    async def start(self) -> None:
        """Load all models."""
        self.models = await asyncio.to_thread(
            lambda: make_models(describe_models(self._config, own=self._own), may_grow=self._config.cluster)
        )
        try:
            await start_models(self._distinct_models(), self._on_loading)
            await asyncio.to_thread(note, self._config.scratch_dir)
            if self._config.cluster:  # machines that join find engines to join
                self._cluster = self._make_cluster()
                await self._cluster.start(self._on_loading)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End every child process."""
        if self._cluster is not None:
            await self._cluster.stop()
        await asyncio.gather(
            *(part.stop() for model in self._distinct_models() for part in (model.trainer, model.sampler))
        )
        await asyncio.gather(*(model.base.stop() for model in self._distinct_models()))

    def gpus(self) -> list[GpuState]:
        """Implement the protocol."""
        return read_gpus({gpu for model in self._distinct_models() for gpu in model.spec.base_gpus if gpu is not None})

    def nodes(self) -> list[NodeState]:
        """Implement the protocol."""
        return [] if self._cluster is None else self._cluster.states()

    def _make_cluster(self) -> Cluster:
        config, models = self._config, self.models
        host = config.cluster_address or local_address()
        bases = RemoteBases({name: model.spec for name, model in models.items()})
        engines = RemoteEngines({name: (model.spec, model.sampler) for name, model in models.items()}, bases)
        trainers = {name: (model.spec, model.trainer) for name, model in models.items()}
        replicas = RemoteReplicas(host, trainers, bases, engines)
        directories = {name: model.spec.directory for name, model in models.items()}
        ray = config.cluster_ray_address
        existing = None if ray is None else ExistingRay(ray, config.scratch_dir.absolute() / "nodes")
        address = Address(host, config.cluster_port)
        return Cluster(address, config.cluster_token_file, [bases, engines, replicas], directories, existing)

    def _distinct_models(self) -> list[LocalModel]:
        """Return each loaded model once, under the first of its names."""
        return list({id(model.trainer): model for model in reversed(self.models.values())}.values())[::-1]


def _outline(model: LocalModel) -> str:
    """Describe what a model can do, and where, for the log."""
    spec = model.spec
    parts = [
        f"{spec.weight_bytes / 2**30:.2f} GiB of weights each",
        f"contexts of {spec.max_context_length} tokens",
        f"ranks up to {spec.max_lora_rank}, {spec.adapter_slots} slots",
    ]
    if spec.mesh.context > 1:
        parts.append(f"{spec.mesh.context} ranks for the tokens of each microbatch")
    placement = spec.placement
    if spec.offloads_inputs:
        parts.append("inputs of layers that recompute in main memory")
    if placement.gpus:
        base = "whole base" if spec.mesh.shard == 1 else "shard of the base"
        parts.append(f"a trainer on GPUs {', '.join(map(str, placement.gpus))} with the {base} on each")
        engines = "; ".join(", ".join(map(str, engine)) for engine in placement.engines)
        parts.append(f"engines on GPUs {engines}")
    elif len(placement.engines) > 1:
        parts.append(f"{len(placement.engines)} engines")
    return ", ".join(parts)


async def start_models(models: list[LocalModel], on_loading: OnLoading) -> None:
    """Load all models, of each its weights, trainer and sampler, side by side. Raises the first failure."""

    async def start(model: LocalModel) -> None:
        began = time.monotonic()
        log.info("%s: loading trainer and sampler, %s", model.spec.name, _outline(model))
        await tasks.gather(part.start(on_loading) for part in (model.base, model.trainer, model.sampler))
        log.info("%s: ready after %.0f s", model.spec.name, time.monotonic() - began)

    await tasks.gather(map(start, models))
