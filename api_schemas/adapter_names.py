"""The names of an adapter's tensors in exported files: those of PEFT, and those of Tinker's tools.

`tinker_cookbook.weights` builds and merges adapters whose tensors are named

    base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.weight   [rank, in]
    base_model.model.model.layers.{i}.mlp.experts.w1.lora_A.weight     [experts, rank, in]: w1 gate, w3 up, w2 down
    base_model.model.model.layers.{i}.mixer.experts.w1.lora_A.weight   Nemotron's without a gate: w1 up, w2 down
    base_model.model.model.unembed_tokens.lora_B.weight                [out, rank], the head

whatever the model calls its decoder (`model.language_model.layers`) and its head (`lm_head`). PEFT and vLLM need the
model's own names, and each expert's matrices apart. The tools have no names for a vision tower. A factor that all
experts of a layer share is there once, [1, rank, in] or [1, out, rank]. Saved weights of models with such factors have
the same stacks, under the model's own names.
"""

import re
from collections.abc import Mapping, Sequence

from tinker_server.api_schemas.training import Layout

NOT_FOR_PEFT = "none: these are names of Tinker's tools; PEFT's form is in the directory peft/ beside this file"
"""The `peft_type` in the config of files under the tools' names. PEFT quotes a type that it does not know."""
_LAYER = re.compile(r"base_model\.model\.(?:.+?\.)??layers\.(?P<rest>\d+\..+)")
_HEAD = re.compile(r"base_model\.model\.(?:.+\.)?[^.]+\.(?P<half>lora_[AB])\.weight")
_EXPERT = re.compile(
    r"(?P<layer>.+)\.(?P<parent>mlp|block_sparse_moe|mixer)\.experts\.(?P<number>\d+)"
    r"\.(?P<matrix>(?:gate|up|down)_proj|w[123])(?P<after>\..+)"
)
_STACK = re.compile(r".+\.experts\.(?P<matrix>w[123])\.lora_(?P<half>[AB])\.weight")
EXPERT_MATRICES = "expert_matrices"
"""In the header of a file of experts that share factors: PEFT's names of an expert's matrices by the names of the
stacks, as JSON."""
_PARTS = frozenset({"in_proj_q", "in_proj_k", "in_proj_v", "x_proj"})
"""Adapters of parts of linears, each beside others."""
_WHOLE_LINEARS = frozenset({"in_proj_qkv", "in_proj_qkvz", "in_proj"})
"""Linears of which they are parts."""
_OF_LATENTS = frozenset({"q_a_proj", "kv_a_proj_with_mqa"})
_OUT_OF_LATENTS = "kv_b_proj"
_OF_EXPERTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_OF_UNGATED_EXPERTS = {"up_proj": "w1", "down_proj": "w2"}


def is_of_a_layer(peft_name: str) -> bool:
    """Return whether a tensor is of a layer of a decoder."""
    return _LAYER.fullmatch(peft_name) is not None


def tinker_name(peft_name: str) -> tuple[str, int | None]:
    """Return the tools' name of a tensor, and for an expert's its index in the stack of that name.

    A tensor outside the decoder layers belongs to the head. Raises ValueError for a name that no adapter has.
    """
    if layer := _LAYER.fullmatch(peft_name):
        name = f"base_model.model.model.layers.{layer['rest']}"
        name = name.replace(".block_sparse_moe.experts.", ".mlp.experts.")
        return expert_stack(name) or (name, None)
    if head := _HEAD.fullmatch(peft_name):
        return f"base_model.model.model.unembed_tokens.{head['half']}.weight", None
    raise ValueError(f"{peft_name!r} is not a tensor of an adapter")


def expert_stack(peft_name: str) -> tuple[str, int] | None:
    """Return the name of the stack that has an expert's tensor, under the model's own names, and the expert's number;
    None for other tensors."""
    if (expert := _EXPERT.fullmatch(peft_name)) is None:
        return None
    matrices = _OF_UNGATED_EXPERTS if expert["parent"] == "mixer" else _OF_EXPERTS
    matrix = matrices.get(expert["matrix"], expert["matrix"])
    return f"{expert['layer']}.{expert['parent']}.experts.{matrix}{expert['after']}", int(expert["number"])


def is_stack(name: str) -> bool:
    """Return whether a tensor is one matrix of all experts of a layer."""
    return _STACK.fullmatch(name) is not None


def is_on_hidden_side(stack: str) -> bool:
    """Return whether a stack's matrices are next to the hidden state: A of gate and up, and B of down."""
    found = _STACK.fullmatch(stack)
    return found is not None and (found["matrix"] == "w2") == (found["half"] == "B")


def layout_of(shapes: Mapping[str, Sequence[int]], rank: int, header: Mapping[str, str]) -> Layout | None:
    """Return the layout of an adapter of this rank, as the names and shapes of its tensors tell; None if they are the
    same in both.

    `service`: it has adapters of parts of linears, under their own names or as blocks, or adapters of the linears into
    latents alone; or stacks of experts with one matrix each on the hidden side, and several on the other. Of files
    expert by expert, which have both layouts, only the header can tell it.
    """
    shapes = {name: shape for name, shape in shapes.items() if shape}  # a scalar is refused when tensors are read
    if (of_linears := _layout_of_linears(shapes, rank)) is not None:
        return of_linears
    if EXPERT_MATRICES in header:
        return "service"
    stacks = {name: shape for name, shape in shapes.items() if is_stack(name) and 0 not in shape}
    if not stacks:
        return "own" if any(map(expert_stack, shapes)) else None
    return "service" if all((shape[0] == 1) == is_on_hidden_side(name) for name, shape in stacks.items()) else "own"


def _layout_of_linears(shapes: Mapping[str, Sequence[int]], rank: int) -> Layout | None:
    ranks: dict[str, int] = {}
    for name, shape in shapes.items():
        module, _, half = name.rpartition(".lora_")
        if half == "A.weight" and isinstance(shape[0], int):
            ranks[module.rpartition(".")[2]] = shape[0]
    if _PARTS & ranks.keys() or any(ranks[name] > rank for name in _WHOLE_LINEARS & ranks.keys()):
        return "service"
    if _OF_LATENTS & ranks.keys():
        return "own" if _OUT_OF_LATENTS in ranks else "service"
    return "own" if _WHOLE_LINEARS & ranks.keys() else None
