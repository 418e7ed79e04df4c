"""Log probabilities of targets, without ever holding [tokens, vocabulary] for a whole microbatch.

T tokens, H hidden width, V vocabulary, K targets of a token, R summed ranks of the microbatch's models
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tinker_server.backends.families.logits import LogitTransform, logit_transform
from tinker_server.backends.kernels.autograd import Context
from tinker_server.backends.kernels.exchange import group_name
from tinker_server.backends.trainer.distributed import ALONE, Root, World
from tinker_server.backends.trainer.lora.adapters import Adapters
from tinker_server.backends.trainer.lora.linear import (
    LoraLinear,
    add_lora_gradients,
    add_product,
    apply_scales,
    lora_linears_backward,
)
from tinker_server.backends.trainer.model import attention
from tinker_server.backends.trainer.model.context import gather_tokens, slice_of, slice_tokens
from tinker_server.backends.trainer.model.packing import Microbatch
from tinker_server.backends.trainer.model.router_replay import RouterReplay
from tinker_server.backends.trainer.model.vision import ImageEncoder

MAX_LOGITS = 5 * 2**25
"""Logits held at once, in float32: 640 MiB."""
_TILE = 256
"""Tokens: products of a multiple of them are faster."""
MANY_TOKENS = 1024
"""Tokens of a microbatch from which it is worth copying the head's weight; both microbatches by which memory is
measured have as many."""


class Scorer(nn.Module):
    """A module whose forward gives target log probabilities."""

    def __init__(
        self,
        root: Root,
        vision: ImageEncoder | None,
        weights: Adapters,
        router_replay: RouterReplay | None = None,
        context: World = ALONE,
    ) -> None:
        """`context` has the ranks that compute a microbatch together."""
        super().__init__()
        self._root = root
        self._vision = vision
        self._transform = logit_transform(root.model.config.get_text_config())
        self.weights = weights
        self.router_replay = router_replay
        self.context = context
        self._group = None if context.group is None else group_name(context.group)

    @property
    def model(self) -> PreTrainedModel:
        """The base that it scores with."""
        return self._root.model

    def forward(self, batch: Microbatch, scales_TR: Tensor, gradient: "TokenGradient | None" = None) -> Tensor:
        """Return [T, K] float32, nats, of a microbatch's targets; `scales_TR` are its tokens' scales of the loaded
        adapters.

        With `gradient` backward is faster, and must then get just the gradient that this function gives.
        """
        if self._group is None:
            return cast(Tensor, self._root(self._scored, batch, scales_TR, gradient))
        num_tokens = len(batch.targets_TK)
        own, own_scales_SR = slice_tokens(batch, scales_TR, self.context)
        shifted = None if gradient is None else _from(gradient, slice_of(num_tokens, self.context).start)
        return gather_tokens(self._root(self._scored, own, own_scales_SR, shifted), num_tokens, self.context)

    def _scored(self, batch: Microbatch, scales_TR: Tensor, gradient: "TokenGradient | None") -> Tensor:
        self.weights.use(scales_TR)
        if self.router_replay is not None:
            known = batch.experts_LTK
            self.router_replay.use(self.router_replay.blank(len(batch.targets_TK)) if known is None else known)
        with ExitStack() as forward:
            image_inputs: dict[str, Tensor] = {}
            if self._vision is not None:
                image_inputs = forward.enter_context(self._vision.shown(batch, scales_TR.device))
            lengths = batch.cu_seqlens, batch.cu_seqlens_host, batch.max_seqlen
            tries = batch.shared, batch.carried
            extra = attention.varlen_arguments(*lengths, self._group, batch.whole_images_IF, *tries)
            output = self.model.base_model(**batch.model_inputs, **extra, **image_inputs, use_cache=False)
        head, hidden_TH = self.model.get_output_embeddings(), output.last_hidden_state[0]
        assert isinstance(head, LoraLinear), "adapters replace the head too"
        return target_logprobs(hidden_TH, head, scales_TR, batch.targets_TK, gradient, self._transform)


class TokenGradient(Protocol):
    """The gradient of a loss in which a token's depends on no other token's log probabilities."""

    def __call__(self, logprobs_TK: Tensor, begin: int) -> Tensor:
        """Return [T, K], from the log probabilities of the microbatch's tokens from `begin` on."""


