"""The gated norm of linear attention in float32, as published files have it and as the trainer keeps it."""

from functools import partial

import torch
from vllm.model_executor.layers.layernorm import RMSNormGated

from tinker_server.backends.sampler.engine.vllm_patches import targets


def keep_gated_norms() -> None:
    """Apply the change before a model is made. Files in bfloat16 give the same numbers in float32.

    The module of the target begins CUDA as it is imported: a process that is to be forked must not have called this.
    """
    targets.GATED_NORMS.replace(partial(RMSNormGated, dtype=torch.float32))
