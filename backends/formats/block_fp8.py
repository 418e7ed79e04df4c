"""Published fp8 in blocks: a scale for every 128 by 128 numbers of a matrix, in a tensor of its own beside it.

Trainer, engine and the holder of a base dequantise with the function here: so all compute with the same numbers.
They do so with each tensor as it is read, or, if the base stays in fp8, for each product. Then numbers and scales of a
matrix are one tensor of bytes, packed, which all code that hands weights on can take for a weight. Knows neither
transformers nor vLLM.

N outputs, K inputs, I and J blocks of them, B bytes of a packed matrix
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from tinker_server.backends.formats.model_files import tensor_layouts
from tinker_server.backends.kernels.cards import choices_on
from tinker_server.backends.protocol import BackendFailed

BLOCK = 128
SCALE = "_scale_inv"
"""Ending of a scale's name, behind its tensor's."""
_WEIGHT, _SCALES = "F8_E4M3", ("F32", "BF16", "F16", "F8_E8M0")
"""Types in the files."""
_METHOD = "fp8"
_BLOCKS_AT_ONCE = 8
"""Rows of blocks that are unpacked in plain torch at once: they are in float32 meanwhile."""
_FEW_ROWS, _OUTPUTS_FOR_A_ROW = 256, 64
"""Rows up to which weights are dequantised faster within the product than before it: so many, and one for each so many
outputs, since with few outputs the product does not fill a GPU (benchmarks/RESULTS.md)."""
_ALIGNED = 16
"""Bytes at a multiple of which numbers begin, by which kernels read them fastest."""
_KNOWN: dict[str, tuple[list[object], str]] = {
    "weight_block_size": ([[BLOCK, BLOCK]], "one scale for a tensor, or for other blocks, has no test here"),
    "activation_scheme": (["dynamic"], "trainer and engine compute with activations that are not rounded to fp8"),
    "fmt": (["e4m3"], "its numbers have another meaning"),
    "scale_fmt": (["float", "ue8m0"], "its scales may have another meaning"),
}
"""Fields of a config's quantization_config with the values that are supported, and the reason why no others are. Files
that do not name one mean the first, but for the block. Scales in ue8m0 are powers of two, in a byte or as a float."""


def is_in_blocks(quantisation: Mapping[str, object] | None) -> bool:
    """Return whether files are in fp8, as their config says: in blocks, if `require_known` has passed them."""
    return quantisation is not None and quantisation.get("quant_method") == _METHOD


def require_known(quantisation: Mapping[str, object], source: str) -> None:
    """Raise BackendFailed, naming the field, for weights that are quantised otherwise."""
    if not is_in_blocks(quantisation):
        method = quantisation.get("quant_method")
        raise BackendFailed(
            f"{source}: quantised weights with quantization_config.quant_method {method} are not supported: trainer and"
            f" engine dequantise {_METHOD} in blocks alone (and gpt-oss's mxfp4); serve the model's {_METHOD} files, or"
            " those in bfloat16 or float32"
        )
    for field, (known, reason) in _KNOWN.items():
        value = quantisation.get(field)
        if value not in known and (value is not None or field == "weight_block_size"):
            raise BackendFailed(
                f"{source}: quantised weights with quantization_config.{field} {value} are not supported: {reason}; it"
                f" has to be {' or '.join(map(str, known))}. Serve the model's files in bfloat16 or float32"
            )


def check_files(directory: Path, source: str) -> None:
    """Raise BackendFailed, naming the tensor, unless every tensor in fp8 has a scale for each of its blocks, and every
    scale has its tensor. Reads the files' headers."""
    layouts = tensor_layouts(directory)
    for name, (kind, shape) in sorted(layouts.items()):
        scale = layouts.get(f"{name}{SCALE}")
        wanted = [*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:])]
        fault = None
        if name.endswith(SCALE):
            if layouts.get(name.removesuffix(SCALE), ("", []))[0] != _WEIGHT:
                fault = f"is the scale of no tensor in {_WEIGHT}"
        elif kind.startswith("F8") and kind != _WEIGHT:
            fault = f"is in {kind}, and of fp8 only {_WEIGHT} is supported"
        elif kind == _WEIGHT and scale is None:
            fault = f"is in {_WEIGHT}, and {name}{SCALE} is missing"
        elif kind == _WEIGHT and scale is not None and (scale[0] not in _SCALES or scale[1] != wanted):
            fault = f"has a scale {scale[0]} {scale[1]} in place of {wanted} in {', '.join(_SCALES)}"
        if fault is not None:
            raise BackendFailed(f"{source}: {name} {fault}")


