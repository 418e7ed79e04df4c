"""A decoder's residual stream in float32, whatever the precision of its weights.

Every layer adds to it, so that in bfloat16 it is rounded twice in each: on a model of 36 layers half of the error of
bfloat16. A norm's output is rounded as before.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def keep_in_float32(model: PreTrainedModel) -> None:
    """Register the hooks, once, before anything is compiled. Models in float32 stay as they are, and so do those whose
    norms are torch's own, which take one type alone."""
    decoder, dtype = model.get_decoder(), model.dtype
    norms = [module for module in decoder.modules() if "Norm" in type(module).__name__]
    if dtype == torch.float32 or any(isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) for norm in norms):
        return

    def rounded(_: nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        return tuple(one.to(dtype) for one in output) if isinstance(output, tuple) else output.to(dtype)

    def with_rounded_stream(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if "hidden_states" in keywords:
            return arguments, {**keywords, "hidden_states": keywords["hidden_states"].to(dtype)}
        return (arguments[0].to(dtype), *arguments[1:]), keywords

    # Norms, and the rotary module, which gives cosines and sines in the stream's type.
    for module in [*norms, *(one for one in decoder.modules() if "Rotary" in type(one).__name__)]:
        module.register_forward_hook(rounded)
    # In OLMo 2 and others norms follow attention and MLP, which take the stream itself.
    without_norm = [layer for layer in decoder.layers if "input_layernorm" not in dict(layer.named_children())]
    for child in (child for layer in without_norm for child in layer.children() if child not in norms):
        child.register_forward_pre_hook(with_rounded_stream, with_kwargs=True)
    if decoder is model.base_model:
        model.get_input_embeddings().register_forward_hook(lambda _, __, output: output.float())
    else:  # images come between, in the type of the weights
        decoder.register_forward_pre_hook(_with_float32_embeddings, with_kwargs=True)


def _with_float32_embeddings(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return arguments, {**keywords, "inputs_embeds": keywords["inputs_embeds"].float()}
