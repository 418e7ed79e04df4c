"""Files of a model that trains all its weights: a whole Hugging Face model for a sampler or for anybody; masters and
optimizer for training.

All ranks give their shards, tensor by tensor; rank 0 alone reads and writes. A failure is raised on every rank and
leaves the model as it was.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backends.formats.base_files import text_files
from backends.formats.load_check import LoadCheck
from backends.protocol import LOAD_CHECK_FILE, InvalidInput
from backends.trainer import checkpoint_files
from backends.trainer.distributed import World, agreed, from_rank_zero, gather_objects, on_rank_zero
from backends.trainer.full.model import FullModel
from backends.trainer.full.weights import FullWeights, whole_parameters
from backends.trainer.optimizer import MOMENTS, all_finite
from backends.trainer.trained_weights import GradientState

MASTERS_FILE = "masters.safetensors"
_MAX_SHARD = "5GB"
_LICENSE = "LICENSE*"
_STEP, _WEIGHTS = "step", "weights"


class FullFiles:
    """`ModelFiles` of models that train all weights."""

    def __init__(
        self, source: str, weights: FullWeights, world: World, snapshots: checkpoint_files.SnapshotWriter
    ) -> None:
        """`source` is the base model's directory, whose tokenizer and processor go with every whole model."""
        self._source = Path(source)
        self._weights = weights
        self._world = world
        self._snapshots = snapshots

    def save_sampler_weights(
        self, model: FullModel, directory: Path, load_check: LoadCheck, *, for_elsewhere: bool
    ) -> None:
        """Save a complete Hugging Face model in the base's precision, which is what computes; the same for elsewhere.

        Raises InvalidInput if its weights or its scores are not finite.
        """
        checkpoint_files.require_finite(model, self._world)
        agreed(load_check.check_finite, self._world)
        self._weights.load([model])
        base = self._weights.root.model
        tensors = {name: self._on_host(own) for name, own in whole_parameters(base)}

        def write(aside: Path) -> None:
            base.save_pretrained(aside, state_dict=tensors, max_shard_size=_MAX_SHARD)
            for file in [*text_files(self._source), *self._source.glob(_LICENSE)]:
                if file.parent == self._source and not (aside / file.name).exists():
                    shutil.copyfile(file, aside / file.name)
            (aside / LOAD_CHECK_FILE).write_text(json.dumps(load_check.to_metadata()))

        checkpoint_files.write_on_rank_zero(directory, write, self._world, durable=False)

    def save_state(self, model: FullModel, directory: Path) -> None:
        """Save masters and optimizer. Raises InvalidInput if a master is not finite."""
        checkpoint_files.require_finite(model, self._world)
        masters, moments = self._all_gathered(dict(model.masters)), self._moments(model)

        def write(aside: Path) -> None:
            save_file(masters, aside / MASTERS_FILE)
            checkpoint_files.write_optimizer(aside, moments)

        checkpoint_files.write_on_rank_zero(directory, write, self._world)

    def load_state(self, model: FullModel, directory: Path, *, with_optimizer: bool) -> None:
        """Load a saved state; the gradient is cleared, and without its state the optimizer starts afresh."""
        masters = model.masters

        def read() -> dict[str, dict[str, Tensor]]:
            found = {_WEIGHTS: _read(directory)}
            if with_optimizer:
                found |= _by_kind(checkpoint_files.read_optimizer(directory))
            moments = [found[kind].keys() for kind in (_STEP, *MOMENTS) if kind in found]
            if found[_WEIGHTS].keys() != masters.keys() or any(names != moments[0] for names in moments):
                raise InvalidInput("load_weights: the checkpoint trains other weights than this model")
            for kind, tensors in found.items():
                self._check(tensors, kind)
            return found

        found = on_rank_zero(read, self._world) or {}
        kinds = gather_objects(list(found), self._world)[0]
        own = {kind: self._scattered(found.get(kind, {}), kind) for kind in kinds}
        model.take(own.pop(_WEIGHTS), own)

    def begin_snapshot(self, model: FullModel, directory: Path) -> None:
        """Copy masters, optimizer and the accumulated gradient; rank 0's thread writes the copy."""
        checkpoint_files.require_finite(model, self._world)
        masters, moments = self._all_gathered(dict(model.masters)), self._moments(model)
        of_masters = {name: one.grad for name, one in model.masters.items() if one.grad is not None}
        gradient, state = self._all_gathered(of_masters), model.gradient

        def write(aside: Path) -> None:
            save_file(masters, aside / MASTERS_FILE)
            checkpoint_files.write_optimizer(aside, moments)
            checkpoint_files.write_gradient(aside, gradient, state)

        if self._world.rank == 0:
            self._snapshots.begin(directory, write)

    def load_snapshot(self, model: FullModel, directory: Path) -> None:
        """Load masters, optimizer and gradient of a snapshot."""
        self.load_state(model, directory, with_optimizer=True)

        def read() -> tuple[dict[str, Tensor], GradientState]:
            return checkpoint_files.read_gradient(directory)

        gradient, state = on_rank_zero(read, self._world) or ({}, "none")
        for name, one in self._scattered(gradient, "gradient").items():
            model.masters[name].grad = one
        model.gradient = gather_objects(state, self._world)[0]

    def _all_gathered(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All-gather shards of parameters: whole tensors with memory of their own on rank 0, none on the others."""
        whole = {name: self._on_host(self._weights.whole(name, one.detach())) for name, one in own.items()}
        return whole if self._world.rank == 0 else {}

    def _moments(self, model: FullModel) -> dict[str, Tensor]:
        """Return Adam's state by `<parameter>:<exp_avg|exp_avg_sq|step>`, on rank 0."""
        flat: dict[str, Tensor] = {}
        for kind, tensors in model.state_tensors().items():
            if kind != _STEP:
                tensors = self._all_gathered(tensors)
            flat |= {f"{name}:{kind}": one.detach().to("cpu", copy=True) for name, one in tensors.items()}
        return flat

    def _on_host(self, tensor: Tensor) -> Tensor:
        """Copy to host memory on rank 0; the others have taken part in the all-gather."""
        return tensor.detach().to("cpu", copy=True).contiguous() if self._world.rank == 0 else torch.empty(0)

    def _scattered(self, tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
        """Return each rank's shards of rank 0's tensors; step counts are whole."""
        own = {}
        for name in gather_objects(list(tensors), self._world)[0]:
            whole = from_rank_zero({name: tensors[name]} if tensors else {}, self._world)[name]
            own[name] = whole.clone() if kind == _STEP else self._weights.own_shard(name, whole)
        return own

    def _check(self, tensors: Mapping[str, Tensor], kind: str) -> None:
        """Raise InvalidInput if saved tensors are not those of this model."""
        for name, tensor in tensors.items():
            if kind != _STEP and tensor.shape != self._weights.shape(name):
                raise InvalidInput(
                    f"load_weights: {name} has shape {tuple(tensor.shape)}, this model's"
                    f" {tuple(self._weights.shape(name))}"
                )
        if not all_finite(list(tensors.values())):
            raise InvalidInput("load_weights: the checkpoint holds NaN or infinity")


def _read(directory: Path) -> dict[str, Tensor]:
    if not (directory / MASTERS_FILE).exists():
        raise InvalidInput(
            f"the checkpoint has no {MASTERS_FILE}: it was deleted, is a LoRA adapter's, or was not saved for training"
        )
    return load_file(directory / MASTERS_FILE)


def _by_kind(flat: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return Adam's state by its name in torch, then by parameter; no kinds before the first step."""
    kinds: dict[str, dict[str, Tensor]] = {kind: {} for kind in (_STEP, *MOMENTS)} if flat else {}
    for key, tensor in flat.items():
        name, _, kind = key.rpartition(":")
        kinds[kind][name] = tensor
    return kinds
