"""Config keys of the losses, with their defaults (docs/protocol.md, Training)."""

from collections.abc import Mapping

CLIP_LOW, CLIP_HIGH = "clip_low_threshold", "clip_high_threshold"


def _clip(low: float, high: float) -> dict[str, float]:
    return {CLIP_LOW: low, CLIP_HIGH: high}


LOSS_CONFIG: Mapping[str, Mapping[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": _clip(0.8, 1.2),
    "cispo": _clip(0.0, 4.0),
    "dro": {"beta": 0.05},
    "gspo": _clip(1 - 3e-4, 1 + 4e-4),
}
