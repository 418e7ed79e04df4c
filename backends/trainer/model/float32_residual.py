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
    decoder, dtype = model.get_decoder(), model.dtype
    norms = [module for module in decoder.modules() if "Norm" in type(module).__name__]
    if dtype == torch.float32 or any(isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) for norm in norms):
        return

    def rounded(_: nn.Module, __: Any, output: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        return tuple(one.to(dtype) for one in output) if isinstance(output, tuple) else output.to(dtype)

    def with_rounded_stream(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if "hidden_states" in keywords:
            return arguments, {**keywords, "hidden_states": keywords["hidden_states"].to(dtype)}
        return (arguments[0].to(dtype), *arguments[1:]), keywords

    # Norms, and cosines and sines in the type of the stream.
    for module in [*norms, *(one for one in decoder.modules() if "Rotary" in type(one).__name__)]:
        module.register_forward_hook(rounded)
    # In OLMo 2 and others norms come after attention and MLP, which take the stream itself.
    without_norm = [layer for layer in decoder.layers if not hasattr(layer, "input_layernorm")]
    for child in (child for layer in without_norm for child in layer.children() if child not in norms):
        child.register_forward_pre_hook(with_rounded_stream, with_kwargs=True)
    if decoder is model.base_model:
        model.get_input_embeddings().register_forward_hook(lambda _, __, output: output.float())
    else:  # where images come between, in the type of the weights
        decoder.register_forward_pre_hook(_with_float32_embeddings, with_kwargs=True)


def _with_float32_embeddings(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return arguments, {**keywords, "inputs_embeds": keywords["inputs_embeds"].float()}
