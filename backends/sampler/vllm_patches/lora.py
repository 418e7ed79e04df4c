"""What vLLM 0.32 computes wrongly with LoRA, put right.

1. On CPU, a row without an adapter carries slot -1, which torch indexing takes for the last slot. The
   replacements below compute slot by slot: -1 gets nothing, and no weights are copied per token.
2. Prompt log probabilities with an adapter on the head: vLLM looks up the slot by sampled row, but here
   each row is a token of a prompt. It crashes, or quietly takes another request's adapter.
3. A vision tower's query, key and value are one matrix in the files too, and one kind of model does not say so: where
   its tower takes LoRA, the engine refuses to start.
4. A head that stands beside a decoder, not in it, gets no LoRA.

N rows, H hidden size, R LoRA rank, V vocabulary, S adapter slots
"""

from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from vllm.lora import model_manager
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

P = ParamSpec("P")
T = TypeVar("T")


class PromptRows:
    """Adapter output on the head for rows that are prompt tokens."""

    def __init__(self, punica_wrapper: Any) -> None:
        self._punica = punica_wrapper
        self._sampled_rows = punica_wrapper.add_lora_logits
        self._hidden_states: Tensor | None = None
        """Every token row of the step, while prompt log probabilities are computed."""
        punica_wrapper.add_lora_logits = self._add_lora_logits

    def during(self, step: Callable[P, T], argument: int) -> Callable[P, T]:
        """`step`, whose positional `argument` holds the hidden states of all the step's tokens."""

        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            self._hidden_states = args[argument]  # type: ignore[assignment]
            try:
                return step(*args, **kwargs)
            finally:
                self._hidden_states = None

        return run

    def _add_lora_logits(
        self, logits_NV: Tensor, hidden_NH: Tensor, a_S1RH: Tensor, b_S1VR: Tensor, scale: float, **kwargs: Any
    ) -> None:
        if self._hidden_states is None:
            self._sampled_rows(logits_NV, hidden_NH, a_S1RH, b_S1VR, scale, **kwargs)
            return
        first = row_offset(hidden_NH, self._hidden_states)
        slots_N = self._punica.token_lora_indices[first : first + len(hidden_NH)]
        add_by_slot(logits_NV, hidden_NH, a_S1RH[:, 0], b_S1VR[:, 0], slots_N, scale)


def row_offset(view_NH: Tensor, whole: Tensor) -> int:
    """Which row of `whole` its view begins at. Raises ValueError for anything but a run of its rows."""
    offset, stride = int(view_NH.storage_offset()) - int(whole.storage_offset()), whole.stride(0)
    same_memory = view_NH.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    row, rest = divmod(offset, stride)
    if not same_memory or rest or view_NH.stride() != whole.stride() or not 0 <= row <= len(whole) - len(view_NH):
        raise ValueError("prompt log probabilities were asked for rows that are no run of the step's tokens")
    return row


def add_by_slot(  # noqa: PLR0913
    logits_NV: Tensor, hidden_NH: Tensor, a_SRH: Tensor, b_SVR: Tensor, slots_N: Tensor, scale: float
) -> None:
    """Add each row's adapter output to its logits, in place; slot -1 has none."""
    out_NV = logits_NV[:, : b_SVR.shape[1]]  # the head may be padded further than the adapter
    for slot, rows in rows_by_slot(slots_N, len(hidden_NH)):
        low_NR = hidden_NH[rows].to(a_SRH.dtype) @ a_SRH[slot].T
        out_NV.index_add_(0, rows, (low_NR @ b_SVR[slot].T).to(out_NV.dtype), alpha=scale)


def rows_by_slot(slots_N: Tensor, num_rows: int) -> Iterator[tuple[int, Tensor]]:
    """Each adapter slot that has rows, and which. Raises ValueError where rows are more or fewer than slots."""
    if len(slots_N) != num_rows:
        raise ValueError(f"{num_rows} rows, but adapter slots for {len(slots_N)}")
    for slot in slots_N.unique().tolist():
        if slot >= 0:
            yield slot, (slots_N == slot).nonzero().squeeze(1)


def _weight(stacked: Tensor, slot: int) -> Tensor:
    """One adapter's matrix; the layers differ in whether there is a dimension of one in between."""
    return stacked[slot, 0] if stacked.dim() == 4 else stacked[slot]


def _shrink(inputs: Tensor, a_stacked: Tensor, out_NR: Tensor, slots_N: Tensor, scaling: float = 1.0) -> None:
    for slot, rows in rows_by_slot(slots_N, len(inputs)):
        low = inputs[rows].to(out_NR.dtype) @ _weight(a_stacked, slot).to(out_NR.dtype).T
        out_NR[rows, : low.shape[1]] = scaling * low


def _expand_slice(  # noqa: PLR0913
    inputs: Tensor, b_stacked: Tensor, out: Tensor, slots_N: Tensor, offset: int, size: int, add_inputs: bool = True
) -> None:
    columns = out[:, offset : offset + size]
    if not add_inputs:
        columns.zero_()
    for slot, rows in rows_by_slot(slots_N, len(inputs)):
        weight = _weight(b_stacked, slot)[: columns.shape[1]].to(out.dtype)
        columns.index_add_(0, rows, inputs[rows].to(out.dtype) @ weight.T)


def _expand(inputs: Tensor, b_stacked: Tensor, out: Tensor, slots_N: Tensor, add_inputs: bool = True) -> None:
    # An adapter's output and the model's may be padded differently.
    _expand_slice(inputs, b_stacked, out, slots_N, 0, min(b_stacked.shape[-2], out.shape[1]), add_inputs)


def name_tower_attention() -> None:
    """Once per process that loads a model, before it does."""
    named: Callable[..., dict[str, list[str]]] = model_manager.process_packed_modules_mapping

    def with_tower(*args: Any, **kwargs: Any) -> dict[str, list[str]]:
        return {"qkv": ["qkv"], **named(*args, **kwargs)}

    model_manager.process_packed_modules_mapping = with_tower


def replace_cpu_ops() -> None:
    """Once per process that computes on the CPU, before the first request."""
    for module in (lora_ops, punica_cpu):
        module.bgmv_shrink = _shrink
        module.bgmv_expand = _expand
        module.bgmv_expand_slice = _expand_slice


def take_heads_beside_decoders() -> None:
    """Changes vLLM's LoRA manager, before it is made: of a model that sees, it gives LoRA to the decoder alone."""
    find = model_manager.LoRAModelManager._get_punica_wrapper

    def punica_wrapper(manager: Any, module_name: str) -> Any:
        found = find(manager, module_name)
        if found is None and module_name == "lm_head":
            return manager.punica_wrapper_mapping[manager.mm_mapping.language_model[0]]
        return found

    model_manager.LoRAModelManager._get_punica_wrapper = punica_wrapper
