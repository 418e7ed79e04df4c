"""Tensors that stay in float32, whatever the precision of a model: as files have them, and as the engine does.

The decay of a state is the exponential of an exponential of A_log, in all tokens: rounded to bfloat16, a layer's log
probabilities move by 0.01 nats, always in the same direction. Files in bfloat16 give the same numbers in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from tinker_server.backends.trainer.model.targets import DTYPE_PLAN

IN_FLOAT32 = ("A_log", "linear_attn.norm")
"""Parts of names: the decay of the delta rule and of Mamba2, and the gated norm of the delta rule."""


@contextmanager
def keeping_precision() -> Iterator[None]:
    """While it is active, transformers loads these tensors in float32."""

    def plan(self: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
        return {**own(self, dtype), **dict.fromkeys(IN_FLOAT32, torch.float32)}

    own = DTYPE_PLAN.replace(plan)
    try:
        yield
    finally:
        DTYPE_PLAN.replace(own)
