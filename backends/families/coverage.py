"""Check that LoRA reaches every weight it could: a model of which it would silently train a part is refused."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from tinker_server.api_schemas.training import Layout
from tinker_server.backends.families.family import Family
from tinker_server.backends.families.lora_names import (
    NOT_IN_FP8,
    find_trained_modules,
    has_stacked_experts,
    service_adapters,
)
from tinker_server.backends.formats import mxfp4
from tinker_server.backends.formats.block_fp8 import SCALE
from tinker_server.backends.formats.expert_names import expert_matrices
from tinker_server.backends.formats.fp8_at_load import find_origins
from tinker_server.backends.formats.model_files import quantisation, tensor_layouts
from tinker_server.backends.model_spec import BasePrecision
from tinker_server.backends.protocol import BackendFailed


@dataclass(frozen=True)
class LoraMatrices:
    """Matrices of the same name and shape that take LoRA."""

    name: str
    """Last part of their module's name; `experts` for all those of a mixture."""
    count: int
    outputs: int
    inputs: int
    in_tower: bool = False


@dataclass(frozen=True)
class Numbers:
    """Counts of the numbers in a model's tensors."""

    base: int
    """Numbers of the whole base, a tied head once."""
    tower: int
    """Those of them that are neither in the decoder nor in the head: the vision tower with its projector."""
    matrices: tuple[LoraMatrices, ...]
    """The matrices of an adapter that trains all modules."""
    all_gathered: int
    """Numbers of a sharded base that ranks all-gather at once: all but the layers, and two layers."""
    more_of_own: int = 0
    """Numbers per LoRA rank that an adapter of the layout `own` has and of `service` has not: of factors that experts
    share all but the first expert's, and what linears have less."""
    divides_linears: bool = False
    """True if `service` has adapters of some rows of a linear, or leaves linears out."""
    more_of_blocks: int = 0
    """Numbers per LoRA rank that PEFT's form of a `service` adapter has beside those of `own`: in the blocks of linears
    with adapters of some rows."""

    num_experts: int = 0
    """Experts of a layer."""

    @cached_property
    def adapter(self) -> int:
        """Numbers of an adapter that trains all modules, per LoRA rank, if each expert has its own."""
        return sum(matrix.count * (matrix.outputs + matrix.inputs) for matrix in self.matrices)

    @property
    def has_layouts(self) -> bool:
        """True if adapters of both layouts differ."""
        return self.divides_linears or self.more_of_own > 0

    def of_layout(self, layout: Layout) -> int:
        """Return the same of an adapter of this layout."""
        return self.adapter - (self.more_of_own if layout == "service" else 0)

    @property
    def largest_file(self) -> int:
        """Numbers per LoRA rank of an adapter's largest form in files."""
        return self.adapter + self.more_of_blocks


@dataclass(frozen=True)
class ImageToken:
    """Bytes that a token of an image takes, by estimate but for pixels and features."""

    pixels: int
    """Decoded, a byte for each channel."""
    features: int
    """What the tower gives for it."""
    forward: int
    """In a call of the tower without a gradient, at its peak."""
    backward: int
    """Saved in a call of the tower for its backward."""


def check_coverage(family: Family, config: PretrainedConfig, source: str, *, train_vision: bool = False) -> Numbers:
    """Refuse a model unless every weight matrix is trained by exactly 1 flag, or frozen by its family.

    `train_vision`: the server's setting. Builds the model of `config` without memory for its weights. Raises
    BackendFailed with the weights' names.
    """
    model = _without_memory(family, config, source)
    groups = find_trained_modules(family, model, train_vision=train_vision)
    modules = [name for names in groups.values() for name in names]
    twice = {name for name in modules if modules.count(name) > 1}
    missing = list(find_untrained(model, modules, _frozen(family, source, train_vision=train_vision)))
    if missing or twice:
        left_out = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in [*missing, *twice])
        raise BackendFailed(
            f"{source}: {type(model).__name__} is not supported: LoRA would leave out {', '.join(left_out)}"
        )
    counts: Counter[tuple[str, int, int, bool]] = Counter()
    for name in modules:
        for count, outputs, inputs in _matrices(dict(model.get_submodule(name).named_parameters())):
            counts[name.rpartition(".")[2], outputs, inputs, name in groups.get("train_vision", ())] += count
    matrices = tuple(
        LoraMatrices(name, count, outputs, inputs, of_tower)
        for (name, outputs, inputs, of_tower), count in counts.items()
    )
    layers = [_count(layer) for layer in model.get_decoder().layers]
    all_gathered = _count(model) - sum(layers) + 2 * max(layers)
    text = nn.ModuleList([model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()])
    differences = _compare_layouts(model, modules)
    num_experts = max((len(module.down_proj) for module in model.modules() if has_stacked_experts(module)), default=0)
    return Numbers(_count(model), _count(model) - _count(text), matrices, all_gathered, *differences, num_experts)


