"""Many LoRA adapters on one frozen base, by PEFT (Hu et al. 2021, arXiv:2106.09685).

A module of the base that maps x [.., I] to W x [.., O] gives W x + (ALPHA / r) B A x, with A [r, I] and B [O, r].
Adapters are ordinary float32 tensors whatever the base's precision, and whole on every rank. Which
modules a request's train_attn, train_mlp and train_unembed mean the model's family says.
"""

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from peft import LoraConfig as PeftLoraConfig
from peft.tuners.lora import LoraLayer, LoraModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from api_schemas.training import Trainable
from backends.families.family import LoraFlag
from backends.protocol import InvalidInput

ALPHA = 32
"""Fixed: an adapter's output is scaled by ALPHA / rank, which the SDK's weight export expects."""


@dataclass(frozen=True)
class Adapter:
    """One adapter's tensors, by their name in a PEFT file."""

    name: str
    config: Trainable
    tensors: dict[str, nn.Parameter]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All tensors, in a fixed order."""
        return list(self.tensors.values())


class Adapters:
    """The adapters of one model. Exactly one is selected: only it computes and gathers gradient."""

    def __init__(self, model: PreTrainedModel, modules: Mapping[LoraFlag, list[str]], max_rank: int) -> None:
        """`modules` are the full names of those that each of a request's flags trains."""
        self._model = model
        self._max_rank = max_rank
        self._modules = modules
        self._tuner: LoraModel | None = None
        self._layers: list[tuple[str, LoraLayer]] = []
        self._selected: str | None = None

    def create(self, name: str, config: Trainable) -> Adapter:
        """A fresh adapter: A uniform as nn.Linear, drawn from `config.seed` in float32, and B zero.

        The same seed gives the same tensors on every device and rank. Raises InvalidInput for a rank or modules
        that cannot be had; where it raises, nothing of the adapter is left.
        """
        peft_config = PeftLoraConfig(
            r=config.rank,
            lora_alpha=ALPHA,
            lora_dropout=0.0,
            target_modules="|".join(map(re.escape, self._chosen_modules(config))),
        )
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                # A head tied to the embeddings: the adapter is on the head's output alone, which is meant.
                warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
                self._inject(name, peft_config)
            self._layers = self._lora_layers()
            self._selected = None
            adapter = Adapter(name, config, self._tensors(name))
            _initialise(adapter)
        except BaseException:
            self._remove(name)
            raise
        return adapter

    def _chosen_modules(self, config: Trainable) -> list[str]:
        if not 1 <= config.rank <= self._max_rank:
            raise InvalidInput(f"lora_config.rank is {config.rank}; this server takes 1 to {self._max_rank}")
        modules = []
        for flag, names in self._modules.items():
            if getattr(config, flag):
                if not names:
                    raise InvalidInput(f"lora_config.{flag}: this model has no modules that it could train")
                modules += names
        if not modules:
            raise InvalidInput("lora_config: at least one of train_attn, train_mlp, train_unembed must be true")
        return modules

    def _inject(self, name: str, peft_config: PeftLoraConfig) -> None:
        if self._tuner is None:
            self._tuner = LoraModel(self._model, peft_config, name)
        else:
            self._tuner.peft_config[name] = peft_config
            self._tuner.inject_adapter(self._model, name)

    def _lora_layers(self) -> list[tuple[str, LoraLayer]]:
        return [(name, module) for name, module in self._model.named_modules() if isinstance(module, LoraLayer)]

    def _tensors(self, name: str) -> dict[str, nn.Parameter]:
        """A [r, I] and B [O, r] of every module, by their names in a PEFT file."""
        tensors = {}
        for module_name, layer in self._layers:
            for half, linears in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
                if name in linears:
                    linear = linears[name]
                    linear.weight = nn.Parameter(torch.empty_like(linear.weight, dtype=torch.float32))
                    tensors[f"base_model.model.{module_name}.{half}.weight"] = linear.weight
        return tensors

    def select(self, name: str) -> None:
        """Make `name` the adapter that computes."""
        if name != self._selected:
            for _, layer in self._layers:
                layer.set_adapter([name])
            self._selected = name

    def drop(self, adapter: Adapter) -> None:
        """Forget an adapter and free its tensors."""
        self._remove(adapter.name)

    def _remove(self, name: str) -> None:
        """Whatever PEFT has of an adapter, also where it was put in only in part."""
        with warnings.catch_warnings():
            # PEFT says which adapter it selects next; the next call to select decides that.
            warnings.filterwarnings("ignore", message="Adapter .* was active which is now deleted")
            for _, layer in self._lora_layers():
                layer.delete_adapter(name)
        if self._tuner is not None:
            self._tuner.peft_config.pop(name, None)
            self._tuner.active_adapter = []
        self._selected = None


def _initialise(adapter: Adapter) -> None:
    generator = torch.Generator().manual_seed((adapter.config.seed or 0) % 2**63)
    with torch.no_grad():
        for name, tensor in adapter.tensors.items():
            if ".lora_B." in name:
                tensor.zero_()
            else:
                fresh = torch.empty(tensor.shape, dtype=torch.float32)
                nn.init.kaiming_uniform_(fresh, a=math.sqrt(5), generator=generator)
                tensor.copy_(fresh)


def check_tensors(source: dict[str, Tensor], adapter: Adapter, where: str) -> None:
    """Raises InvalidInput where names or shapes differ from the adapter's."""
    if source.keys() != adapter.tensors.keys():
        raise InvalidInput(f"{where}: the checkpoint trains other modules than this model")
    for name, tensor in adapter.tensors.items():
        if source[name].shape != tensor.shape:
            raise InvalidInput(
                f"{where}: {name} has shape {tuple(source[name].shape)}, this model's {tuple(tensor.shape)}:"
                " the LoRA ranks differ"
            )