def _from(gradient: TokenGradient, first: int) -> TokenGradient:
    """Return the gradient of a slice of a microbatch, which begins at token `first`."""
    return lambda logprobs_TK, begin: gradient(logprobs_TK, first + begin)


def target_logprobs(  # noqa: PLR0913
    hidden_TH: Tensor,
    head: LoraLinear,
    scales_TR: Tensor,
    targets_TK: Tensor,
    gradient: TokenGradient | None = None,
    transform: LogitTransform = LogitTransform(),  # noqa: B008 - frozen
) -> Tensor:
    """Return [T, K] float32, nats. Backward accumulates the gradients of the head's adapters.

    With `gradient` forward does that, while a chunk's logits are there.
    """
    if not torch.is_grad_enabled():
        gradient = None
    return cast(Tensor, _TargetLogprobs.apply(hidden_TH, head, scales_TR, targets_TK, gradient, transform))  # type: ignore[no-untyped-call]


_NO_OTHERS = (None,) * 5
"""Gradients of the arguments behind the hidden states."""


class _HeadContext(Context, Protocol):
    head: LoraLinear
    is_known: bool
    transform: LogitTransform


class _TargetLogprobs(torch.autograd.Function):
    """Computes a chunk of tokens at a time; if the gradient is not known, backward recomputes a chunk's logits."""

    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: _HeadContext,
        hidden_TH: Tensor,
        head: LoraLinear,
        scales_TR: Tensor,
        targets_TK: Tensor,
        gradient: TokenGradient | None,
        transform: LogitTransform,
    ) -> Tensor:
        widened_VH = _widened(head, hidden_TH.shape[0])
        logprobs, sums, gradients, parts, begin = [], [], [], [], 0
        for hidden, scales, targets in _chunks(head.weight, hidden_TH, scales_TR, targets_TK):
            logits, inner = _logits(hidden, head, widened_VH, scales)
            lse = _normaliser(transform.apply(logits))
            logprobs.append(logits.gather(-1, targets) - lse)
            sums.append(lse)
            if gradient is not None:
                gradients.append(gradient(logprobs[-1], begin))
                grad_logits = _logits_gradient(logits, lse, targets, gradients[-1], hidden.dtype)
                transform.backward(grad_logits, logits)
                parts.append(_add_gradients(grad_logits, hidden, inner, head, scales))
            begin += hidden.shape[0]
        ctx.head, ctx.is_known, ctx.transform = head, gradient is not None, transform
        if ctx.is_known:
            ctx.save_for_backward(torch.cat(gradients), torch.cat(parts))
        else:
            ctx.save_for_backward(hidden_TH, scales_TR, targets_TK, torch.cat(sums), widened_VH)
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx: _HeadContext, grad_TK: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        if ctx.is_known:
            known_TK, grad_TH = ctx.saved_tensors
            # Another gradient than was promised gives no wrong numbers: NaN is refused.
            is_known_T1 = torch.isclose(grad_TK, known_TK, rtol=1e-3, atol=0).all(-1, keepdim=True)
            return torch.where(is_known_T1, grad_TH, torch.nan), *_NO_OTHERS
        *of_tokens, widened_VH = ctx.saved_tensors
        parts = []
        for hidden, scales, targets, lse, grad in _chunks(ctx.head.weight, *of_tokens, grad_TK):
            logits, inner = _logits(hidden, ctx.head, widened_VH, scales)
            grad_logits = _logits_gradient(ctx.transform.apply(logits), lse, targets, grad, hidden.dtype)
            ctx.transform.backward(grad_logits, logits)
            parts.append(_add_gradients(grad_logits, hidden, inner, ctx.head, scales))
        return torch.cat(parts), *_NO_OTHERS


def _add_gradients(
    grad_logits_TV: Tensor, hidden_TH: Tensor, inner_TR: Tensor, head: LoraLinear, scales_TR: Tensor
) -> Tensor:
    """Return the gradient of hidden [T, H]; accumulate those of the head's adapters."""
    grad_TH: Tensor
    own, width = head.whole, hidden_TH.shape[1]
    adapters, places = ([own.a_RI], [own.b_RO]), [0, 0, own.rows.end, 1]
    grad_TH, grad_inner_TR = lora_linears_backward([grad_logits_TV], [head.weight], *adapters, scales_TR, places, width)
    gradients = [own.grad_a_RI], [own.grad_b_RO]
    add_lora_gradients([grad_logits_TV], hidden_TH, inner_TR, grad_inner_TR, *gradients, places)
    return grad_TH


