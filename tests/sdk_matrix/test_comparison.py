"""The matrix can fail: pytest tests/sdk_matrix"""

import copy
from typing import Any

import pytest

from tests.sdk_matrix.comparison import contradictions, differences


def scores(loss: float) -> dict[str, Any]:
    return {"loss": loss, "logprobs": [[loss, -0.5]]}


def model(later: float) -> dict[str, Any]:
    return {"at once": scores(-9.0), "step": scores(-10.0), "later": scores(later)}


def answer() -> dict[str, Any]:
    scored = [None, -2.0]
    return {"tokens": [[1, 2], [3, 4]], "prompt logprobs": scored, "computed logprobs": list(scored)}


SEEN: dict[str, Any] = {
    "info": {"rank": 8},
    "records": {"run": {"rank": 8}, "weights": {"rank": 8}},
    "steps": [scores(-1.0)],
    "trained": scores(-9.0),
    "original": model(-11.0),
    "resumed": model(-11.0),
    "restarted": model(-10.5),
    "sampled from a checkpoint": [answer()],
    "sampled from a snapshot": [answer()],
}


@pytest.mark.parametrize(
    ("expected", "got", "said"),
    [
        ({"a": [1.0]}, {"a": [1.0 + 9e-5]}, []),
        ({"a": [1.0]}, {"a": [1.0002]}, ["a[0]: 1.000200, expected 1.000000"]),
        ({"a": 1.0}, {"a": float("nan")}, ["a: nan, expected 1.000000"]),
        ({"a": 1.0}, {"a": 1}, ["a: 1, expected 1.0"]),
        ({"a": [3, None]}, {"a": [4, 0.0]}, ["a[0]: 4, expected 3", "a[1]: 0.0, expected None"]),
        ({"a": [1, 2]}, {"a": [1]}, ["a: 1 values, expected 2"]),
        ({"a": 1, "b": 2}, {"a": 1, "c": 2}, ["b: missing", "c: not expected"]),
        ({"a": {"b": "x"}}, {"a": {"b": "y"}}, ["a.b: 'y', expected 'x'"]),
    ],
)
def test_what_differs_is_named(expected: Any, got: Any, said: list[str]) -> None:
    assert list(differences(expected, got)) == said


def test_results_that_make_sense_contradict_nothing() -> None:
    assert list(contradictions(SEEN)) == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("steps", 0, "loss"), -9.0, "the loss did not fall"),
        (("records", "weights", "rank"), 4, "records.weights.rank: 4, expected 8"),
        (("resumed", "at once", "loss"), -8.9, "resumed.at once.loss"),
        (("resumed", "later", "loss"), -10.5, "resumed.later.loss"),
        (("restarted", "at once", "logprobs"), [[-9.0, -0.6]], "restarted.at once.logprobs[0][1]"),
        (("restarted", "later"), scores(-11.0), "restarted.later: as if"),
        (("sampled from a snapshot", 0, "tokens", 1), [3, 5], "sampled from a snapshot[0].tokens[1][1]"),
        (("sampled from a checkpoint", 0, "computed logprobs"), [None, -2.1], "computed logprobs[1]"),
        (("sampled from a checkpoint", 0, "tokens", 1), [1, 2], "two samples are the same"),
    ],
)
def test_results_that_cannot_be_right_are_named(path: tuple[Any, ...], value: Any, said: str) -> None:
    seen = copy.deepcopy(SEEN)
    place = seen
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert any(said in text for text in contradictions(seen))
