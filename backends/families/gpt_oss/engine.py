"""gpt-oss in vLLM 0.32 with adapters of each of an expert's three matrices.

vLLM keeps gate and up interleaved, and adds to them what adapters of gate and of up give as if gate stood above
up. Here they do: experts are loaded so, with the activation for it, which vLLM has for another kind of model. Experts
that stay in MXFP4 are loaded as they are in the files, and their products put gate above up.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.models import gpt_oss
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

from tinker_server.backends.families.gpt_oss import ALPHA, ENGINE_EXPERTS, ENGINE_WEIGHTS, LIMIT, in_common_layout
from tinker_server.backends.sampler.engine.vllm_patches.block_fp8 import staying

_STACKS = {"gate_up_proj": "w13", "down_proj": "w2"}
"""vLLM's names of the experts' matrices."""


def _with_common_layout(make: Callable[..., MoERunner]) -> Callable[..., MoERunner]:
    def experts(*, activation: str, **arguments: object) -> MoERunner:
        assert activation == "swigluoai", activation
        constants = {"swiglu_alpha": ALPHA, "swiglu_beta": 1.0, "swiglu_limit": LIMIT}
        return make(activation="swigluoai_uninterleave", **constants, **arguments)

    return experts


def _reading_common_layout(read: Callable[..., set[str]]) -> Callable[..., set[str]]:
    def load_weights(self: GptOssForCausalLM, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        if staying(self.vllm_config.model_config):
            return read(self, _load_packed(self, weights))
        vars(self.config).pop("quantization_config", None)  # None by `_config_changes`; vLLM asks if it is there
        num_ranks = get_tensor_model_parallel_world_size()  # each takes a part of the files' outputs
        return read(self, in_common_layout(weights, num_ranks))

    return load_weights


def _load_packed(model: GptOssForCausalLM, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Load the experts' packed stacks, and yield all other tensors."""
    for name, tensor in weights:
        if tensor.dtype != torch.uint8:
            yield name, tensor
            continue
        module, _, matrix = name.rpartition(".")
        weight = model.get_parameter(f"{module}.routed_experts.{_STACKS[matrix]}_weight")
        weight.weight_loader(weight, tensor, _STACKS[matrix])


def lay_out_experts() -> None:
    """Apply the changes, once, before a model is made."""
    ENGINE_EXPERTS.replace(_with_common_layout(gpt_oss.FusedMoEFactory))
    ENGINE_WEIGHTS.replace(_reading_common_layout(GptOssForCausalLM.load_weights))