def _widened(head: LoraLinear, num_tokens: int) -> Tensor | None:
    """Return [V, H + R], the weight and B, for many tokens: adding one's product to the other's would write and read
    all logits once more. For few tokens that costs less than copying the weight."""
    if num_tokens < MANY_TOKENS:
        return None
    num_outputs, width = head.weight.shape
    weight_VH = head.weight.new_empty(num_outputs, width + head.whole.b_RO.shape[0])
    weight_VH[:, :width], weight_VH[:, width:] = head.weight, head.whole.b_RO.T  # torch.cat takes 1.5x as long
    return weight_VH


def _logits(hidden_TH: Tensor, head: LoraLinear, widened_VH: Tensor | None, scales_TR: Tensor) -> tuple[Tensor, Tensor]:
    """Return [T, V] in float32, and the scaled inner products [T, R]."""
    inner_TR = apply_scales(hidden_TH @ head.whole.a_RI.T, scales_TR)
    if widened_VH is not None:
        return _head_logits(torch.cat([hidden_TH, inner_TR], 1), widened_VH, head.bias), inner_TR
    logits_TV = _head_logits(hidden_TH, head.weight, head.bias)
    add_product(logits_TV, inner_TR.T, head.whole.b_RO)
    return logits_TV, inner_TR


def _chunks(weight_VH: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    size = max(1, MAX_LOGITS // weight_VH.shape[0])
    size -= size % _TILE if size > _TILE else 0
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def _head_logits(hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    """Return [T, V] in float32.

    Logits are never rounded to the base's precision: on large ones that alone costs 0.025 nats.
    """
    if hidden_TH.is_cuda and hidden_TH.dtype != torch.float32:
        logits_TV = torch.mm(hidden_TH, weight_VH.T, out_dtype=torch.float32)
    else:
        wide = torch.promote_types(hidden_TH.dtype, torch.float32)
        logits_TV = hidden_TH.to(wide) @ weight_VH.T.to(wide)
    return logits_TV if bias_V is None else logits_TV.add_(bias_V)


def _normaliser(logits_TV: Tensor) -> Tensor:
    """Return the log-sum-exp [T, 1], nats."""
    if logits_TV.is_cuda:
        from tinker_server.backends.kernels.log_softmax import normaliser

        return normaliser(logits_TV)
    return logits_TV.logsumexp(-1, keepdim=True)


def _logits_gradient(
    logits_TV: Tensor, lse_T1: Tensor, targets_TK: Tensor, grad_TK: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return [T, V] in `dtype`, rounded once: the gradient of the logits, given that of the log probabilities."""
    weight_T1 = grad_TK.sum(-1, keepdim=True)
    gradient_TV = _probabilities(logits_TV, lse_T1, weight_T1, dtype)
    if targets_TK.shape[1] > 1:
        targets_TK, grad_TK = _summed_by_target(targets_TK, grad_TK)
    of_targets_TK = grad_TK - (logits_TV.gather(-1, targets_TK) - lse_T1).exp() * weight_T1
    return gradient_TV.scatter_(-1, targets_TK, of_targets_TK.to(dtype))


def _probabilities(logits_TV: Tensor, lse_T1: Tensor, weight_T1: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [T, V] in `dtype`: each token's probabilities times minus its weight."""
    if logits_TV.is_cuda:
        from tinker_server.backends.kernels.log_softmax import probabilities

        return probabilities(logits_TV, lse_T1, weight_T1, dtype)
    return (-(logits_TV - lse_T1).exp() * weight_T1).to(dtype)


def _summed_by_target(targets_TK: Tensor, grad_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Sort targets; give each the sum of the gradients of all that equal it."""
    targets_TK, order_TK = targets_TK.sort(-1)
    # Index of each among a token's different targets.
    index_TK = F.pad((targets_TK.diff(dim=-1) != 0).cumsum(-1), (1, 0))
    sums_TK = torch.zeros_like(grad_TK).scatter_add_(-1, index_TK, grad_TK.gather(-1, order_TK))
    return targets_TK, sums_TK.gather(-1, index_TK)
