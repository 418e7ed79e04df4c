"""Reads from a trace of torch's profiler where the time of decode steps went, by groups of kernels. Needs no torch."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

GROUPS = {
    "LoRA": r"lora|shrink|sgmv|bgmv|punica",
    "norms": r"norm(?!al)|rope(?!r)|rotary|silu|gelu|swiglu|act_and_mul|reshape_and_cache",
    "attention": r"flash|attn|attention|fmha|mha|\bmla|reduce_segments",
    "products": r"gemm|nvjet|cutlass|cublas|splitk|gemv|matmul|dot_kernel|wgmma|xmma|moe|expert",
    "sampling": r"softmax|logits|logprob|gumbel|sampl|top_?[kp]|sort|argmax|_ranks_|min_p|penalt|temperature|bad_words"
    r"|_bias_kernel|distribution|exponential|multinomial|index_fill|index_copy|cub::|nans",
}
"""Patterns of the names of kernels; the first that matches counts. Norms are with rotary embeddings, activations and
writes to the KV cache: they are beside the products of a layer."""
COPIES, REST = "copies", "the rest"
COLUMNS = (*("attention", "products", "LoRA", "norms", "sampling"), COPIES, REST)
_COPYING = ("gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Kernel:
    """A kernel in an average step."""

    group: str
    ms: float
    launches: float


@dataclass(frozen=True)
class StepTimes:
    """An average step. Times of kernels that run at the same time are added up in groups, but counted once in
    `busy_ms`."""

    step_ms: float
    busy_ms: float
    kernels: Mapping[str, Kernel]
    """By name, the longest first."""
    marker: str | None
    """Kernel that begins each step; None: none runs once a step, and the whole trace is divided by its steps."""
    steps_ms: Sequence[float]
    """Each step, by its marker."""

    @property
    def idle_ms(self) -> float:
        """Time of a step in which the GPU runs nothing."""
        return self.step_ms - self.busy_ms

    def group_ms(self, group: str) -> float:
        """Return the time of a group's kernels."""
        return sum(kernel.ms for kernel in self.kernels.values() if kernel.group == group)


def group_of(name: str, category: str = "kernel") -> str:
    """Return the group of a kernel, by its name and its category in the trace."""
    if category in _COPYING:
        return COPIES
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name, re.IGNORECASE)), REST)


def read_steps(events: Sequence[Mapping[str, Any]], num_steps: int) -> StepTimes | None:
    """Return the average of a trace's steps but the first, which waits for the profiler, and the last, whose end is not
    marked. None without kernels, as on a CPU.

    events  those of a Chrome trace, in microseconds
    """
    found = [event for event in events if event.get("cat") in ("kernel", *_COPYING) and event.get("ph") == "X"]
    found.sort(key=lambda event: float(event["ts"]))
    if not found:
        return None
    marker = _marker(found, num_steps)
    marks = [event["ts"] for event in found if event["name"] == marker][1:]
    if len(marks) < 2:
        marker, marks = None, []
    begin, end = (marks[0], marks[-1]) if marks else (found[0]["ts"], max(_end(event) for event in found))
    count = len(marks) - 1 if marks else num_steps
    inside = [event for event in found if begin <= event["ts"] < end]
    sums_us: Counter[str] = Counter()
    for event in inside:
        sums_us[event["name"]] += event["dur"]
    launches = Counter(event["name"] for event in inside)
    groups = {event["name"]: group_of(event["name"], event["cat"]) for event in inside}
    return StepTimes(
        step_ms=(end - begin) / count / 1e3,
        busy_ms=_union([(event["ts"], min(_end(event), end)) for event in inside]) / count / 1e3,
        kernels={
            name: Kernel(groups[name], total_us / count / 1e3, launches[name] / count)
            for name, total_us in sums_us.most_common()
        },
        marker=marker,
        steps_ms=[(after - before) / 1e3 for before, after in pairwise(marks)],
    )


def _marker(events: Sequence[Mapping[str, Any]], num_steps: int) -> str | None:
    """Return the first kernel that runs once a step; of a step at the border, the profiler may have a part."""
    counts = Counter(event["name"] for event in events if event["cat"] == "kernel")  # in order of time
    nearest = min(counts, key=lambda name: abs(counts[name] - num_steps), default=None)
    return nearest if nearest is not None and abs(counts[nearest] - num_steps) <= 1 else None


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def _union(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the time that intervals cover, in order of their begins."""
    total, covered = 0.0, float("-inf")
    for begin, end in intervals:
        total += max(0.0, end - max(begin, covered))
        covered = max(covered, end)
    return total
