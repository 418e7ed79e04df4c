"""Adapters of a mixture's experts from files that hold one tensor for each matrix of a layer.

Expert by expert, as PEFT names them, those of 48 layers are 37,000 tensors, which vLLM 0.32 reads, names and copies
together one by one. Stacks it takes too, but only where experts share half of every adapter: its buffers are then made
for one. Here they are each expert's own, and filled from stacks as they are. Files expert by expert are loaded as ever.
"""

from collections.abc import Callable
from typing import Any

from vllm.lora.layers import FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import PackedLoRALayerWeights

from backends.families.lora_names import EXPERT_STACKS


def take_expert_stacks(manager: Any) -> None:
    """Changes vLLM's LoRA manager of an engine, before the first adapter is loaded."""
    manager.supported_lora_modules += [f"experts.{matrix}" for matrix in EXPERT_STACKS.values()]
    merge: Callable[[LoRAModel], None] = manager._create_merged_loras_inplace
    layers = [name for name, module in manager.modules.items() if isinstance(module, FusedMoEWithLoRA)]

    def with_stacks(adapter: LoRAModel) -> None:
        for layer in layers:
            stacks = [adapter.loras.pop(f"{layer}.{matrix}", None) for matrix in EXPERT_STACKS.values()]
            if any(stacks):
                adapter.loras[layer] = PackedLoRALayerWeights.pack_moe_stacked(stacks, layer)
        merge(adapter)

    manager._create_merged_loras_inplace = with_stacks
