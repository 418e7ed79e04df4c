"""The engine's model around weights that another process holds.

vLLM makes it on the meta device and then sets the holder's parameters and buffers. Tensors that are neither, but a
module's own attributes, would stay there without values (such as the buffers of a vision tower's features). So the
model is made in main memory, of which weights that were never written take none, and such attributes are moved to the
device.

The holder's parameters take the place of the model's own in its modules alone. An object that is no module may have one
of the model's own too: the router of a mixture has the correction of its scores, without values. It
gets the holder's.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.model_executor.model_loader.weight_cache.ipc_loader import IpcModelLoader
from vllm.model_executor.model_loader.weight_cache.protocol import WeightCacheState

from tinker_server.backends.sampler.engine.vllm_patches import targets

SOCKETS = "\n"
"""Between the paths of several ranks' sockets."""
_REGISTERED = ("_parameters", "_buffers", "_modules")


def map_weights() -> None:
    """Apply the change. Once per process, before the model is loaded."""

    def initialize_model(vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        with torch.device("cpu"):
            model = made_by_vllm(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        move_attributes(model, torch.device(vllm_config.device_config.device))
        return model

    def apply_entries(self: IpcModelLoader, model: nn.Module, state: WeightCacheState, device_index: int) -> None:
        own = parameters_of(model)
        applied_by_vllm(self, model, state, device_index)
        follow_parameters(model, own)

    made_by_vllm = targets.MAPPED_MODEL.replace(initialize_model)
    applied_by_vllm = targets.MAPPED_ENTRIES.replace(apply_entries)


def choose_socket(config: LoadConfig, rank: int) -> None:
    """Have a rank of the engine map the weights of its own holder, in its own copy of the configuration."""
    loader = dict(config.model_loader_extra_config)
    loader["socket_path"] = loader["socket_path"].split(SOCKETS)[rank]
    config.model_loader_extra_config = loader


def follow_parameters(model: nn.Module, own: Mapping[str, nn.Parameter]) -> None:
    """Replace, in all objects that modules have as attributes, the model's own parameters by those of today."""
    today, names = parameters_of(model), {id(parameter): name for name, parameter in own.items()}
    for holder in _plain_objects(model):
        for attribute, value in vars(holder).items():
            if (name := names.get(id(value))) is not None:
                vars(holder)[attribute] = today[name]


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters by name, tied ones by each of their names."""
    return dict(model.named_parameters(remove_duplicate=False))


def _plain_objects(model: nn.Module) -> Iterator[object]:
    """Yield every object of vLLM's classes, but modules, that can be reached by attributes."""
    seen: set[int] = set()
    left = [value for module in model.modules() for value in vars(module).values()]
    while left:
        found = left.pop()
        is_vllms = type(found).__module__.startswith("vllm.") and hasattr(found, "__dict__")
        if is_vllms and not isinstance(found, nn.Module | Tensor) and id(found) not in seen:
            seen.add(id(found))
            left += vars(found).values()
            yield found


def move_attributes(model: nn.Module, device: torch.device) -> None:
    """Move all tensors that are attributes of modules, but neither parameters nor buffers."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in _REGISTERED:
                vars(module)[name] = _move(value, device)


def _move(value: object, device: torch.device) -> object:
    match value:
        case nn.Parameter():
            return value
        case Tensor():
            return value.to(device)
        case list():
            return [_move(item, device) for item in value] if any(isinstance(item, Tensor) for item in value) else value
    return value
