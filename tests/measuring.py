"""A worker of the engine that measures its memory by parts."""

import math
from collections.abc import Iterable
from itertools import chain

from torch import Tensor
from vllm.model_executor.layers.attention import MLAAttention
from vllm.v1.kv_cache_interface import MambaSpec

from tinker_server.backends.sampler.engine.vllm_patches.worker import Worker
from tinker_server.backends.sampler.engine.weight_holder import make_on_meta


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' memory, each once."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


class Measures(Worker):
    def measured_bytes(self) -> dict[str, int]:
        """Of this rank: weights, matrices made of them by which queries read latents, adapter slots, keys and values
        of a token, and a sequence's state."""
        model = self.model_runner.get_model()
        of_latents = [module for module in model.modules() if isinstance(module, MLAAttention)]
        specs = self.get_kv_cache_spec().values()
        stacked = [
            getattr(module, name)
            for module in self._slots.modules.values()
            for name in vars(module)
            if name.endswith(("lora_a_stacked", "lora_b_stacked"))
        ]
        slots = chain.from_iterable([one] if isinstance(one, Tensor) else one for one in stacked)
        states = [spec for spec in specs if isinstance(spec, MambaSpec)]
        return {
            "base": self._loaded_bytes(),
            "matrices of latents": sum(module.W_UV.nbytes + module.W_UK_T.nbytes for module in of_latents),
            "slots": held_bytes(slots),
            "token": sum(spec.page_size_bytes // spec.block_size for spec in specs if spec not in states),
            "state": sum(replaced_padding(spec) for spec in states),
        }

    def _loaded_bytes(self) -> int:
        """Of the weights as they are loaded: on the CPU vLLM then packs them into another library's memory."""
        self.vllm_config.compilation_config.static_forward_context.clear()  # has the running model's layers
        with make_on_meta(self.vllm_config) as model:
            return sum(one.nbytes for one in model.parameters())  # a tied one is counted once


def replaced_padding(spec: MambaSpec) -> int:
    """Bytes of a state without what makes it as large as a block of keys and values."""
    return sum(one.itemsize * math.prod(shape) for one, shape in zip(spec.dtypes, spec.shapes, strict=True))
