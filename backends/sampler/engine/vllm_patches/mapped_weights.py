"""The engine's model around weights that another process holds.

vLLM makes it on the meta device and then sets the holder's parameters and buffers. Tensors that are neither, but a
module's own attributes, would stay there without values (such as the buffers of a vision tower's features). So the
model is made in main memory, of which weights that were never written take none, and such attributes are moved to the
device.
"""

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig, VllmConfig

from backends.sampler.engine.vllm_patches import targets

_REGISTERED = ("_parameters", "_buffers", "_modules")


def map_weights() -> None:
    """Apply the change. Once per process, before the model is loaded."""

    def initialize_model(vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        with torch.device("cpu"):
            model = made_by_vllm(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        move_attributes(model, torch.device(vllm_config.device_config.device))
        return model

    made_by_vllm = targets.MAPPED_MODEL.replace(initialize_model)


def move_attributes(model: nn.Module, device: torch.device) -> None:
    """Move all tensors that are attributes of modules, but neither parameters nor buffers."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in _REGISTERED:
                vars(module)[name] = _moved(value, device)


def _moved(value: object, device: torch.device) -> object:
    match value:
        case nn.Parameter():
            return value
        case Tensor():
            return value.to(device)
        case list():
            return (
                [_moved(item, device) for item in value] if any(isinstance(item, Tensor) for item in value) else value
            )
    return value
