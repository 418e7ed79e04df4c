"""One model that trains all of a base's weights: the decoder's, its embeddings' and its head's.

The base's own parameters compute, in the base's precision; the model has a master of each in float32, which the
optimizer changes and a row begins with. What the base was loaded with is kept in host memory: the next model starts
from it. Where ranks share the base (FSDP2), each has its own rows of every tensor, masters and gradients too.

T tokens of a row; there are no rank columns here, so that every R is 0
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from api_schemas.training import Trainable
from backends.families.family import LoraFlag
from backends.families.full_weights import flag_of, trained_parameters
from backends.protocol import InvalidInput
from backends.trainer.distributed import Root, World
from backends.trainer.model.loading import placed


@dataclass(frozen=True)
class FullModel:
    """The masters of what a model trains: this rank's rows, float32, by the parameter's name in the model."""

    config: Trainable
    masters: Mapping[str, nn.Parameter]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """In the model's own order."""
        return list(self.masters.values())


class FullWeights:
    """The base's own parameters, lent to one model at a time."""

    def __init__(self, root: Root, modules: Mapping[LoraFlag, list[str]], world: World) -> None:
        """Before the first forward. `modules` are the full names of those that each of a request's flags trains."""
        self.root = root
        self._world = world
        weight = root.model.get_output_embeddings().weight
        self._device, self._wide = weight.device, torch.promote_types(weight.dtype, torch.float32)
        self._trained = trained_parameters(root.model)
        self._flags = {name: flag_of(name, root.model, modules) for name in self._trained}
        for parameter in self._trained.values():
            parameter.requires_grad_(True)
        self._original = {name: _own(one).to("cpu", copy=True) for name, one in self._trained.items()}

    def create(self, config: Trainable) -> FullModel:
        """A model that has the base's original weights. Raises InvalidInput for one that is to be a LoRA adapter, or
        to train nothing."""
        if not config.full:
            raise InvalidInput(
                "this is a LoRA adapter, and the server trains all weights of its models (setting backend.full); start"
                " it without that setting to go on with adapters"
            )
        if not (config.train_attn or config.train_mlp or config.train_unembed):
            raise InvalidInput("lora_config: at least one of train_attn, train_mlp, train_unembed must be true")
        for name, original in self._original.items():
            _own(self._trained[name]).copy_(original)
        flags = {name: flag for name, flag in self._flags.items() if flag is None or getattr(config, flag)}
        return FullModel(
            config,
            {name: nn.Parameter(_own(self._trained[name]).to(self._wide, copy=True)) for name in flags},
        )

    def load(self, models: Sequence[FullModel]) -> Tensor:
        """Have the base compute with this model's masters, rounded to the base's precision, with no gradient."""
        assert len(models) <= 1, "one model at a time trains all weights of a base"
        self.discard()
        if isinstance(self.root, FSDPModule):
            self.root.reshard()  # or what it gathered for the last forward would be used for the next one too
        for model in models:
            with torch.no_grad():
                for name, master in model.masters.items():
                    _own(self._trained[name]).copy_(master)
        return torch.zeros(len(models), 0, dtype=self._wide, device=self._device)

    def blank(self, num_tokens: int) -> Tensor:
        """[T, 0]."""
        return torch.zeros(num_tokens, 0, dtype=self._wide, device=self._device)

    def use(self, scales_TR: Tensor) -> None:
        """All tokens are of the model that is loaded."""

    def in_tower(self, scales_R: Tensor) -> AbstractContextManager[None]:
        """No model here trains the tower."""
        raise AssertionError("the vision tower is frozen")

    @property
    def gathered(self) -> list[Tensor]:
        """This rank's rows of the gradients since `load`; of several ranks their mean."""
        return [_own(one.grad) for one in self._trained.values() if one.grad is not None]

    def collect(self, models: Sequence[FullModel]) -> None:
        """Add the gradients since `load` to the model's own, in float32."""
        (model,) = models
        for name, master in model.masters.items():
            gradient = self._trained[name].grad
            if gradient is None:
                continue
            part = _own(gradient).to(master.dtype)
            if isinstance(gradient, DTensor):
                part = part * self._world.size  # FSDP2 divides the sum over ranks by their number
            master.grad = part if master.grad is None else master.grad.add_(part)
        self.discard()

    def discard(self) -> None:
        """Forget the gradients since `load`."""
        for parameter in self._trained.values():
            parameter.grad = None

    def whole(self, name: str, own: Tensor) -> Tensor:
        """All rows of what has the shape of a parameter, of which each rank has its own. All ranks call it."""
        tensor = placed(own, self._trained[name])
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def own_rows(self, name: str, whole: Tensor) -> Tensor:
        """This rank's of what has the shape of a parameter, with memory of its own on its device."""
        own = whole
        if isinstance(self._trained[name], DTensor):
            rows = whole.chunk(self._world.size)  # as FSDP2 cuts them
            own = rows[self._world.rank] if self._world.rank < len(rows) else whole[:0]
        return own.to(self._device, copy=True)

    def shape(self, name: str) -> torch.Size:
        """Of a whole parameter."""
        return self._trained[name].shape


def whole_parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """All that the model's files hold, one tensor after the other, whole. All ranks ask for all of them."""
    for name, tensor in model.state_dict().items():
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _own(tensor: Tensor) -> Tensor:
    """This rank's rows, and not a copy of them."""
    local = tensor.detach()
    return local.to_local() if isinstance(local, DTensor) else local
