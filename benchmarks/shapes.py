"""Models in the shape of published ones, with random weights and a tiny model's tokenizer and processor."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from tests.models import make_tiny_gpt_oss, make_tiny_of, make_tiny_qwen3_5, make_tiny_vl
from tests.published import COOKBOOK, OTHERS, Config
from tinker_server.backends.families.lora_names import NOT_IN_FP8
from tinker_server.backends.formats import mxfp4
from tinker_server.backends.formats.block_fp8 import BLOCK, SCALE
from tinker_server.backends.model_spec import BasePrecision

CONTEXT = 262144
_TINY: dict[str, Callable[[Path], Path]] = {
    "qwen3_vl": make_tiny_vl,
    "qwen3_vl_moe": partial(make_tiny_vl, moe=True),
    "qwen3_5": make_tiny_qwen3_5,
    "qwen3_5_moe": partial(make_tiny_qwen3_5, moe=True),
    "gpt_oss": make_tiny_gpt_oss,
}
"""By model type; others are text alone."""
_AS_IN_MEMORY = ("llama", "qwen3", "qwen3_vl", "qwen3_vl_moe")
"""Model types whose files name tensors as the model in memory does."""
_SECTIONS = {
    "qwen3_vl": [24, 20, 20],
    "qwen3_vl_moe": [24, 20, 20],
    "qwen3_5": [11, 11, 10],
    "qwen3_5_moe": [11, 11, 10],
}
"""Pairs of a head that are rotated by time, height and width."""
_STORED = {
    "fp8": {
        **{"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
        "modules_to_not_convert": ["lm_head", "model.visual"],
    },
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
}
"""What a config says of files in a precision."""
_NOT_IN_FP8 = (*NOT_IN_FP8, "mlp.gate", "mlp.shared_expert_gate")
"""Ends of the names of matrices that files in fp8 have in bfloat16."""
_EXPONENTS = 118, 121
"""Of blocks in MXFP4: random numbers of four bits then have about the size of weights of 2,880 inputs."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    config: Config
    """As its config.json has them."""
    num_layers: int | None = None
    """Of the decoder; None: all of them."""

    @property
    def model_type(self) -> str:
        """Return the config's name."""
        found: str = self.config["model_type"]
        return found

    @cached_property
    def known(self) -> PretrainedConfig:
        """Return the config, as transformers has it."""
        return self._known({})

    @cached_property
    def num_parameters(self) -> int:
        """Count the parameters of the linears that a token of text passes, with the head."""
        with torch.device("meta"):
            model = _class_of(self.known).from_config(self.known)
        text = self.known.get_text_config()
        linears = [one for one in model.get_decoder().modules() if isinstance(one, nn.Linear)]
        total = sum(one.weight.numel() for one in linears) + model.get_output_embeddings().weight.numel()
        stacks = [one for one in model.get_decoder().parameters() if one.dim() == 3 and one.shape[0] == _experts(text)]
        return int(total + sum(one.numel() // one.shape[0] * text.num_experts_per_tok for one in stacks))

    def flops(self, lengths: Sequence[int]) -> float:
        """Count the operations of forward and backward of samples, as `gpu.py` says; a layer of linear attention has
        those of its linears alone."""
        text = self.known.get_text_config()
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        seen = 0.0
        for kind in kinds:
            if kind == "full_attention":
                seen += sum(n * n / 2 for n in lengths)
            elif kind == "sliding_attention":
                windows = [min(n, text.sliding_window) for n in lengths]
                seen += sum(n * w - w * w / 2 for n, w in zip(lengths, windows, strict=True))
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return float(4 * self.num_parameters * sum(lengths) + 3.5 * 4 * seen * text.num_attention_heads * size)

    def _known(self, ids: Mapping[str, Any]) -> PretrainedConfig:
        """`ids`: the tokens of a tokenizer, by their names in a config."""
        given = {name: value for name, value in self.config.items() if name != "quantization_config"}
        is_nested = "text_config" in given
        text = {**(given["text_config"] if is_nested else given), "max_position_embeddings": CONTEXT}
        if self.num_layers is not None:
            text["num_hidden_layers"] = self.num_layers
        if self.model_type in _SECTIONS:
            rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
            part = {"partial_rotary_factor": 0.25} if "qwen3_5" in self.model_type else {}
            text["rope_parameters"] = {**rope, **part, "mrope_section": _SECTIONS[self.model_type]}
        if not is_nested:
            return AutoConfig.for_model(**{**text, **ids})
        text |= {name: value for name, value in ids.items() if name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        return AutoConfig.for_model(**{**given, "text_config": text, **ids})


SHAPES = {
    "4b": Shape(OTHERS["Qwen/Qwen3-VL-4B-Instruct"]),
    "8b": Shape(OTHERS["Qwen/Qwen3-VL-8B-Instruct"]),
    "32b": Shape(OTHERS["Qwen/Qwen3-VL-32B-Instruct"]),
    "30b-a3b": Shape(COOKBOOK["Qwen/Qwen3-VL-30B-A3B-Instruct"]),
    "235b-a22b": Shape(COOKBOOK["Qwen/Qwen3-VL-235B-A22B-Instruct"]),
    "qwen3.5-4b": Shape(COOKBOOK["Qwen/Qwen3.5-4B"]),
    "qwen3.5-9b": Shape(COOKBOOK["Qwen/Qwen3.5-9B"]),
    "qwen3.5-27b": Shape(COOKBOOK["Qwen/Qwen3.5-27B"]),
    "qwen3.5-35b-a3b": Shape(COOKBOOK["Qwen/Qwen3.5-35B-A3B"]),
    "qwen3.5-397b-a17b": Shape(COOKBOOK["Qwen/Qwen3.5-397B-A17B"]),
    "mistral-7b": Shape(OTHERS["mistralai/Mistral-7B-v0.1"]),
    "gemma-3-12b": Shape(OTHERS["google/gemma-3-12b-it, text"]),
    "gpt-oss-20b": Shape(COOKBOOK["openai/gpt-oss-20b"]),
    "gpt-oss-120b": Shape(COOKBOOK["openai/gpt-oss-120b"]),
    "3b-text": Shape(COOKBOOK["meta-llama/Llama-3.2-3B"]),
    "8b-text": Shape(COOKBOOK["Qwen/Qwen3-8B"]),
    "70b": Shape(COOKBOOK["meta-llama/Llama-3.1-70B"]),
}


def make_model(directory: Path, shape: Shape, *, precision: BasePrecision | None = None) -> Path:
    """Make random weights on a GPU, in bfloat16, and write them with the tiny model's tokenizer and processor.

    `precision`: that of the linears of a dense decoder (fp8, by blocks), or of gpt-oss's experts (MXFP4). These, and
    kinds of `_AS_IN_MEMORY`, are made and written layer by layer, so that neither the GPU nor main memory has all of
    them.
    """
    make_tiny = _TINY.get(shape.model_type) or partial(make_tiny_of, shape.model_type)
    make_tiny(directory)
    written = json.loads((directory / "config.json").read_text())
    ids = {name: value for name, value in {**written.get("text_config", {}), **written}.items() if "token_id" in name}
    for old in directory.glob("*.safetensors*"):
        old.unlink()
    config = shape._known(ids)
    if precision or config.model_type in _AS_IN_MEMORY:
        return _write_layers(directory, config, precision)
    with torch.device("cuda", 0):
        model: PreTrainedModel = _class_of(config).from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, _inputs(parameter) ** -0.5 * _part(name, config))
    model.save_pretrained(directory, max_shard_size="4GB")  # main memory has a file at once
    return directory


def _inputs(parameter: Tensor) -> int:
    """Return the numbers by which an output is computed."""
    return parameter.shape[-1] if parameter.dim() == 3 else parameter[0].numel()


def _part(name: str, config: PretrainedConfig) -> float:
    """Return the part of its usual size that a random weight has.

    Random layers of linear attention make rounding large, and those of gpt-oss, where rounding chooses other experts:
    each adds less to the stream, as in GPT-2's start, and the stream begins at the size to which they add, where no
    head shares the embedding.
    """
    text = config.get_text_config()
    if text.model_type != "gpt_oss" and not _is_hybrid(text):
        return 1.0
    if name.endswith("embed_tokens.weight") and not config.tie_word_embeddings:
        return float(text.hidden_size**0.5)
    adds = re.search(r"\.layers\..*(out_proj|o_proj|down_proj)(\.weight|_bias)?$", name)
    return (2 * text.num_hidden_layers) ** -0.5 if adds else 1.0


def _write_layers(directory: Path, config: PretrainedConfig, precision: BasePrecision | None) -> Path:
    with torch.device("meta"):
        model: PreTrainedModel = _class_of(config).from_config(config, dtype=torch.bfloat16)
    model.config.save_pretrained(directory)
    path = directory / "config.json"
    written = {**json.loads(path.read_text()), "architectures": [type(model).__name__]}
    if precision:
        written["quantization_config"] = _STORED[precision]
    path.write_text(json.dumps(written))
    layers = model.get_decoder().layers
    inside = {id(one): number for number, layer in enumerate(layers) for one in layer.parameters()}
    groups: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(inside.get(id(parameter), len(layers)), []).append((name, parameter))
    files: dict[str, str] = {}
    for number, parameters in groups.items():
        tensors: dict[str, Tensor] = {}
        for name, parameter in parameters:
            tensors |= _random(name, parameter, precision if number < len(layers) else None, config)
        save_file(tensors, directory / f"model-{number:05}.safetensors", {"format": "pt"})
        files |= dict.fromkeys(tensors, f"model-{number:05}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return directory


def _random(
    name: str, parameter: nn.Parameter, precision: BasePrecision | None, config: PretrainedConfig
) -> dict[str, Tensor]:
    """Return what a file has of a random parameter. In MXFP4 a weight has the power of two next to its size."""
    part = _part(name, config)
    if parameter.dim() == 1:
        # Qwen3.5's norms multiply by 1 + their weight.
        adds_one = _is_hybrid(config.get_text_config()) and name.endswith("norm.weight")
        is_zero = name.endswith("bias") or (adds_one and ".linear_attn." not in name and ".visual." not in name)
        return {name: torch.full(parameter.shape, 0.0 if is_zero else 1.0, dtype=torch.bfloat16)}
    if precision == "mxfp4" and parameter.dim() == 3:
        count, inputs, outputs = parameter.shape
        low, high = (exponent + round(math.log2(part)) for exponent in _EXPONENTS)
        scales = torch.randint(low, high, (count, outputs, inputs // mxfp4.BLOCK), dtype=torch.uint8, device="cuda")
        blocks = torch.randint(0, 256, (*scales.shape, mxfp4.BLOCK // 2), dtype=torch.uint8, device="cuda")
        return {f"{name}{mxfp4.BLOCKS}": blocks.cpu(), f"{name}{mxfp4.SCALES}": scales.cpu()}
    made = torch.randn(parameter.shape, device="cuda", dtype=torch.bfloat16) * (_inputs(parameter) ** -0.5 * part)
    is_kept = parameter.dim() == 3 and ".experts." not in name
    if precision != "fp8" or is_kept or name.removesuffix(".weight").endswith(_NOT_IN_FP8):
        # Files of Qwen3-VL MoE hold inputs before outputs.
        return {name: (made if is_kept or parameter.dim() != 3 else made.mT.contiguous()).cpu()}
    rows, columns = (size // BLOCK for size in parameter.shape[-2:])
    blocks = made.float().view(-1, rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((2, 4)) / 448
    packed = (blocks / scale[:, :, None, :, None]).to(torch.float8_e4m3fn)
    weight, scale = packed.view(-1, *parameter.shape[-2:]).cpu(), scale.cpu()
    if parameter.dim() == 2:
        return {name: weight[0], f"{name}{SCALE}": scale[0]}
    return {
        f"{module}.weight{suffix}": matrix
        for suffix, stack in (("", weight), (SCALE, scale))
        for module, matrix in _matrices(name, stack)
    }


def _matrices(name: str, stack: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield experts' matrices and their modules' names, as files in fp8 have them."""
    experts, _, last = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    for number, matrices in enumerate(stack):
        for part, matrix in zip(parts, matrices.chunk(len(parts)), strict=True):
            yield f"{experts}.{number}.{part}", matrix


def _class_of(config: PretrainedConfig) -> Any:
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def _is_hybrid(text: PretrainedConfig) -> bool:
    return "linear_attention" in (getattr(text, "layer_types", None) or [])


def _experts(text: PretrainedConfig) -> int:
    return getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0
