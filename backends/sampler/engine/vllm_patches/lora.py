"""LoRA in vLLM 0.32, corrected: subclasses of its managers and of its kernels.

1. Prompt log probabilities with an adapter on the head: vLLM looks up the slot by sampled row, but here each row is a
   prompt token. It crashes, or silently takes another request's adapter.
2. A vision tower's query, key and value are one matrix in the files too. One kind of model does not declare it, and
   with LoRA in its tower the engine refuses to start.
3. A head that stands beside a decoder, not in it, gets no LoRA.
4. Files with an adapter for the head are refused for some models (Mistral, Gemma) whose head vLLM wraps.
5. Adapters of a mixture's experts from files with one tensor for each matrix of a layer. Expert by expert, as PEFT
   names them, 48 layers have 37,000 tensors, which vLLM reads, names and copies together one by one. Slots have the
   factors that a layer's experts share once, or a factor of each expert, and take both forms of files. vLLM takes
   stacks for slots of shared factors alone, nothing else for these, and silently the first expert's of factors that
   differ: they are refused here.
6. A slot is compared with the adapter's files when it has been filled (`slot_check.py`).
7. Rows of an input projection of linear attention that have adapters of their own, as in the hosted service
   (`families/linear_attention.py`), get the slices that vLLM fills from one adapter of all rows. Where it has a single
   slice, there are more here (`linear_by_heads.py`).
8. Of a merged linear with one part alone, as some linear attention has, each of several ranks gets two
   pieces of B, as if gate stood above up.
9. Where a kernel pads the inner width of experts, vLLM cuts the adapters of each of several ranks by the padded width,
   so that all but the first get others' rows. No kernel that is chosen here pads; another is refused.

N rows, H hidden size, R LoRA rank, V vocabulary, S adapter slots, E experts
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from vllm.lora.layers import ColumnParallelLinearWithLoRA, FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase
from vllm.lora.request import LoRARequest
from vllm.lora.utils import process_packed_modules_mapping, replace_submodule
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

from tinker_server.backends.families.linear_attention import ENGINE_SLICES, engine_slices, rows_of_inputs
from tinker_server.backends.families.lora_names import EXPERT_STACKS
from tinker_server.backends.protocol import BackendFailed
from tinker_server.backends.sampler.engine.slot_check import SlotCheck
from tinker_server.backends.sampler.engine.vllm_patches.linear_by_heads import LinearByHeads

HEAD = "lm_head"
OWN_EXPERTS = (
    "their experts have factors of their own (LoRA layout own), and the engine's slots are for factors that the experts"
    " of a layer share (setting backend.lora_layout service; own takes both)"
)
"""Begins the refusal of such an adapter."""


class Slots(LRUCacheLoRAModelManager):  # type: ignore[misc]
    """The adapters that vLLM holds, and the engine's slots for them."""

    packed_modules_mapping: dict[str, list[str]]
    _enable_moe_shared_loras: bool

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Take vLLM's own arguments."""
        super().__init__(*args, **kwargs)
        self.check = SlotCheck(self)
        self.supported_lora_modules += [f"experts.{matrix}" for matrix in EXPERT_STACKS.values()]
        self.supported_lora_modules += [part for parts in ENGINE_SLICES.values() for part in parts]
        if HEAD not in self.supported_lora_modules:
            self.supported_lora_modules.append(HEAD)

    def activate_adapter(self, lora_id: int) -> bool:
        """Fill a slot, and compare it with the files."""
        return self.check.activate(lora_id, super().activate_adapter)

    def _create_lora_modules(self) -> None:
        if self._enable_moe_shared_loras:  # of the layers alone: the manager would take no files expert by expert
            self._enable_moe_shared_loras = False
            self.packed_modules_mapping = process_packed_modules_mapping(self.model, force_2d_moe=True)
        self.packed_modules_mapping = {"qkv": ["qkv"], **self.packed_modules_mapping}
        super()._create_lora_modules()
        self._divide_by_heads()
        for name, module in self.modules.items():
            if isinstance(module, FusedMoEWithLoRA):
                require_unpadded(module.moe_config, name)
            if isinstance(module, ColumnParallelLinearWithLoRA):
                module.is_merged_col_linear &= len(getattr(module.base_layer, "output_sizes", ())) > 1

    def _divide_by_heads(self) -> None:
        """Give the linears that have fewer slices than adapters the slices of these."""
        for name, module in self.modules.items():
            if (parts := engine_slices(name)) and module.n_slices < len(parts):
                layer, _, linear = name.rpartition(".")
                rows = rows_of_inputs(self.model.get_submodule(layer), linear)
                divided = LinearByHeads(module.base_layer, [*rows.values()])
                divided.create_lora_weights(self.lora_slots, self.lora_config)
                divided.set_mapping(module.punica_wrapper)
                self.modules[name] = replace_submodule(self.model, name, divided)

    def _get_punica_wrapper(self, module_name: str) -> object:
        found = super()._get_punica_wrapper(module_name)
        if found is None and module_name == HEAD:
            return self.punica_wrapper_mapping[self.mm_mapping.language_model[0]]
        return found

    def _create_merged_loras_inplace(self, lora_model: LoRAModel) -> None:
        for layer, module in self.modules.items():
            if isinstance(module, FusedMoEWithLoRA):
                stacks = [lora_model.loras.pop(f"{layer}.{matrix}", None) for matrix in EXPERT_STACKS.values()]
                if any(stacks):
                    lora_model.loras[layer] = _pack_experts(stacks, layer)
            elif (parts := engine_slices(layer)) and parts[0] in lora_model.loras:
                found = [lora_model.loras.pop(part, None) for part in parts]
                lora_model.loras[layer] = pack_slices(found, module.n_slices)
        super()._create_merged_loras_inplace(lora_model)
        for layer, module in self.modules.items():
            if isinstance(module, FusedMoEWithLoRA) and layer in lora_model.loras:
                _fit_experts(lora_model.loras[layer], module, layer)


