"""All weights of a base in training by one model: those of the decoder, its embeddings and its head.

The base's own parameters compute, in the base's precision. The model has a float32 master of each, which the optimizer
changes and every microbatch starts from. Host memory holds what the base was loaded with: the next model starts from
it. If ranks share the base (FSDP2), each has its own shard of every tensor, of masters and gradients too.

T tokens of a microbatch; there are no LoRA ranks here, so every R is 0
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from api_schemas.training import Layout, Trainable
from backends.families.family import LoraFlag
from backends.families.lora_names import flag_of, trained_parameters
from backends.protocol import InvalidInput
from backends.trainer.distributed import Root, World
from backends.trainer.full.model import FullModel
from backends.trainer.lora.linear import SUMMED_TOKENS
from backends.trainer.model.loading import as_sharded


class FullWeights:
    """`TrainedWeights`: the base's own parameters, lent to one model at a time."""

    base_is_frozen = False

    def __init__(self, root: Root, modules: Mapping[LoraFlag, list[str]], world: World) -> None:
        """Call before the first forward. `modules` are the full names of those that each of a request's flags
        trains."""
        self.root = root
        self._world = world
        weight = root.model.get_output_embeddings().weight
        self._device, self._wide = weight.device, torch.promote_types(weight.dtype, torch.float32)
        # Gradients of whole weights are torch's own products over the tokens (`linear.SUMMED_TOKENS`).
        self.token_multiple = SUMMED_TOKENS if self._device.type == "cuda" else 1
        self._trained = trained_parameters(root.model)
        self._flags = {name: flag_of(name, root.model, modules) for name in self._trained}
        for parameter in self._trained.values():
            parameter.requires_grad_(True)
        self._original = {name: _own(one).to("cpu", copy=True) for name, one in self._trained.items()}

    def create(self, config: Trainable) -> FullModel:
        """Make a model with the base's original weights. Raises InvalidInput for one that is to be a LoRA adapter, or
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
        masters = {name: nn.Parameter(_own(self._trained[name]).to(self._wide, copy=True)) for name in flags}
        return FullModel(config, masters, self._world, fused=self._device.type == "cuda")

    def load(self, models: Sequence[FullModel]) -> Tensor:
        """Copy this model's masters into the base, rounded to its precision, with no gradient."""
        assert len(models) <= 1, "one model at a time trains all weights of a base"
        self.discard()
        if isinstance(self.root, FSDPModule):
            self.root.reshard()  # or the next forward would use what was all-gathered for the last
        for model in models:
            with torch.no_grad():
                for name, master in model.masters.items():
                    _own(self._trained[name]).copy_(master)
        return torch.zeros(len(models), 0, dtype=self._wide, device=self._device)

    def blank(self, num_tokens: int) -> Tensor:
        """Return empty scales [T, 0]: there are no adapters."""
        return torch.zeros(num_tokens, 0, dtype=self._wide, device=self._device)

    def use(self, scales_TR: Tensor) -> None:
        """Do nothing: all tokens are of the loaded model."""

    def in_tower(self, scales_R: Tensor) -> AbstractContextManager[None]:
        """Fail: no model here trains the tower."""
        raise AssertionError("the vision tower is frozen")

    @property
    def layouts(self) -> frozenset[Layout]:
        """None: there are no adapters."""
        return frozenset()

    @property
    def accumulated(self) -> list[Tensor]:
        """This rank's shards of the gradients since `load`, which are means over ranks."""
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
        """Drop the gradients since `load`."""
        for parameter in self._trained.values():
            parameter.grad = None

    def whole(self, name: str, own: Tensor) -> Tensor:
        """All-gather a tensor of a parameter's shape from its shards. All ranks call it."""
        tensor = as_sharded(own, self._trained[name])
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def own_shard(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's shard of a tensor of a parameter's shape, with memory of its own on the rank's device."""
        own = whole
        if isinstance(self._trained[name], DTensor):
            shards = whole.chunk(self._world.size)  # as FSDP2 cuts them
            own = shards[self._world.rank] if self._world.rank < len(shards) else whole[:0]
        return own.to(self._device, copy=True)

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a whole parameter."""
        return self._trained[name].shape


def whole_parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the model's files, whole, one after the other. All ranks iterate over all of them."""
    for name, tensor in model.state_dict().items():
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _own(tensor: Tensor) -> Tensor:
    """Return this rank's shard itself, not a copy."""
    local = tensor.detach()
    return local.to_local() if isinstance(local, DTensor) else local
