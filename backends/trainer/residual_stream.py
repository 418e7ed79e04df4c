"""A decoder's residual stream in float32, whatever its weights are in.

Every layer adds to it, so that in bfloat16 it is rounded twice in each: on a model of 36 layers half of what bfloat16
costs. What a norm gives to the products is rounded as before.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def keep_in_float32(model: PreTrainedModel) -> None:
    """Once, before anything is compiled. A model whose norms are torch's own, which take one type alone, stays as it
    is, and so does one in float32."""
    decoder = model.get_decoder()
    norms = [module for module in decoder.modules() if "Norm" in type(module).__name__]
    if model.dtype == torch.float32 or any(isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) for norm in norms):
        return

    def rounded(_: nn.Module, __: Any, output: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        return tuple(one.to(model.dtype) for one in output) if isinstance(output, tuple) else output.to(model.dtype)

    for norm in norms:
        norm.register_forward_hook(rounded)
    for module in decoder.modules():
        if "Rotary" in type(module).__name__:
            module.register_forward_hook(rounded)  # cosines and sines, in the type of the stream
    if decoder is model.base_model:
        model.get_input_embeddings().register_forward_hook(lambda _, __, output: output.float())
    else:  # where images come between, in the type of the weights
        decoder.register_forward_pre_hook(_with_float32_embeddings, with_kwargs=True)


def _with_float32_embeddings(
    _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return arguments, {**keywords, "inputs_embeds": keywords["inputs_embeds"].float()}
