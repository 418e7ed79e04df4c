"""Compares one version's results with another's, and checks each by itself."""

from collections.abc import Iterator
from typing import Any

TOLERANCE = 1e-4
"""Nats, absolute. Token ids and all else must be the same."""


def differences(expected: Any, got: Any, where: str = "") -> Iterator[str]:
    """Every place where two results differ, in words."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for name in {**expected, **got}:
            path = f"{where}.{name}" if where else name
            if name in expected and name in got:
                yield from differences(expected[name], got[name], path)
            else:
                yield f"{path}: {'missing' if name in expected else 'not expected'}"
    elif isinstance(expected, list) and isinstance(got, list):
        if len(expected) != len(got):
            yield f"{where}: {len(got)} values, expected {len(expected)}"
        for number, (one, other) in enumerate(zip(expected, got, strict=False)):
            yield from differences(one, other, f"{where}[{number}]")
    elif isinstance(expected, float) and isinstance(got, float):
        if not abs(expected - got) <= TOLERANCE:
            yield f"{where}: {got:.6f}, expected {expected:.6f}"
    elif type(expected) is not type(got) or expected != got:
        yield f"{where}: {got!r}, expected {expected!r}"


def contradictions(seen: dict[str, Any]) -> Iterator[str]:
    """Return the faults in one version's own results, without the others'."""
    trained, original, restarted = seen["trained"], seen["original"], seen["restarted"]
    if not trained["loss"] < seen["steps"][0]["loss"] - 1:
        yield f"the loss did not fall: {seen['steps'][0]['loss']:.4f}, trained {trained['loss']:.4f}"
    for name in "run", "weights":
        yield from differences(seen["info"], seen["records"][name], f"records.{name}")
    for name in "original", "resumed", "restarted":
        yield from differences(trained, seen[name]["at once"], f"{name}.at once")
    yield from differences(original, seen["resumed"], "resumed")
    if not any(differences(original["later"], restarted["later"])):
        yield "restarted.later: as if the optimizer's state had been loaded"
    yield from differences(
        seen["sampled from a checkpoint"], seen["sampled from a snapshot"], "sampled from a snapshot"
    )
    for number, answer in enumerate(seen["sampled from a checkpoint"]):
        where = f"sampled from a checkpoint[{number}]"
        yield from differences(answer["prompt logprobs"], answer["computed logprobs"], f"{where}.computed logprobs")
        if answer["tokens"][0] == answer["tokens"][1]:
            yield f"{where}: two samples are the same"
