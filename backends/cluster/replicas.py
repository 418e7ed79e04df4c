"""Ranks of trainers on other machines: each machine that joins may hold those of every model that it has."""

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

from tinker_server.backends.cluster.bases import RemoteBases, gpus_of_engines
from tinker_server.backends.cluster.client import Node, StartThere
from tinker_server.backends.cluster.engines import SAME_GPU, RemoteEngines
from tinker_server.backends.cluster.offer import Offer
from tinker_server.backends.configure.gpus import smallest_gpu
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.trainer.client import TrainerClient
from tinker_server.backends.trainer.replicas import Replica

log = logging.getLogger(__name__)
_LOOK_S = 0.5
_BASE_S = 120.0
"""Longest wait of a trainer's start for a base that is read again on another machine: it then starts without it."""


class RemoteReplicas:
    """`client.Use`: the trainers of the models, by public name, and the ranks that other machines have of them."""

    def __init__(
        self,
        host: str,
        trainers: Mapping[str, tuple[ModelSpec, TrainerClient]],
        bases: RemoteBases,
        engines: RemoteEngines,
    ) -> None:
        """`host` is this machine's address, at which ranks meet; `bases` and `engines` are those of the same
        machines."""
        self._host, self._bases = host, bases
        self._trainers = trainers
        self._engines = engines
        self._attaching: dict[Node, asyncio.Task[None]] = {}
        self._attached: dict[Node, list[tuple[TrainerClient, Replica]]] = {}

    def check(self, offer: Offer) -> None:
        """Implement the protocol: a machine that holds no ranks may still have engines."""

    def begin(self, node: Node, start: StartThere) -> None:
        """Implement the protocol. The ranks start after the machine's engines: a trainer that starts again is a pause
        for its clients, and one is enough."""
        found: dict[TrainerClient, Replica] = {}
        for name in node.offer.models:
            spec, trainer = self._trainers[name]
            if trainer in found:  # under another name
                continue
            if obstacle := self.obstacle(spec, node.offer):
                log.warning("%s has no ranks of the trainer of %s: %s", node.offer.name, name, obstacle)
                continue
            base = self._bases.of(node, name)
            start_rank = base.wrap_start(partial(start, base.spec), patience_s=_BASE_S)
            found[trainer] = Replica(node.offer.name, base.spec, start_rank, self._host)
        self._attached[node] = []
        self._attaching[node] = asyncio.create_task(self._attach(node, found), name=f"ranks on {node.offer.name}")

    async def end(self, node: Node) -> None:
        """Implement the protocol."""
        self._attaching.pop(node).cancel()
        await asyncio.gather(*(trainer.detach(replica) for trainer, replica in self._attached.pop(node)))

    async def _attach(self, node: Node, replicas: Mapping[TrainerClient, Replica]) -> None:
        while not self._engines.are_ready(node):  # noqa: ASYNC110 - supervisors tell nobody
            await asyncio.sleep(_LOOK_S)
        for trainer, replica in replicas.items():
            self._attached[node].append((trainer, replica))
            trainer.attach(replica)

    def obstacle(self, spec: ModelSpec, offer: Offer) -> str | None:
        """Say why a machine cannot hold a model's ranks beside its engines, on the GPUs of the same numbers as here."""
        if spec.device == "cpu":
            return None
        gpus, num = spec.placement.gpus, len(offer.gpu_bytes)
        if max(gpus) >= num:
            return f"the ranks need GPU {max(gpus)}, and the machine has {num} GPUs"
        smallest, ours = min(offer.gpu_bytes[gpu] for gpu in gpus), smallest_gpu(gpus)
        if smallest < SAME_GPU * ours:
            return f"one of its GPUs has {smallest / 2**30:.1f} GiB, and the server's have {ours / 2**30:.1f} GiB"
        for gpu in gpus:
            if (part := self._part(gpu, offer)) > 1:
                return (
                    f"trainers and engines would take {part:.2f} of its GPU {gpu}: here they are on different GPUs, and"
                    " there every GPU has an engine"
                )
        return None

    def _part(self, gpu: int, offer: Offer) -> float:
        """Return the part of a GPU of a machine that its engines and the ranks of all its models would take."""
        part = 0.0
        for spec in {id(trainer): spec for spec, trainer in map(self._trainers.__getitem__, offer.models)}.values():
            placement = spec.placement
            part += placement.trainer_fraction * (gpu in placement.gpus)
            part += placement.sampler_fraction * sum(gpu in gpus for gpus in gpus_of_engines(spec, offer))
        return part
