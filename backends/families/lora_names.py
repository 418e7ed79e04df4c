"""The modules that a request's train_attn, train_mlp and train_unembed mean, and train_vision: the one list of their
names."""

from torch import nn
from transformers import PreTrainedModel

from backends.families.family import Family, LoraFlag, TowerLora

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
LINEAR_ATTENTION = ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
"""Qwen3-Next has two projections in, Qwen3.5 four."""
ENGINE_MODULES = (*ATTENTION, *MLP, "experts", "in_proj_qkvz", "in_proj_ba", "out_proj", "lm_head")
"""The same by the engine's names. The input embeddings are not among them, though a tied head shares their weight."""
EXPERT_STACKS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""What the engine calls the adapters of one matrix of all a layer's experts, in its order."""

_IN_FILES = {
    "MixtralForCausalLM": {
        ".mlp.experts.": ".block_sparse_moe.experts.",
        ".gate_proj": ".w1",
        ".up_proj": ".w3",
        ".down_proj": ".w2",
    }
}
"""What transformers has renamed of experts, and PEFT and the engine have not: they go by the model's own files."""


def name_in_files(model: PreTrainedModel, name: str) -> str:
    """How files of adapters name a matrix that is `name` in the model."""
    for ours, theirs in _IN_FILES.get(type(model).__name__, {}).items():
        name = name.replace(ours, theirs)
    return name


def decoder_modules(
    model: PreTrainedModel, *, experts: bool = False, linear_attention: bool = False
) -> dict[LoraFlag, list[str]]:
    """Full module names by the flag that trains them; of a vision tower there are none. `experts`: those of a
    mixture too, where they have the form that LoRA takes; `linear_attention`: its layers' too, as attention."""
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    head = model.get_output_embeddings()
    groups: dict[LoraFlag, list[str]] = {"train_attn": [], "train_mlp": [], "train_unembed": []}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if module is head:
            groups["train_unembed"].append(name)
        elif name.startswith(f"{prefix}.layers."):
            of_linear_attention = name.endswith(tuple(f".linear_attn.{one}" for one in LINEAR_ATTENTION))
            if experts and has_stacked_experts(module):
                groups["train_mlp"].append(name)
            elif not isinstance(module, nn.Linear):
                continue
            elif last in ATTENTION or (linear_attention and of_linear_attention):
                groups["train_attn"].append(name)
            elif last in MLP:
                groups["train_mlp"].append(name)
    return groups


def trained_modules(family: Family, model: PreTrainedModel, *, train_vision: bool) -> dict[LoraFlag, list[str]]:
    """Full module names by the flag that trains them on a server with this setting."""
    groups = family.lora_modules(model)
    if train_vision and family.vision is not None and family.vision.lora is not None:
        groups["train_vision"] = tower_modules(model, family.vision.lora)
    return groups


def tower_modules(model: PreTrainedModel, tower: TowerLora) -> list[str]:
    """Full names of the linears of a vision tower and its mergers."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.startswith(f"{tower.root}.")
        and not name.startswith(tuple(f"{one}." for one in tower.frozen))
    ]


def has_stacked_experts(module: nn.Module) -> bool:
    """Whether these are the experts of a layer in transformers' own form, gate and up in one stack without biases."""
    form = ("is_concatenated", "is_transposed", "has_bias", "has_gate")
    return tuple(getattr(module, name, None) for name in form) == (True, False, False, True)
