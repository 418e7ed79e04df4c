"""Bases on other machines: where trainer and engine share a copy, each machine that joins holds those of its models."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from tinker_server.backends.base_weights.client import BaseWeights
from tinker_server.backends.cluster.client import Node, StartThere
from tinker_server.backends.cluster.offer import Offer
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.processes.launcher import Holding, start_all
from tinker_server.backends.processes.rpc import Child
from tinker_server.backends.protocol import ignore_loading


class RemoteBases:
    """`client.Use`: the bases of the models, by public name, on other machines. The first use of all."""

    def __init__(self, specs: Mapping[str, ModelSpec]) -> None:
        self._specs = specs
        self._held: dict[Node, dict[str, BaseWeights]] = {}
        self._starting: dict[Node, list[asyncio.Task[None]]] = {}

    def check(self, offer: Offer) -> None:
        """Implement the protocol: engines need what a base needs."""

    def begin(self, node: Node, start: StartThere) -> None:
        """Implement the protocol."""
        held = self._held[node] = {
            name: BaseWeights(self.describe(name, number, node.offer), partial(_start_holders, start))
            for number, name in enumerate(node.offer.models)
        }
        self._starting[node] = [
            asyncio.create_task(base.keep_starting(ignore_loading), name=f"base on {node.offer.name}")
            for base in held.values()
        ]

    async def end(self, node: Node) -> None:
        """Implement the protocol."""
        for starting in self._starting.pop(node):
            starting.cancel()
        await asyncio.gather(*(base.stop() for base in self._held.pop(node).values()))

    def of(self, node: Node, name: str) -> BaseWeights:
        """Return a model's base on a machine, with its spec there."""
        return self._held[node][name]

    def describe(self, name: str, number: int, offer: Offer) -> ModelSpec:
        """Return a model's spec as its processes on a machine need it."""
        spec = self._specs[name]
        return replace(
            spec,
            directory=offer.models[name],
            placement=replace(spec.placement, engines=tuple(gpus_of_engines(spec, offer))),
            compiled_dir=None if spec.compiled_dir is None else Path(offer.data_dir) / "compiled",
            base_dir=None if spec.base_copies == 2 else Path(offer.base_dir) / str(number),
        )


async def _start_holders(start: StartThere, spec: ModelSpec) -> list[Child]:
    return await start_all(start(spec, Holding(gpu)) for gpu in spec.base_gpus)


def gpus_of_engines(spec: ModelSpec, offer: Offer) -> list[tuple[int, ...]]:
    """Return the GPUs of each engine of a model on a machine: as many engines as it has GPUs for; on the CPU 1."""
    if spec.device == "cpu":
        return [()]
    num, count = spec.tensor_parallel, len(offer.gpu_bytes)
    return [tuple(range(first, first + num)) for first in range(0, count - num + 1, num)]
