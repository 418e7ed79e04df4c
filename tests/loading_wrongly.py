"""A vLLM worker that puts adapters wrongly into the engine's slots on request."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from vllm.lora.layers import FusedMoEWithLoRA

from tinker_server.backends.sampler.engine.vllm_patches.worker import Worker

Halves = Tensor | list[Tensor | None]
Fill = Callable[[int, Halves, Halves], None]


class LoadsWrongly(Worker):
    """Named in the engine argument `worker_cls`."""

    def fill_wrongly(self, how: str, part_of_name: str, times: int) -> list[str]:
        """The next fillings of a slot go wrong, in each module with such a name; gives their names."""
        manager = self.model_runner.lora_manager._adapter_manager
        names = [name for name in manager.modules if part_of_name in name]
        for name, other in zip(names, names[1:] + names[:1], strict=True):
            _spoil(manager, name, other, how, times)
        return names

    def expert_slots(self) -> dict[str, list[tuple[int, ...]]]:
        """The shapes of the slots of experts, by the side of their factors."""
        manager = self.model_runner.lora_manager._adapter_manager
        layers = [module for module in manager.modules.values() if isinstance(module, FusedMoEWithLoRA)]
        hidden = [one for layer in layers for one in (*layer.w13_lora_a_stacked, *layer.w2_lora_b_stacked)]
        inner = [one for layer in layers for one in (*layer.w13_lora_b_stacked, *layer.w2_lora_a_stacked)]
        return {"hidden": [tuple(one.shape) for one in hidden], "inner": [tuple(one.shape) for one in inner]}

    def types_of(self, ending: str) -> list[str]:
        """The types of the weights whose names end so."""
        weights = self.model_runner.get_model().named_parameters()
        return [str(weight.dtype) for name, weight in weights if name.endswith(ending)]


def _spoil(manager: Any, name: str, other: str, how: str, times: int) -> None:
    module = manager.modules[name]
    right: Fill = module.set_lora
    left = times

    def wrong(slot: int, a: Halves, b: Halves) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            module.set_lora = right
            return right(slot, a, b)
        if how == "missing":
            module.reset_lora(slot)
            return None
        if how == "doubled":
            return right(slot, a, [one if one is None else one * 2 for one in b] if isinstance(b, list) else b * 2)
        if how == "another layer's":
            (adapter,) = [one for one in manager.list_adapters().values() if manager.lora_index_to_id[slot] == one.id]
            return right(slot, adapter.loras[other].lora_a, adapter.loras[other].lora_b)
        if how == "slices turned":
            assert isinstance(a, list) and isinstance(b, list)
            return right(slot, a[1:] + a[:1], b)
        if how == "experts turned":
            assert isinstance(a, list)
            return right(slot, [one if one is None else one.roll(1, 0) for one in a], b)
        if how == "gate and up swapped":
            assert isinstance(a, list) and isinstance(b, list)
            return right(slot, a[::-1], b[::-1])
        if how == "left from before":
            right(slot, a, b)
            stacked = module.w13_lora_a_stacked if isinstance(module, FusedMoEWithLoRA) else module.lora_a_stacked
            (stacked if isinstance(stacked, Tensor) else stacked[0])[slot, -1, -1, -1] = 1.0
            return None
        raise ValueError(how)

    module.set_lora = wrong
