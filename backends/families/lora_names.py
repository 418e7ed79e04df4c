"""Modules that a request's train_attn, train_mlp, train_unembed and train_vision train: the only list of their
names."""

from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from tinker_server.backends.families import deepseek_v3
from tinker_server.backends.families.family import Family, LoraFlag, TowerLora
from tinker_server.backends.families.gpt_oss import ARCHITECTURE, has_own_experts
from tinker_server.backends.families.gpt_oss.experts import BiasedExperts
from tinker_server.backends.families.linear_attention import GATES, rows_of_inputs
from tinker_server.backends.families.rows import Rows

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
LINEAR_ATTENTION = tuple(
    [f"linear_attn.in_proj_{inputs}" for inputs in ("qkvz", "ba", "qkv", "z", "b", "a")]
    + ["linear_attn.out_proj", "mixer.in_proj", "mixer.out_proj"]
)
"""Qwen3-Next has two input projections, Qwen3.5 four, and Mamba2 a single projection."""
_ENGINE_MODULES = (
    *ATTENTION,
    *deepseek_v3.LATENT_ATTENTION,
    *MLP,
    *("experts", "in_proj_qkvz", "in_proj_ba", "in_proj", "out_proj", "lm_head"),
)
"""The engine's names of the same. The input embeddings are not among them, though a tied head shares their weight."""
NOT_IN_FP8 = GATES
"""Linears of the decoder that published fp8 files have in bfloat16."""
EXPERT_STACKS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""The engine's names of the adapters of a matrix of all a layer's experts, in its order."""
UNGATED_STACKS = {"up_proj": "w1", "down_proj": "w2"}
"""The same of experts without a gate."""

OUT_OF_LATENTS = deepseek_v3.OUT_OF_LATENTS
"""Linears that have no adapters in an engine that keeps latents."""
_IN_FILES = {
    "MixtralForCausalLM": {
        ".mlp.experts.": ".block_sparse_moe.experts.",
        ".gate_proj": ".w1",
        ".up_proj": ".w3",
        ".down_proj": ".w2",
    },
    ARCHITECTURE: {f".{ours}": f".{theirs}" for ours, theirs in EXPERT_STACKS.items()},
}
"""Names of experts that transformers has changed. PEFT and the engine have not: they use those of the model's files; of
gpt-oss, in whose files an expert has no tensors of its own, the engine's."""


def engine_modules(*, latent_cache: bool) -> list[str]:
    """Return the names of the modules that have adapters in the engine. `latent_cache`: the engine keeps latents."""
    return [module for module in _ENGINE_MODULES if not (latent_cache and module in OUT_OF_LATENTS)]


def name_in_files(model: PreTrainedModel, name: str) -> str:
    """Return the name in adapter files of the matrix `name` of the model."""
    for ours, theirs in _IN_FILES.get(type(model).__name__, {}).items():
        name = name.replace(ours, theirs)
    return name


def decoder_modules(
    model: PreTrainedModel, *, experts: bool = False, linear_attention: bool = False, latent_attention: bool = False
) -> dict[LoraFlag, list[str]]:
    """Return full module names by the flag that trains them, none of a vision tower. `experts`: a mixture's too, if
    they have the form that LoRA takes; `linear_attention`: its layers' too, as attention; `latent_attention`: the
    linears of its latents too."""
    attention = (*ATTENTION, *deepseek_v3.LATENT_ATTENTION) if latent_attention else ATTENTION
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    head = model.get_output_embeddings()
    groups: dict[LoraFlag, list[str]] = {"train_attn": [], "train_mlp": [], "train_unembed": []}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if module is head:
            groups["train_unembed"].append(name)
        elif name.startswith(f"{prefix}.layers."):
            of_linear_attention = name.endswith(tuple(f".{one}" for one in LINEAR_ATTENTION))
            if experts and has_stacked_experts(module):
                groups["train_mlp"].append(name)
            elif not isinstance(module, nn.Linear):
                continue
            elif last in attention or (linear_attention and of_linear_attention):
                groups["train_attn"].append(name)
            elif last in MLP:
                groups["train_mlp"].append(name)
    return groups


def find_trained_modules(family: Family, model: PreTrainedModel, *, train_vision: bool) -> dict[LoraFlag, list[str]]:
    """Return full module names by the flag that trains them on a server with this setting."""
    groups = family.lora_modules(model)
    if train_vision and family.vision is not None and family.vision.lora is not None:
        groups["train_vision"] = tower_modules(model, family.vision.lora)
    return groups


def service_adapters(model: PreTrainedModel, name: str) -> Mapping[str, Rows] | None:
    """Return the adapters of the module `name` in the hosted service's layout, by their names beside it and in the
    order of their rows; none if it is not trained. None if it has the same in every layout.

    The service's count of the numbers of each model says which these are.
    """
    parent, _, last = name.rpartition(".")
    if last in (*GATES, *deepseek_v3.OUT_OF_LATENTS):
        return {}
    rows = rows_of_inputs(model.get_submodule(parent), last)
    return {f"{parent}.{part}": found for part, found in rows.items()} if rows else None


def tower_modules(model: PreTrainedModel, tower: TowerLora) -> list[str]:
    """Return full names of the linears of a vision tower and its mergers."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.startswith(f"{tower.root}.")
        and not name.startswith(tuple(f"{one}." for one in tower.frozen))
    ]


def has_stacked_experts(module: nn.Module) -> bool:
    """Return whether these are a layer's experts in transformers' own form, gate and up joined or up alone, with
    biases only if they are gpt-oss's."""
    known = tuple(getattr(module, name, None) for name in ("is_concatenated", "is_transposed", "has_bias"))
    return known == (True, False, False) or has_own_experts(module) or isinstance(module, BiasedExperts)