def dequantised(weight_NK: Tensor, scale_IJ: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [..., N, K]: each number times its block's scale, multiplied in float32 and rounded once. The last blocks
    have as many numbers as are left; a stack of matrices has its scales in a stack."""
    num_outputs, num_inputs = weight_NK.shape[-2:]
    scale_IK = scale_IJ.float().repeat_interleave(BLOCK, -1)[..., :num_inputs]
    scale_NK = scale_IK.repeat_interleave(BLOCK, -2)[..., :num_outputs, :]
    return weight_NK.float().mul_(scale_NK).to(dtype)


def packed_bytes(num_outputs: int, num_inputs: int) -> int:
    """Return B of a matrix."""
    return round_up(_scale_bytes(num_outputs, num_inputs)) + round_up(num_outputs * num_inputs)


def packed(weight_NK: Tensor, scale_IJ: Tensor) -> Tensor:
    """Return [B]: the scales in float32, then the numbers, each filled up with zeros."""
    scales = scale_IJ.float().contiguous().view(-1).view(torch.uint8)
    numbers = weight_NK.contiguous().view(-1).view(torch.uint8)
    return torch.cat([_pad(scales), _pad(numbers)])


def unpack(weight_B: Tensor, found_NK: Tensor) -> Tensor:
    """Write the dequantised matrix to `found_NK`, which is contiguous, and return it."""
    numbers_NK, scale_IJ = halves(weight_B, *found_NK.shape)
    if has_kernel(found_NK.device):
        from tinker_server.backends.kernels.fp8 import dequantise

        return dequantise(numbers_NK, scale_IJ, BLOCK, found_NK)
    for first in range(0, len(scale_IJ), _BLOCKS_AT_ONCE):
        rows = slice(first * BLOCK, (first + _BLOCKS_AT_ONCE) * BLOCK)
        scale = scale_IJ[first : first + _BLOCKS_AT_ONCE]
        found_NK[rows] = dequantised(numbers_NK[rows], scale, found_NK.dtype)
    return found_NK


def multiplies(x_MK: Tensor, num_outputs: int) -> bool:
    """Return whether `multiply` has a kernel there that is faster than `unpack` and a product."""
    return len(x_MK) <= min(_FEW_ROWS, num_outputs // _OUTPUTS_FOR_A_ROW) and has_kernel(x_MK.device)


def multiply(x_MK: Tensor, weight_B: Tensor, found_MN: Tensor) -> None:
    """Write x W^T to `found_MN`, whose rows may have a gap between them; W is the dequantised matrix."""
    from tinker_server.backends.kernels.fp8 import product

    numbers_NK, scale_IJ = halves(weight_B, found_MN.shape[1], x_MK.shape[1])
    product(x_MK.contiguous(), numbers_NK, scale_IJ, BLOCK, found_MN)


def require_kernel(device: torch.device) -> None:
    """Raise BackendFailed if experts in fp8 cannot be multiplied on a device without a wait for it."""
    if device.type == "cuda" and not has_kernel(device):
        raise BackendFailed(
            "base_precision fp8 (setting backend.base_precision) is not supported with experts on"
            f" {torch.cuda.get_device_name(device)}: Triton converts fp8 from compute capability 8.9 on; leave it out"
        )


def has_kernel(device: torch.device) -> bool:
    """Return whether kernels of our own read fp8 there."""
    return device.type == "cuda" and choices_on(device).kernels_for_fp8


def halves(weight_B: Tensor, num_outputs: int, num_inputs: int) -> tuple[Tensor, Tensor]:
    """Return the numbers [..., N, K] and scales [..., I, J] of a packed matrix, or of a stack of them. They share its
    memory."""
    num_scale_bytes = _scale_bytes(num_outputs, num_inputs)
    begin = round_up(num_scale_bytes)
    scale_IJ = weight_B[..., :num_scale_bytes].view(torch.float32).unflatten(-1, (-(-num_outputs // BLOCK), -1))
    numbers = weight_B[..., begin : begin + num_outputs * num_inputs].view(torch.float8_e4m3fn)
    return numbers.unflatten(-1, (num_outputs, num_inputs)), scale_IJ


def _scale_bytes(num_outputs: int, num_inputs: int) -> int:
    return 4 * -(-num_outputs // BLOCK) * -(-num_inputs // BLOCK)


def round_up(num_bytes: int) -> int:
    """Return the bytes that so many take with their padding."""
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _pad(bytes_: Tensor) -> Tensor:
    return functional.pad(bytes_, (0, round_up(len(bytes_)) - len(bytes_)))
