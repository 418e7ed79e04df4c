"""Checks that a slot of the engine holds what the adapter's files say, bitwise, whenever vLLM has filled it.

A slot that is left out, mixed up, scaled twice or filled from another adapter gives wrong numbers without an error, and
in bfloat16 too close to the right ones for any text to tell. The files are read again here, and not compared with what
vLLM keeps of them.

Slots and files each have the factors that a layer's experts share once, or one of each expert: they are compared
expert by expert.

The ranks of an engine each have a part of B's outputs in most layers, and of A's inputs in those that add up all
ranks' outputs. The sizes and the rank alone say which part, not vLLM's own slicing.

S slots, E experts (1 in other layers), R the engine's largest rank, r the adapter's, I inputs, O outputs
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.lora.layers import BaseLayerWithLoRA, FusedMoEWithLoRA
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

from tinker_server.backends.families.linear_attention import engine_slices
from tinker_server.backends.families.lora_names import EXPERT_STACKS
from tinker_server.backends.formats.stacked_adapters import open_adapter
from tinker_server.backends.names import join_names
from tinker_server.backends.protocol import ADAPTER_FILE
from tinker_server.backends.sampler.engine.vllm_patches.linear_by_heads import LinearByHeads, rows_of

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager

log = logging.getLogger(__name__)

_BITS = {2: torch.int16, 4: torch.int32}
Part = tuple[Tensor, Tensor]
"""A linear's A [r, I] and B [O, r], for experts [E, r, I] and [E, O, r], E being 1 if all share it, as the engine is to
have them."""


class SlotCheck:
    """Compares each slot with the files of the adapter that was put there."""

    def __init__(self, manager: "LoRAModelManager") -> None:
        """`manager` is vLLM's LoRA model manager."""
        self._manager = manager
        self._helpers: dict[int, tuple[Path, PEFTHelper]] = {}
        """Adapters with files, by their number in the engine; those of vLLM's warm-up have none."""
        self._wrong: dict[int, list[str]] = {}

    def require_right(self, lora_id: int) -> None:
        """Raise RuntimeError, naming modules, where the adapter's slot was filled wrongly twice."""
        if wrong := self._wrong.get(lora_id):
            raise RuntimeError(f"in the engine's slot {join_names(wrong)} hold other values than the files")

    def note_files(self, request: LoRARequest) -> None:
        """Note an adapter whose files are about to be read."""
        known = self._manager.list_adapters()
        self._helpers = {number: helper for number, helper in self._helpers.items() if number in known}
        path = Path(request.lora_path)
        self._helpers[request.lora_int_id] = path, PEFTHelper.from_local_dir(str(path), None)

    def activate(self, lora_id: int, fill: Callable[[int], bool]) -> bool:
        """Fill a slot by `fill`, a second time where it then differs from the files; return what `fill` returned."""
        filled = fill(lora_id)
        if not filled or lora_id not in self._helpers:
            return filled
        self._wrong.pop(lora_id, None)
        if not (wrong := self._differing(lora_id)):
            return True
        log.warning("slot of adapter %d: refilling %d modules with wrong values", lora_id, len(wrong))
        self._manager.deactivate_adapter(lora_id)
        fill(lora_id)
        if wrong := self._differing(lora_id):
            self._wrong[lora_id] = wrong
            self._spoil(lora_id, wrong)
            log.error("slot of adapter %d: values differ from its files in %s", lora_id, join_names(wrong))
        return True

    def _differing(self, lora_id: int) -> list[str]:
        """Return the modules whose slot does not hold what the files say."""
        slot = self._manager.lora_index_to_id.index(lora_id)
        parts = self._parts(lora_id)
        flags = {
            name: _differs(module, slot, self._of_module(name, parts)) for name, module in self._manager.modules.items()
        }
        found = torch.stack(list(flags.values())).tolist()
        return [name for name, differs in zip(flags, found, strict=True) if differs]

    def _spoil(self, lora_id: int, names: Sequence[str]) -> None:
        """Make all that is computed with these modules NaN: the adapter's sequences fail by name, and no others.

        A slot may be filled in the middle of a step, where an exception would end the engine for everybody.
        """
        slot = self._manager.lora_index_to_id.index(lora_id)
        for name in names:
            for a_SERI, b_SEOR in _buffers(self._manager.modules[name]):
                a_SERI[slot] = torch.nan
                b_SEOR[slot] = torch.nan

    def _parts(self, lora_id: int) -> dict[str, Part]:
        """Return all tensors of the files, by the engine's names."""
        path, helper = self._helpers[lora_id]
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        mapper = None if mapper is None else mapper.get_rename_mapper()
        dtype = self._manager.lora_config.lora_dtype
        halves: dict[str, dict[bool, Tensor]] = {}
        scales: dict[str, float] = {}
        with open_adapter(str(path / ADAPTER_FILE), "pt") as file:
            for key in file.keys():  # noqa: SIM118 - the file is no mapping
                name, is_a = parse_fine_tuned_lora_name(key, mapper)
                halves.setdefault(name, {})[is_a] = file.get_tensor(key).to(dtype)
                if name not in scales:
                    in_file, _ = parse_fine_tuned_lora_name(key)
                    scales[name] = LoRALayerWeights.from_config(name, helper, in_file).scaling
        return {name: (half[True], _scale(half[False], scales[name])) for name, half in halves.items()}

    def _of_module(self, name: str, parts: dict[str, Part]) -> list[Part | None]:
        """Return the files' parts for a module, in the engine's order; None for nothing."""
        packed = self._manager.packed_modules.get(name, [name])
        if (slices := engine_slices(name)) and slices[0] in parts:
            return [parts.get(part) for part in slices]
        if isinstance(module := self._manager.modules[name], LinearByHeads) and name in parts:
            a, b = parts[name]
            return [(a, rows_of(rows, b)) for rows in module.rows]
        if name in parts or not isinstance(module, FusedMoEWithLoRA):
            return [parts.get(name) for name in packed]
        count = len(_buffers(module))
        stacks = [parts.get(f"{name}.{matrix}") for matrix in EXPERT_STACKS.values()][:count]
        if any(stacks):
            return stacks
        per_matrix = [[parts.get(name) for name in packed[first::count]] for first in range(count)]
        return [_stack(experts) for experts in per_matrix]