def _compare_layouts(model: PreTrainedModel, modules: Iterable[str]) -> tuple[int, bool, int]:
    """Return `more_of_own`, `divides_linears` and `more_of_blocks` of `Numbers`."""
    hidden, more_of_own, divides_linears = model.config.get_text_config().hidden_size, 0, False
    more_of_blocks = 0
    for name in modules:
        module = model.get_submodule(name)
        parts = service_adapters(model, name) if isinstance(module, nn.Linear) else None
        for count, outputs, inputs in _matrices(dict(module.named_parameters())):
            if has_stacked_experts(module):
                more_of_own += hidden * (count - count // len(module.down_proj))
            if parts is not None:
                divides_linears = True
                more_of_own += outputs + inputs - sum(inputs + len(rows) for rows in parts.values())
                more_of_blocks += max(0, len(parts) - 1) * (outputs + inputs)
    return more_of_own, divides_linears, more_of_blocks


def decoder_matrices(family: Family, config: PretrainedConfig, source: str) -> dict[str, dict[str, tuple[int, int]]]:
    """Return the matrices of each of the decoder's linears and mixtures, but for the head, by the module's name: names
    as files have a linear's weight, or experts that are not in stacks, with outputs and inputs."""
    model = _without_memory(family, config, source)
    groups = family.lora_modules(model)
    modules = {name: model.get_submodule(name) for name in [*groups["train_attn"], *groups["train_mlp"]]}
    found = {}
    for name, module in modules.items():
        if isinstance(module, nn.Linear):
            found[name] = {f"{name}.weight": (module.out_features, module.in_features)}
        elif has_stacked_experts(module) and "gate_up_proj" in dict(module.named_parameters()):
            count, hidden, inner = module.down_proj.shape
            found[name] = expert_matrices(name, (count, hidden, inner))
    return found


def find_packed(
    family: Family, config: PretrainedConfig, directory: str, precision: BasePrecision
) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the decoder's weights that trainer and engine have in this precision: matrices in
    fp8, or stacks of experts in MXFP4 [E, N, K], whose two tensors in the files have endings behind these names.
    Raises BackendFailed if there are none."""
    if precision == "fp8":
        return {**fp8_matrices(family, config, directory)}
    layouts = tensor_layouts(Path(directory))
    stacks = {name.removesuffix(mxfp4.BLOCKS): shape for name, (_, shape) in layouts.items() if mxfp4.BLOCKS in name}
    found: dict[str, tuple[int, ...]] = {
        name: (*shape[:2], shape[2] * mxfp4.BLOCK)
        for name, shape in sorted(stacks.items())
        if f"{name}{mxfp4.SCALES}" in layouts
    }
    if not found:
        raise BackendFailed(f"{directory}: the files have no experts in mxfp4; start without --base-precision")
    return found


def fp8_matrices(family: Family, config: PretrainedConfig, directory: str) -> dict[str, tuple[int, int]]:
    """Return the names and shapes of the decoder's weights that trainer and engine have in fp8, a layer's experts all
    or none: those that are in fp8 in the files, in a tensor of their own name. Of files that are not quantised, all
    that have such a tensor or are in a stack of experts, but for gates of linear attention, as in published fp8 files.
    Raises BackendFailed if there are none."""
    layouts = tensor_layouts(Path(directory))
    is_made = quantisation(config) is None
    found: dict[str, tuple[int, int]] = {}
    for module, matrices in decoder_matrices(family, config, directory).items():
        if is_made:
            origins = find_origins(layouts, matrices)
            shapes = {name: origin.shape for name, origin in origins.items()}
            stays = shapes == matrices and module.rpartition(".")[2] not in NOT_IN_FP8
        else:
            stays = all(f"{name}{SCALE}" in layouts for name in matrices)
        found |= matrices if stays else {}
    if not found:
        raise BackendFailed(
            f"{directory}: the files have no matrix of the decoder {'' if is_made else 'in fp8 '}in a tensor of its own"
            " name; start without --base-precision"
        )
    return found


def image_token(config: PretrainedConfig, number_bytes: int) -> ImageToken | None:
    """Return what a token of an image takes, of a tower whose layers are those of a vision transformer (ViT,
    arXiv:2010.11929). None without a tower."""
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return None
    side = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
    pixels = 3 * side**2
    values = pixels * getattr(vision, "temporal_patch_size", 1)
    merged = int(getattr(vision, "spatial_merge_size", 0) or getattr(config, "scale_factor", 2)) ** 2
    if (per_image := getattr(config, "mm_tokens_per_image", 0)) > 0:
        merged = (vision.image_size // vision.patch_size) ** 2 // per_image
    taps = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    features = (1 + taps) * config.get_text_config().hidden_size * number_bytes
    width, inner = vision.hidden_size, vision.intermediate_size
    depth = getattr(vision, "depth", None) or vision.num_hidden_layers
    is_gated = vision.hidden_act == "silu"
    # In the MLP: its input, twice, its norm, the stream, and what else the call holds, at most a stream (0.6 and 0.9
    # measured of Qwen3-VL's towers on an H200); the unscaled output where a layer scales it.
    streams = (3 if is_gated else 5) + (getattr(vision, "layer_scale_init_value", None) is not None)
    widest = streams * width + (3 if is_gated else 2) * inner
    # A layer saves inputs of norms and linears, queries, keys and values before and after rotation, and its output.
    saved = depth * ((13 if is_gated else 11) * width + (4 if is_gated else 2) * inner) + (4 + 3 * taps) * width
    return ImageToken(
        pixels=merged * pixels,
        features=features,
        forward=merged * (number_bytes * (values + widest) + values + pixels) + features,
        backward=merged * number_bytes * saved,
    )


def _matrices(parameters: Mapping[str, nn.Parameter]) -> list[tuple[int, int, int]]:
    """Return count, outputs and inputs of a module's matrices that take LoRA."""
    if "gate_up_proj" in parameters:  # two matrices of each expert joined in a tensor
        num_experts, hidden, inner = parameters["down_proj"].shape
        if parameters["gate_up_proj"].shape[1] == inner:  # gpt-oss's: inputs before outputs
            hidden, inner = inner, hidden
        return [(2 * num_experts, inner, hidden), (num_experts, hidden, inner)]
    shapes = [parameter.shape for parameter in parameters.values()]
    return [(math.prod(shape[:-2]), shape[-2], shape[-1]) for shape in shapes if len(shape) >= 2]


def _frozen(family: Family, source: str, *, train_vision: bool) -> Sequence[str]:
    if not train_vision or family.vision is None:
        return family.frozen
    tower = family.vision.lora
    if tower is None:
        raise BackendFailed(
            f"{source}: LoRA on this kind of vision tower is not supported: nobody has compared it in trainer and"
            " engine; leave the setting backend.train_vision off"
        )
    return [*(name for name in family.frozen if name != tower.root), *tower.frozen]


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _without_memory(family: Family, config: PretrainedConfig, source: str) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            return family.model_class.from_config(config)
    except Exception as error:  # noqa: BLE001 - an architecture's own code, on a config that may not suit it
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BackendFailed(f"{source}: no model that generates text can be built of its config: {reason}") from None


def find_untrained(model: PreTrainedModel, modules: Iterable[str], frozen: Iterable[str]) -> Iterator[str]:
    """Yield names of weights that multiply activations but belong neither to `modules` nor to `frozen`, which is named
    as in `Family.frozen`.

    These are linear layers, experts (3-D), and all else of two or more dimensions; not embedding tables, and not
    convolutions over time, to which LoRA does not apply.
    """
    trained = set(modules)
    patterns = [re.compile(rf"{re.escape(name)}(\..+)?".replace(r"\*", r"\d+")) for name in frozen]
    for name, module in model.named_modules():
        if name in trained or isinstance(module, nn.Embedding | nn.Conv1d):
            continue
        if any(pattern.fullmatch(name) for pattern in patterns):
            continue
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2:
                yield f"{name}.{parameter_name}"
