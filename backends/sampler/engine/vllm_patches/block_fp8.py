"""Weights in fp8, with the trainer's numbers: vLLM's own fp8 rounds activations too, and has no path on the CPU.

They are dequantised as vLLM reads them. Where the base stays in fp8, linears of the decoder have packed weights, and
dequantise them for each product or, where tokens are few, within it (`formats/block_fp8.py`). Files that are not in fp8
are quantised as vLLM reads them (`formats/fp8_at_load.py`). Of an engine of several ranks each has its part of a
linear, packed (`formats/divided_fp8.py`).

N outputs and K inputs of a linear, B bytes
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.config import ModelConfig
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.utils import is_weights_pre_processed

from tinker_server.backends.formats.block_fp8 import multiplies, multiply, packed_bytes, unpack
from tinker_server.backends.formats.divided_fp8 import copy_part, count_rows, rows_of_rank
from tinker_server.backends.formats.expert_names import expert_matrices, expert_matrix
from tinker_server.backends.formats.fp8_at_load import find_origins, pack_at_load
from tinker_server.backends.formats.model_files import tensor_layouts
from tinker_server.backends.formats.packed import joined
from tinker_server.backends.sampler.engine.vllm_patches import targets
from tinker_server.backends.sampler.engine.vllm_patches.packed_experts import PackedExpertsMethod

Weights = Iterator[tuple[str, Tensor]]
METHOD = "tinker_packed"
_TENSORS, _EXPERTS = "tensors", "experts"
_QUERIES = ("q", "k", "v")
"""As vLLM numbers the parts of a linear of queries, keys and values; those of others are counted."""
_MLP = {"gate_up_proj": ["gate_proj", "up_proj"]}
"""What vLLM joins in dense layers of mixtures, which it says too late."""
_TOWER = "vision"
"""In vLLM's names of all vision towers that have their layers in `layers`."""
_JOINED = {"in_proj_qkvz": (3, 1)}
"""Numbers of vLLM's parts of a linear that each of the files' tensors has, where it has several. Some kinds of
models have a single tensor for a linear of this name."""