def _scale(b: Tensor, scale: float) -> Tensor:
    """Scale as vLLM does: in the engine's precision, on the CPU."""
    return b if scale == 1 else b * scale


def _stack(experts: Sequence[Part | None]) -> Part | None:
    """Stack one matrix of all experts, each of which has its own pair of tensors."""
    there = [expert for expert in experts if expert is not None]
    if not there:
        return None
    a, b = (torch.zeros_like(half) for half in there[0])
    whole = [expert or (a, b) for expert in experts]
    return torch.stack([a for a, _ in whole]), torch.stack([b for _, b in whole])


def _buffers(module: BaseLayerWithLoRA) -> list[tuple[Tensor, Tensor]]:
    """Return each slice's A [S, E, R, I] and B [S, E, O, R]; those of experts are gate, down and up, or up and down."""
    if isinstance(module, FusedMoEWithLoRA):
        first, *others = zip(module.w13_lora_a_stacked, module.w13_lora_b_stacked, strict=True)
        return [first, (module.w2_lora_a_stacked[0], module.w2_lora_b_stacked[0]), *others]
    a, b = module.lora_a_stacked, module.lora_b_stacked
    return [(a, b)] if isinstance(a, Tensor) else list(zip(a, b, strict=True))


def _differs(module: BaseLayerWithLoRA, slot: int, parts: Sequence[Part | None]) -> Tensor:
    """Return whether any bit of a module's slot differs from the files, as a tensor of one boolean."""
    buffers = [(a_SERI[slot], b_SEOR[slot]) for a_SERI, b_SEOR in _buffers(module)]
    whole = _by_slice(parts, _sizes(module, buffers))
    wanted = [_of_rank(part, *pair) for part, pair in zip(whole, buffers, strict=True)]
    flags = [
        _other_bits(buffer, half)
        for pair, part in zip(buffers, wanted, strict=True)
        for buffer, half in zip(pair, part or (None, None), strict=True)
    ]
    if isinstance(module, FusedMoEWithLoRA):
        flags.append(module.adapter_enabled[slot] != any(part is not None for part in parts))
    return torch.stack(flags).any()


def _sizes(module: BaseLayerWithLoRA, buffers: Sequence[Part]) -> list[int]:
    """Return the outputs of each slice of a module, of all ranks together."""
    here = [b_EOR.shape[-2] for _, b_EOR in buffers]
    if get_tensor_model_parallel_world_size() == 1:
        return here
    whole = getattr(module.base_layer, "output_sizes", here)
    return list(whole) if len(whole) == len(here) else here


def _of_rank(part: Part | None, a_ERI: Tensor, b_EOR: Tensor) -> Part | None:
    """Return this rank's part of matrices, for slots of the sizes of `a_ERI` and `b_EOR`."""
    if part is None or get_tensor_model_parallel_world_size() == 1:
        return part
    a, b = part
    return _piece(a, -1, a_ERI.shape[-1]), _piece(b, -2, b_EOR.shape[-2])


def _piece(whole: Tensor, dim: int, size: int) -> Tensor:
    """Return this rank's piece of `size` along a dimension. Ranks share a piece where there are fewer, as of key heads;
    a dimension that is no larger is not divided."""
    num_pieces = whole.shape[dim] // size
    if num_pieces <= 1:
        return whole
    piece = get_tensor_model_parallel_rank() * num_pieces // get_tensor_model_parallel_world_size()
    return whole.narrow(dim, piece * size, size)


def _by_slice(parts: Sequence[Part | None], sizes: Sequence[int]) -> list[Part | None]:
    """Return one part for each slice of `sizes` outputs.

    A matrix that the files have in one may be several in the engine, with the same A and a piece of B each.
    """
    if len(parts) == len(sizes):
        return list(parts)
    found: list[Part | None] = []
    for part in parts:
        begin = 0
        while part is not None and begin < part[1].shape[-2]:
            a, b = part
            found.append((a, b[..., begin : begin + sizes[len(found)], :]))
            begin += sizes[len(found) - 1]
    return found + [None] * (len(sizes) - len(found))


def _other_bits(buffer: Tensor, wanted: Tensor | None) -> Tensor:
    """Return whether a slot's matrix is anything but `wanted` in its corner and zeros around it."""
    bits = buffer.view(_BITS[buffer.itemsize])
    if wanted is None:
        return bits.any()
    num_rows, num_columns = wanted.shape[-2:]
    corner, below, beside = (
        bits[..., :num_rows, :num_columns],
        bits[..., num_rows:, :],
        bits[..., :num_rows, num_columns:],
    )
    here = wanted.to(buffer).view(bits.dtype)  # one at a time: there may be no room for all
    differs = (corner != here).any()
    for around in (below, beside):
        if around.numel():
            differs |= around.any()
    return differs
