"""The modules that a request's train_attn, train_mlp and train_unembed mean: the one list of their names."""

from torch import nn
from transformers import PreTrainedModel

from backends.families.family import LoraFlag

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
ENGINE_MODULES = (*ATTENTION, *MLP, "lm_head")
"""The same by the engine's names. The input embeddings are not among them, though a tied head shares their weight."""


def decoder_modules(model: PreTrainedModel) -> dict[LoraFlag, list[str]]:
    """Full module names by the flag that trains them; of a vision tower there are none."""
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    head = model.get_output_embeddings()
    groups: dict[LoraFlag, list[str]] = {"train_attn": [], "train_mlp": [], "train_unembed": []}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if module is head:
            groups["train_unembed"].append(name)
        elif isinstance(module, nn.Linear) and name.startswith(f"{prefix}.layers."):
            if last in ATTENTION:
                groups["train_attn"].append(name)
            elif last in MLP:
                groups["train_mlp"].append(name)
    return groups