def make_quantization_config(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    """Return the quantization_config of a model whose tensors of these names stay packed. Experts in fp8 are counted,
    since vLLM logs it."""
    matrices = {name: expert_matrix(name) for name in shapes}
    experts = Counter(found[0] for found in matrices.values() if found is not None and found[2] == "gate")
    others = sorted(name for name, found in matrices.items() if found is None)
    return {"quant_method": METHOD, _TENSORS: others, _EXPERTS: dict(experts)}


def staying(config: ModelConfig) -> Collection[str]:
    """Return the names of a model's tensors that stay packed."""
    found: Mapping[str, Any] | None = getattr(config.hf_config, "quantization_config", None)
    return _names(found) if found is not None and found.get("quant_method") == METHOD else ()


def _names(config: Mapping[str, Any]) -> set[str]:
    experts = (name for module, count in config[_EXPERTS].items() for name in expert_matrices(module, (count, 0, 0)))
    return {*config[_TENSORS], *experts}


@register_quantization_config(METHOD)
class PackedFp8(QuantizationConfig):  # type: ignore[misc]
    """Has linears and experts of the decoder keep packed weights."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._staying = {_key(name.removesuffix(".weight")) for name in names}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "PackedFp8":
        """Make it of a model's quantization_config."""
        return cls(_names(config))

    def get_name(self) -> str:
        """Return the name by which vLLM knows it."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the types of activations."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the least compute capability, which is that of bfloat16."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return the files with such a config beside config.json: none."""
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return how a layer computes; None for those that compute as without quantisation."""
        if isinstance(layer, RoutedExperts):
            names = {"fp8": f"{_key(prefix)}.0.gate_proj", "mxfp4": f"{_key(prefix)}.gate_up_proj"}
            formats = [precision for precision, name in names.items() if name in self._staying]
            return PackedExpertsMethod(layer.moe_config, is_in_mxfp4="mxfp4" in formats) if formats else None
        if not isinstance(layer, LinearBase):
            return None
        stem, _, last = _key(prefix).rpartition(".")
        mapping = _MLP | self.packed_modules_mapping
        parts = [f"{stem}.{part}" in self._staying for part in mapping.get(last, [last])]
        joined_parts = _JOINED.get(last) if len(parts) > 1 else None
        return PackedLinearMethod(parts, joined_parts) if any(parts) else UnquantizedLinearMethod()


def _key(name: str) -> str:
    """Return a name of the decoder's from the number of its layer on: vLLM calls what is before otherwise than the
    files. Return "" for what is in no layer of the decoder: a vision tower may have layers of the same names."""
    root, _, key = name.partition("layers.")
    return "" if _TOWER in root else key


class PackedLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """A linear whose weight is the bytes of its parts, one behind the other: packed, or as numbers where the file has
    no fp8."""

    supports_pre_processed_weights = True

    def __init__(self, is_packed: Sequence[bool], joined_parts: Sequence[int] | None = None) -> None:
        """`is_packed` is of each tensor of the files, which has so many of vLLM's parts; by default all have one."""
        self._is_packed = is_packed
        self._first_parts = [0, *accumulate(joined_parts or [1] * len(is_packed))]
        self._parts: list[list[int]] = []
        """Outputs on this rank of each of vLLM's parts of each tensor."""
        self._columns = torch.empty(0, dtype=torch.long, device="cpu")
        """The inputs on this rank."""
        self._whole_inputs = 0
        self._ranks = 0, 1
        self._missing: set[int] = set()

    def create_weights(  # noqa: PLR0913 - as vLLM calls it
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: object,
    ) -> None:
        """Give the layer its weight. Raises ValueError for a layer whose parts are not those of the files."""
        assert isinstance(layer, LinearBase)
        self._ranks = layer.tp_rank, layer.tp_size
        sizes = list(output_partition_sizes)
        if len(self._is_packed) == 1:  # files may have a linear of several parts as one tensor
            self._first_parts = [0, len(sizes)]
        if len(sizes) != self._first_parts[-1]:
            raise ValueError(f"{len(sizes)} parts of a linear, and {self._first_parts[-1]} in the files")
        self._parts = [sizes[begin:end] for begin, end in pairwise(self._first_parts)]
        self._columns = rows_of_rank([input_size_per_partition], input_size, *self._ranks)
        self._whole_inputs, self._dtype = input_size, params_dtype
        self._missing = set(range(len(self._outputs)))
        weight = nn.Parameter(torch.empty(sum(self._sizes()), dtype=torch.uint8), requires_grad=False)
        weight.weight_loader = self._load  # type: ignore[attr-defined]
        layer.register_parameter("weight", weight)

    @property
    def _inputs(self) -> int:
        return len(self._columns)

    @property
    def _outputs(self) -> list[int]:
        return [sum(sizes) for sizes in self._parts]

    def _sizes(self) -> list[int]:
        """Return the bytes of each tensor's part."""
        plain = self._inputs * self._dtype.itemsize
        return [
            packed_bytes(outputs, self._inputs) if is_packed else outputs * plain
            for outputs, is_packed in zip(self._outputs, self._is_packed, strict=True)
        ]

    def _load(self, weight_B: Tensor, loaded: Tensor, part: str | int | tuple[int, ...] | None = None) -> None:
        """Copy a tensor of the files. Raises ValueError for one that does not fit."""
        first = part[0] if isinstance(part, tuple) else _QUERIES.index(part) if isinstance(part, str) else part or 0
        number = self._first_parts.index(first)
        if part is None and len(self._outputs) > 1:
            raise ValueError("a tensor in fp8 of several linears; start without --base-precision")
        self._copy_part(loaded, number, weight_B.data.split(self._sizes())[number])
        self._missing.discard(number)

    def _copy_part(self, loaded: Tensor, number: int, target_B: Tensor) -> None:
        """Copy the bytes of this rank's part of a tensor of the files."""
        num_rows, is_packed = self._outputs[number], self._is_packed[number]
        shape = len(loaded), self._whole_inputs
        if is_packed:
            shape = count_rows(len(loaded), num_rows, self._whole_inputs, self._ranks[1]), self._whole_inputs
        rows = rows_of_rank(self._parts[number], shape[0], *self._ranks)
        if not is_packed:
            part = loaded[rows][:, self._columns].to(self._dtype)
            target_B.copy_(part.contiguous().view(-1).view(torch.uint8))
        elif shape == (num_rows, self._inputs):
            target_B.copy_(loaded)
        else:
            copy_part(loaded, shape, rows, self._columns, target_B)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Raise ValueError if a part was never loaded."""
        assert isinstance(layer.weight, Tensor)
        if self._missing and not layer.weight.is_meta and not is_weights_pre_processed():
            raise ValueError(f"parts {sorted(self._missing)} of a linear in fp8 are missing in the files")

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map [..., K] to [..., N]."""
        weight_B = layer.weight
        assert isinstance(weight_B, Tensor)
        parts_B = weight_B.split(self._sizes())
        x_MK, num_outputs = x.reshape(-1, self._inputs), sum(self._outputs)
        if all(self._is_packed) and multiplies(x_MK, num_outputs):
            found_MN = x.new_empty(len(x_MK), num_outputs)
            for bytes_, part_MN in zip(parts_B, found_MN.split(self._outputs, dim=1), strict=True):
                multiply(x_MK, bytes_, part_MN)
            found = found_MN.view(*x.shape[:-1], -1)
            return found if bias is None else found + bias
        whole_NK = x.new_empty(num_outputs, self._inputs)
        for bytes_, part_NK, is_packed in zip(parts_B, whole_NK.split(self._outputs), self._is_packed, strict=True):
            if is_packed:
                unpack(bytes_, part_NK)
            else:
                part_NK.copy_(bytes_.view(self._dtype).view(part_NK.shape))
        return functional.linear(x, whole_NK, bias)


def _joining(read: Callable[..., Weights]) -> Callable[..., Weights]:
    def get_all_weights(self: DefaultModelLoader, model_config: ModelConfig, model: nn.Module) -> Weights:
        weights, names = read(self, model_config, model), staying(model_config)
        if names:
            weights = pack_at_load(weights, find_origins(tensor_layouts(Path(model_config.model)), names))
        return joined(weights, model_config.dtype, names)

    return get_all_weights


def read_fp8() -> None:
    """Apply the change, once, before a model is loaded."""
    targets.READ_WEIGHTS.replace(_joining(DefaultModelLoader.get_all_weights))
