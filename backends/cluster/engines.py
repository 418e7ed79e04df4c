"""Engines on other machines: each machine that joins gets some of every model that it has."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from tinker_server.backends.cluster.bases import RemoteBases
from tinker_server.backends.cluster.client import Node, StartThere
from tinker_server.backends.cluster.offer import Offer
from tinker_server.backends.configure.gpus import smallest_gpu
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.sampler.client import EngineClient, Sending
from tinker_server.backends.sampler.pool import SamplerPool

SAME_GPU = 0.98
"""Part of a GPU's memory that another of the same kind may have less."""


class RemoteEngines:
    """`client.Use`: the pools of the models, by public name, and what other machines add to them."""

    def __init__(self, pools: Mapping[str, tuple[ModelSpec, SamplerPool]], bases: RemoteBases) -> None:
        """`bases` are those of the same machines."""
        self._pools, self._bases = pools, bases
        self._engines: dict[Node, list[tuple[SamplerPool, EngineClient]]] = {}

    def check(self, offer: Offer) -> None:
        """Implement the protocol: the models must be the server's, and GPUs not smaller than its own."""
        for name, theirs in offer.fingerprints.items():
            if name not in self._pools:
                raise BackendFailed(f"it serves no model {name}; it serves {', '.join(self._pools)}")
            spec, _ = self._pools[name]
            if theirs != spec.files_fingerprint:
                raise BackendFailed(
                    f"the files of model {name} in {offer.models[name]} have the fingerprint {theirs[:12]}, and the"
                    f" server's {spec.files_fingerprint[:12]}: copy the server's files"
                )
            if spec.device == "cuda":
                self._check_gpus(spec, offer)
        self._check_sum(offer)

    def _check_gpus(self, spec: ModelSpec, offer: Offer) -> None:
        num = spec.tensor_parallel
        if len(offer.gpu_bytes) < num:
            raise BackendFailed(
                f"an engine of {spec.name} needs {num} GPUs, and this machine has {len(offer.gpu_bytes)}"
            )
        own = (gpu for gpus in spec.placement.engines for gpu in gpus)
        smallest, ours = min(offer.gpu_bytes), smallest_gpu(own)
        if smallest < SAME_GPU * ours:
            raise BackendFailed(
                f"a GPU of this machine has {smallest / 2**30:.1f} GiB, and the server's have {ours / 2**30:.1f} GiB,"
                " for which memory is planned: show `join` the larger ones alone"
            )

    def _check_sum(self, offer: Offer) -> None:
        """Raise BackendFailed unless a GPU has room for an engine of each model."""
        specs = {directory: self._pools[name][0] for name, directory in offer.models.items()}
        part = sum(spec.placement.sampler_fraction for spec in specs.values() if spec.device == "cuda")
        if part > 1:
            raise BackendFailed(
                f"the engines of {', '.join(offer.models)} need {part:.2f} of each GPU together: join with fewer models"
            )

    def begin(self, node: Node, start: StartThere) -> None:
        """Implement the protocol."""
        engines = self._engines[node] = []
        sending: Sending = {}  # shared on the machine: each adapter travels once to all of its engines
        for name in node.offer.models:
            _, pool = self._pools[name]
            base = self._bases.of(node, name)
            start_engine = base.wrap_start(start, they_wait=True)
            for gpus in base.spec.placement.engines:
                describe = partial(make_engine_spec, base.spec, node.offer, gpus)
                engines.append((pool, pool.attach(describe, start_engine, sending)))

    def are_ready(self, node: Node) -> bool:
        """Return whether all engines of a machine live, and have their memory."""
        return all(engine.supervisor.is_alive for _, engine in self._engines.get(node, ()))

    async def end(self, node: Node) -> None:
        """Implement the protocol."""
        await asyncio.gather(*(pool.detach(engine) for pool, engine in self._engines.pop(node)))


def make_engine_spec(spec: ModelSpec, offer: Offer, gpus: tuple[int, ...], number: int) -> ModelSpec:
    """Return the spec of an engine, given that of its model on the machine."""
    return replace(
        spec,
        placement=replace(spec.placement, engines=(gpus,)),
        scratch_dir=offer.scratch_dir(number),
        engine=number,
        received_dir=offer.received_dir,
    )
