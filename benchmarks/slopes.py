"""Slopes of measured quantities over time with their standard errors, and the decision whether one grows.

It knows numbers and their times, and nothing of processes or servers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BLOCKS = 12
"""Parts of the time whose means are fitted. Neighbouring values depend on each other (what is swept falls all at once),
so that the values themselves would make the error too small."""
SIGNIFICANT = 4.14
"""Standard errors beyond which a slope is no chance: 0.1 % one-sided of Student's t with BLOCKS - 2 degrees of freedom,
since one run decides about some fifty quantities."""


@dataclass(frozen=True)
class Slope:
    """A straight line through a quantity's values."""

    mean: float
    per_hour: float
    error_per_hour: float
    """One standard error."""
    growth: float
    """Growth of the line over the time that was measured."""

    def grows(self, resolution: float) -> bool:
        """Return whether the slope is beyond its error, and the growth beyond what is one unit of the quantity."""
        return self.growth >= resolution and self.per_hour > SIGNIFICANT * self.error_per_hour


def slope(times_s: Sequence[float], values: Sequence[float]) -> Slope:
    """Fit the means of BLOCKS equal parts of the time. Raises ValueError if a part has no value."""
    times_h, values_N = np.asarray(times_s) / 3600, np.asarray(values, dtype=float)
    edges = np.linspace(times_h[0], times_h[-1], BLOCKS + 1)
    block_of = np.clip(np.searchsorted(edges, times_h, side="right") - 1, 0, BLOCKS - 1)
    counts = np.bincount(block_of, minlength=BLOCKS)
    if not counts.all():
        raise ValueError(f"each of the {BLOCKS} parts of the time needs a value; they have {counts.tolist()}")
    means = np.bincount(block_of, values_N, BLOCKS) / counts
    middles = np.bincount(block_of, times_h, BLOCKS) / counts
    centred = middles - middles.mean()
    spread = float(centred @ centred)
    per_hour = float(centred @ means) / spread
    rest = means - means.mean() - per_hour * centred
    error = math.sqrt(float(rest @ rest) / (BLOCKS - 2) / spread)
    return Slope(float(values_N.mean()), per_hour, error, per_hour * float(times_h[-1] - times_h[0]))
