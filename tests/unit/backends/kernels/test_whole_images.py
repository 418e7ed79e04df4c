"""Images whose tokens see each other, beside plain causal attention of all else; the kernels are plain operations."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.attention import (
    PlainKernel,
    kernels_in_plain_operations,
    packed_qkv,
)
from tinker_server.backends.kernels import whole_images
from tinker_server.backends.kernels.flash_attention import Span
from tinker_server.backends.kernels.plain_attention import plain_attention
from tinker_server.backends.kernels.varlen_attention import packed_attention
from tinker_server.backends.protocol import BackendFailed

HEADS, KEY_HEADS, SIZE, SCALE = 4, 2, 8, 0.3
NUM_TOKENS = 6
"""Of an image."""
LENGTHS = [9, 30, 1, 25]
"""The second and the last are long."""
IMAGES = [3, 9, 21, 27, 46, 59]
"""Their first tokens: at the end and at the beginning of samples, and one behind the other."""


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlainKernel]:
    monkeypatch.setattr(whole_images, "_AT_ONCE", 4)
    with kernels_in_plain_operations() as kernel:
        yield kernel


def tensors() -> list[Tensor]:
    return packed_qkv(LENGTHS, (HEADS, KEY_HEADS), SIZE, seed=1)


def bounds() -> Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)


def tokens(firsts: Sequence[int]) -> Tensor:
    return (torch.tensor(firsts)[:, None] + torch.arange(NUM_TOKENS)).flatten()


def attend(qkv: list[Tensor], window: int | None, sinks_H: Tensor | None = None) -> Tensor:
    cu_seqlens = bounds()
    out, _ = packed_attention(
        *qkv, cu_seqlens, cu_seqlens, max(LENGTHS), SCALE, window, sinks_H, tokens(IMAGES), NUM_TOKENS
    )
    assert isinstance(out, Tensor)
    return out


def defined(qkv: list[Tensor], window: int | None, sinks_H: Tensor | None = None) -> Tensor:
    """By one mask of the whole microbatch, and autograd."""
    sample_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    behind_TT = torch.arange(sum(LENGTHS))[:, None] - torch.arange(sum(LENGTHS))
    sees_TT = (behind_TT >= 0) & (behind_TT < (window or sum(LENGTHS)))
    for first in IMAGES:
        sees_TT[first : first + NUM_TOKENS, first : first + NUM_TOKENS] = True
    sees_TT &= sample_T[:, None] == sample_T
    return plain_attention([one.transpose(0, 1)[None] for one in qkv], sees_TT, SCALE, None, sinks_H)[0]


@pytest.mark.parametrize("sinks_H", [None, torch.tensor([-5.0, 0.3, 2.0, 6.0], dtype=torch.float64)])
@pytest.mark.parametrize("window", [None, NUM_TOKENS, 8])
def test_tokens_of_an_image_see_each_other_and_no_others_behind_them(
    kernel: PlainKernel, window: int | None, sinks_H: Tensor | None
) -> None:
    """Forward and backward, in both kernels."""
    qkv = tensors()
    out, expected = attend(qkv, window, sinks_H), defined(qkv, window, sinks_H)
    weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
    got, wanted = (torch.autograd.grad((one * weights).sum(), qkv) for one in (out, expected))
    for one, other in zip((out, *got), (expected, *wanted), strict=True):
        assert (one - other).norm() < 2e-6 * other.norm()  # the log-sum-exp is float32
    causal, _ = packed_attention(*qkv, *(bounds(),) * 2, max(LENGTHS), SCALE, window, sinks_H)
    assert (causal - out).norm() > 0.1 * out.norm()
    of_images = tokens(IMAGES)
    others = [token for token in range(sum(LENGTHS)) if token not in of_images]
    assert torch.equal(causal[others], out[others])


def test_the_operator_with_images_can_be_compiled(kernel: PlainKernel) -> None:
    qkv, cu_seqlens = [one.detach().float().requires_grad_() for one in tensors()], bounds()
    given = (*qkv, cu_seqlens, cu_seqlens, max(LENGTHS), SCALE, NUM_TOKENS, None, tokens(IMAGES), NUM_TOKENS)
    torch.library.opcheck(packed_attention, given)


def test_a_kernel_with_which_images_are_wrong_stops_the_trainer(
    kernel: PlainKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = kernel.backward

    def without_others(grad: Tensor, saved: list[Tensor], span: Span, scale: float) -> tuple[Tensor, ...]:
        """As if the log-sum-exp were its own."""
        *given, _ = saved
        _, lse_HT = kernel.forward(saved[:3], replace(span), scale)
        return backward(grad, [*given, lse_HT], span, scale)

    monkeypatch.setattr(kernel, "backward", without_others)
    with pytest.raises(BackendFailed, match=r"^FlashAttention and tokens of images that see each other is"):
        attend(tensors(), None)
