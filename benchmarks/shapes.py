"""Models in the shape of published ones, with random weights and a tiny model's tokenizer and processor."""

import json
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

from backends.formats.block_fp8 import BLOCK, SCALE
from tests.models import make_tiny_gpt_oss, make_tiny_of, make_tiny_qwen3_5, make_tiny_vl, transpose_experts
from tests.published import COOKBOOK, OTHERS, Config

CONTEXT = 262144
_TINY: dict[str, Callable[[Path], Path]] = {
    "qwen3_vl": make_tiny_vl,
    "qwen3_vl_moe": partial(make_tiny_vl, moe=True),
    "qwen3_5": make_tiny_qwen3_5,
    "qwen3_5_moe": partial(make_tiny_qwen3_5, moe=True),
    "gpt_oss": make_tiny_gpt_oss,
}
"""By model type; others are text alone."""
_SECTIONS = {
    "qwen3_vl": [24, 20, 20],
    "qwen3_vl_moe": [24, 20, 20],
    "qwen3_5": [11, 11, 10],
    "qwen3_5_moe": [11, 11, 10],
}
"""Pairs of a head that are rotated by time, height and width."""


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
    "qwen3.5-4b": Shape(COOKBOOK["Qwen/Qwen3.5-4B"]),
    "qwen3.5-9b": Shape(COOKBOOK["Qwen/Qwen3.5-9B"]),
    "qwen3.5-35b-a3b": Shape(COOKBOOK["Qwen/Qwen3.5-35B-A3B"]),
    "mistral-7b": Shape(OTHERS["mistralai/Mistral-7B-v0.1"]),
    "gemma-3-12b": Shape(OTHERS["google/gemma-3-12b-it, text"]),
    "gpt-oss-20b": Shape(COOKBOOK["openai/gpt-oss-20b"]),
    "8b-text": Shape(COOKBOOK["Qwen/Qwen3-8B"]),
    "70b": Shape(COOKBOOK["meta-llama/Llama-3.1-70B"]),
}


def make_model(directory: Path, shape: Shape, *, in_fp8: bool = False) -> Path:
    """Make random weights on a GPU, in bfloat16, and write them with the tiny model's tokenizer and processor.
    `in_fp8`: the linears of a dense decoder in fp8 by blocks, one after the other, so that a GPU never has them all."""
    make_tiny = _TINY.get(shape.model_type) or partial(make_tiny_of, shape.model_type)
    make_tiny(directory)
    written = json.loads((directory / "config.json").read_text())
    ids = {name: value for name, value in {**written.get("text_config", {}), **written}.items() if "token_id" in name}
    for old in directory.glob("*.safetensors*"):
        old.unlink()
    config = shape._known(ids)
    if in_fp8:
        return _write_fp8(directory, config)
    with torch.device("cuda", 0):
        model: PreTrainedModel = _class_of(config).from_config(config, dtype=torch.bfloat16)
    # Random layers of linear attention make rounding large: each adds less to the stream, as in GPT-2's start.
    is_small = "linear_attention" in (getattr(config.get_text_config(), "layer_types", None) or [])
    part = (2 * config.get_text_config().num_hidden_layers) ** -0.5 if is_small else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                inputs = parameter.shape[-1] if parameter.dim() == 3 else parameter[0].numel()
                adds = ".layers." in name and name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight"))
                parameter.normal_(0, inputs**-0.5 * (part if adds else 1.0))
    model.save_pretrained(directory)
    if shape.model_type == "qwen3_vl_moe":
        transpose_experts(directory)
    return directory


def _write_fp8(directory: Path, config: PretrainedConfig) -> Path:
    with torch.device("meta"):
        model: PreTrainedModel = _class_of(config).from_config(config, dtype=torch.bfloat16)
    model.config.save_pretrained(directory)
    path = directory / "config.json"
    quantised = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    written = {
        **json.loads(path.read_text()),
        "architectures": [type(model).__name__],
        "quantization_config": quantised,
    }
    path.write_text(json.dumps(written))
    files: dict[str, str] = {}
    for number, layer in enumerate([*model.get_decoder().layers, None]):
        parts = dict(_random_fp8(model, layer))
        name = f"model-{number:05}.safetensors"
        save_file(parts, directory / name, {"format": "pt"})
        files |= dict.fromkeys(parts, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return directory


def _random_fp8(model: PreTrainedModel, layer: nn.Module | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the random tensors of a layer of the decoder, or of all that is in none."""
    inside = {id(one) for each in model.get_decoder().layers for one in each.parameters()}
    chosen = {id(one) for one in layer.parameters()} if layer is not None else set()
    for name, one in model.named_parameters():
        if (id(one) not in chosen) if layer is not None else (id(one) in inside):
            continue
        if one.dim() == 1:
            yield name, torch.ones(one.shape, dtype=torch.bfloat16)
            continue
        made = torch.randn(one.shape, device="cuda") * one.shape[1] ** -0.5
        if layer is None:
            yield name, made.bfloat16().cpu()
            continue
        rows, columns = (size // BLOCK for size in one.shape)
        blocks = made.view(rows, BLOCK, columns, BLOCK)
        scale = blocks.abs().amax((1, 3)) / 448
        yield name, (blocks / scale[:, None, :, None]).view(one.shape).to(torch.float8_e4m3fn).cpu()
        yield f"{name}{SCALE}", scale.cpu()


def _class_of(config: PretrainedConfig) -> Any:
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def _experts(text: PretrainedConfig) -> int:
    return getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0
