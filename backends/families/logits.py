"""What some kinds of model do to the logits of their head: scale them, or cap them.

T tokens, V vocabulary
"""

from dataclasses import dataclass

from torch import Tensor
from transformers import PretrainedConfig


@dataclass(frozen=True)
class LogitTransform:
    """logits = scale * cap * tanh(of the head / cap)."""

    scale: float = 1.0
    cap: float | None = None
    """None: no tanh either."""

    @property
    def is_identity(self) -> bool:
        """True for most kinds."""
        return self.scale == 1.0 and self.cap is None

    def apply(self, logits_TV: Tensor) -> Tensor:
        """Overwrite the head's logits with the model's, and return them."""
        if self.cap is not None:
            logits_TV.div_(self.cap).tanh_().mul_(self.cap)
        return logits_TV if self.scale == 1.0 else logits_TV.mul_(self.scale)

    def backward(self, grad_TV: Tensor, logits_TV: Tensor) -> Tensor:
        """Overwrite the gradient of the model's logits, which are given too, with that of the head's; return it."""
        if self.cap is not None:
            share_TV = (logits_TV / (self.scale * self.cap)).square_().neg_().add_(1)  # 1 - tanh^2
            grad_TV.mul_(share_TV)
        return grad_TV if self.scale == 1.0 else grad_TV.mul_(self.scale)


def logit_transform(config: PretrainedConfig) -> LogitTransform:
    """Return the transform of a kind whose trainer and engine are known to agree. That of all others changes nothing:
    the trainer's start refuses those that do more."""
    match config.model_type:
        case "gemma2":
            return LogitTransform(cap=config.final_logit_softcapping)
        case "granite":
            return LogitTransform(scale=1 / config.logits_scaling)
    return LogitTransform()