def require_unpadded(config: FusedMoEConfig, layer: str) -> None:
    """Raise BackendFailed for experts whose adapters vLLM would cut by a padded width."""
    width, padded = config.intermediate_size_per_partition_unpadded, config.intermediate_size_per_partition
    if config.moe_parallel_config.tp_size > 1 and width != padded:
        raise BackendFailed(
            f"tensor_parallel {config.moe_parallel_config.tp_size} (setting backend.tensor_parallel) is not supported:"
            f" the engine pads the inner width of the experts of {layer} on each rank from {width} to {padded}, and"
            " would give ranks wrong parts of their adapters; set it to 1"
        )


def pack_slices(parts: list[LoRALayerWeights | None], num_slices: int) -> PackedLoRALayerWeights:
    """Return the adapters of a linear's first slices in one."""
    return PackedLoRALayerWeights.pack([*parts, *[None] * (num_slices - len(parts))])


def _fit_experts(packed: PackedLoRALayerWeights, module: FusedMoEWithLoRA, layer: str) -> None:
    """Give the factors of a layer's experts the form of the slots: those on the hidden side once or for each expert,
    the others for each. Raises ValueError if they have no such form."""
    num_experts, is_shared = module.local_num_experts, module.enable_moe_shared_loras
    for factors, of_hidden in ((packed.lora_a, (0, 2)), (packed.lora_b, (1,))):  # of gate, down and up
        for place, factor_EMN in enumerate(factors):
            if not (is_shared and place in of_hidden):
                factors[place] = factor_EMN.expand(num_experts, -1, -1)
            elif len(factor_EMN) > 1:
                if not (factor_EMN == factor_EMN[:1]).all():
                    raise ValueError(f"{OWN_EXPERTS}: those of {layer} differ")
                factors[place] = factor_EMN[:1].clone()


def _pack_experts(stacks: list[LoRALayerWeights | None], layer: str) -> PackedLoRALayerWeights:
    """Return w1, w2 and w3 of a layer's experts in one; without a gate there is no w3, and vLLM wants w1 again."""
    first, down, up = stacks
    packed = PackedLoRALayerWeights.pack_moe_stacked([first, down, up or first], layer)
    if up is None:
        packed.scaling[2] = 1  # or w1 would be scaled twice
    return packed


class WorkerAdapters(LRUCacheWorkerLoRAManager):  # type: ignore[misc]
    """The worker's side of them: reads files."""

    _manager_cls = Slots

    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        self._adapter_manager.check.note_files(lora_request)
        return super()._load_adapter(lora_request)


def kernels_with_prompt_rows(base: type[PunicaWrapperBase]) -> type[PunicaWrapperBase]:
    """Return a subclass of a device's LoRA kernels whose head takes prompt tokens as rows, too."""

    class Kernels(base):  # type: ignore[misc]
        prompt_hidden: Tensor | None = None
        """Hidden states of the step's tokens, while prompt log probabilities are computed."""

        @contextmanager
        def prompt_rows(self, hidden_states: Tensor) -> Iterator[None]:
            """Inside, the head's rows are views of `hidden_states`, which has every token of the step."""
            self.prompt_hidden = hidden_states
            try:
                yield
            finally:
                self.prompt_hidden = None

        def add_lora_logits(
            self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **kwargs: object
        ) -> None:
            """Add the adapters' output to the logits `y` of the rows `x`."""
            if self.prompt_hidden is None:
                super().add_lora_logits(y, x, lora_a_stacked, lora_b_stacked, scale, **kwargs)
                return
            first = row_offset(x, self.prompt_hidden)
            slots_N = self.token_lora_indices[first : first + len(x)]
            add_by_slot(y, x, (lora_a_stacked[:, 0], lora_b_stacked[:, 0]), slots_N, scale)

    return Kernels


def row_offset(view_NH: Tensor, whole: Tensor) -> int:
    """Return the row of `whole` at which its view begins. Raises ValueError for anything but a run of its rows."""
    offset, stride = int(view_NH.storage_offset()) - int(whole.storage_offset()), whole.stride(0)
    same_memory = view_NH.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    row, rest = divmod(offset, stride)
    if not same_memory or rest or view_NH.stride() != whole.stride() or not 0 <= row <= len(whole) - len(view_NH):
        raise ValueError("prompt log probabilities were asked for rows that are no run of the step's tokens")
    return row


def add_by_slot(
    logits_NV: Tensor, hidden_NH: Tensor, adapters: tuple[Tensor, Tensor], slots_N: Tensor, scale: float
) -> None:
    """Add each row's adapter output to its logits, in place; slot -1 has none.

    adapters  A [S, R, H] and B [S, V, R] of each slot
    """
    a_SRH, b_SVR = adapters
    out_NV = logits_NV[:, : b_SVR.shape[1]]  # the head may be padded further than the adapter
    for slot, rows in rows_by_slot(slots_N, len(hidden_NH)):
        low_NR = hidden_NH[rows].to(a_SRH.dtype) @ a_SRH[slot].T
        out_NV.index_add_(0, rows, (low_NR @ b_SVR[slot].T).to(out_NV.dtype), alpha=scale)


def rows_by_slot(slots_N: Tensor, num_rows: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each adapter slot that has rows, and which. Raises ValueError where rows are more or fewer than slots."""
    if len(slots_N) != num_rows:
        raise ValueError(f"{num_rows} rows, but adapter slots for {len(slots_N)}")
    for slot in slots_N.unique().tolist():
        if slot >= 0:
            yield slot, (slots_N == slot).nonzero().squeeze(1)
