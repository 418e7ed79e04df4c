"""Values that a database cannot hold are refused on every route, by the name of the field."""

import importlib
import json
import pkgutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ConfigDict, ValidationError, create_model

import tinker_server.api_schemas
from tests.fake_server import forward_backward_body
from tinker_server.api_schemas import tinker_wire_pb2 as pb
from tinker_server.api_schemas import wire
from tinker_server.api_schemas.base import MAX_DEPTH, MAX_TEXT, Request, too_long, unstorable
from tinker_server.api_schemas.inputs import Datum
from tinker_server.api_schemas.sampling import SampleRequest, SamplingParams
from tinker_server.api_schemas.service import TelemetryRequest
from tinker_server.api_schemas.sessions import CreateSessionRequest, FinishSessionRequest, SearchSessionsRequest
from tinker_server.api_schemas.training import (
    AdamParams,
    CreateModelRequest,
    ForwardBackwardInput,
    LoraConfig,
    OptimStepRequest,
)
from tinker_server.api_schemas.weights import SaveWeightsRequest

TEXTS = st.text(st.sampled_from("a\u00e9\0\ud800\udfff"), max_size=4) | st.just("a" * (MAX_TEXT + 1))
NUMBERS = st.integers(-(2**64), 2**64) | st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1]) | st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | TEXTS | NUMBERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def nested(depth: int) -> Any:
    return json.loads("[" * depth + "]" * depth)


@pytest.mark.parametrize(
    ("model", "fields", "place"),
    [
        (CreateSessionRequest, {"display_name": "a\0"}, "display_name"),
        (CreateSessionRequest, {"tags": ["a", "\0"]}, "tags"),
        (CreateSessionRequest, {"project_id": "\0"}, "project_id"),
        (CreateSessionRequest, {"user_metadata": {"k": {"deeper": ["\0"]}}}, "user_metadata"),
        (CreateSessionRequest, {"user_metadata": {"\0": 1}}, "user_metadata"),
        (CreateSessionRequest, {"user_metadata": {"k": "\ud800"}}, "user_metadata"),
        (CreateSessionRequest, {"user_metadata": {"k": float("nan")}}, "user_metadata"),
        (CreateSessionRequest, {"user_metadata": {"k": 2**63}}, "user_metadata"),
        (CreateSessionRequest, {"user_metadata": {"k": nested(MAX_DEPTH)}}, "user_metadata"),
        (CreateSessionRequest, {"sdk_version": "\udfff"}, "sdk_version"),
        (SearchSessionsRequest, {"user_metadata": {"k": "\0"}}, "user_metadata"),
        (SaveWeightsRequest, {"model_id": "m", "seq_id": 1, "path": "\0"}, "path"),
        (OptimStepRequest, {"model_id": "m", "seq_id": 2**63}, "seq_id"),
        (OptimStepRequest, {"model_id": "m", "seq_id": 1, "optimizer_params": {"x": float("inf")}}, "optimizer_params"),
        (CreateModelRequest, {"session_id": "s", "model_seq_id": 10**30, "base_model": "tiny"}, "model_seq_id"),
        (AdamParams, {"learning_rate": float("inf")}, "learning_rate"),
        (SamplingParams, {"seed": 2**64}, "seed"),
        (SamplingParams, {"stop": ["\0"]}, "stop"),
        (SamplingParams, {"temperature": float("nan")}, "temperature"),
        (TelemetryRequest, {"session_id": "s", "events": [{"a": float("-inf")}]}, "events"),
    ],
)
def test_what_a_database_cannot_hold_is_refused_by_field(
    model: type[Request], fields: dict[str, Any], place: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(fields)
    assert {error["loc"][0] for error in caught.value.errors()} == {place}


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(VALUES)
@pytest.mark.heavy
def test_a_field_is_refused_for_what_a_walk_through_its_value_finds(value: object) -> None:
    """A field that is plainly right is not walked through. Texts have a bound of their own, and a list of numbers is to
    become an array."""
    free = create_model("Free", __base__=Request, value=(object, None))
    is_of_numbers = isinstance(value, list) and {*map(type, value)} <= {int, float}
    expected = None if is_of_numbers else unstorable(value)
    if isinstance(value, str):
        expected = too_long(value) or expected
    problem = None
    try:
        free.model_validate({"value": value})
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
    assert problem == expected


@pytest.mark.parametrize(
    ("model", "field"),
    [
        *((AdamParams, field) for field in AdamParams.model_fields),
        (SamplingParams, "temperature"),
        (SamplingParams, "top_p"),
    ],
)
def test_null_is_refused_where_it_must_stand_for_a_number_that_is_not_finite(model: type[Request], field: str) -> None:
    """A default in its place would be another learning rate, or no clipping."""
    with pytest.raises(ValidationError, match="must be a number: null is what the SDK sends for NaN") as caught:
        model.model_validate({field: None})
    assert [error["loc"] for error in caught.value.errors()] == [(field,)]


LONG = "x" * (MAX_TEXT + 1)


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (OptimStepRequest, {"model_id": LONG, "seq_id": 1}),
        (FinishSessionRequest, {"reason": {"type": "success"}, "detail": LONG}),
        (SampleRequest, {"sampling_session_id": LONG, "sampling_params": {}, "prompt": {"chunks": []}}),
        (SampleRequest, {LONG: 1}),
        (Datum, {"model_input": {"chunks": []}, "loss_fn_inputs": {LONG: {"data": [1], "dtype": "int64"}}}),
        (ForwardBackwardInput, {"data": [], "loss_fn": "ppo", "loss_fn_config": {LONG: 1}}),
    ],
)
def test_texts_and_names_are_bounded_and_the_refusal_does_not_quote_them(
    model: type[Request], fields: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError, match=f"at most {MAX_TEXT} are allowed") as caught:
        model.model_validate(fields)
    assert not any(LONG in str(error["loc"]) + error["msg"] for error in caught.value.errors(include_url=False))


@pytest.mark.parametrize(
    "fields", [{"model_id": LONG}, {"loss_fn": LONG}, {"loss_fn_config": {LONG: 1.0}}, {"data": [{LONG: None}]}]
)
def test_texts_and_names_in_protobuf_are_bounded_too(fields: dict[str, Any]) -> None:
    tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[0])
    data = [pb.Datum(loss_fn_inputs=dict.fromkeys(names, tensor)) for names in fields.pop("data", [])]
    body = pb.ForwardBackwardRequest(**{"model_id": "m", "loss_fn": "ppo"} | fields, seq_id=1, data=data)
    with pytest.raises(wire.MalformedBody, match=f"at most {MAX_TEXT} are allowed"):
        wire.decode_forward_backward(body.SerializeToString())


def test_everything_else_is_kept_as_it_is() -> None:
    metadata: dict[str, object] = {
        "ä\u2028🙂\\u0000": [1.5, -(2**63), 2**63 - 1, True, None, {"": nested(MAX_DEPTH - 4)}]
    }
    assert CreateSessionRequest(user_metadata=metadata).user_metadata == metadata


@pytest.mark.parametrize(("model_id", "loss_fn", "place"), [("a\0", "ppo", "model_id"), ("a", "\0", "loss_fn")])
def test_nor_does_protobuf_bring_nul(model_id: str, loss_fn: str, place: str) -> None:
    with pytest.raises(wire.MalformedBody, match=f"{place}: holds the character NUL"):
        wire.decode_forward_backward(forward_backward_body(model_id, 1, loss_fn=loss_fn))


@pytest.mark.parametrize("seed", [0, -(2**63), 2**63, 2**64 - 1])
def test_a_seed_has_any_64_bits(seed: int) -> None:
    assert SamplingParams(seed=seed).seed == seed


@pytest.mark.parametrize("value", ["2", True, False, "", "two"])
@pytest.mark.parametrize("field", ["num_samples", "topk_prompt_logprobs", "seq_id"])
def test_a_number_that_is_no_number_is_refused_and_not_guessed(field, value):
    body = {"sampling_params": {}, "prompt": {"chunks": []}, "base_model": "m"}
    with pytest.raises(ValidationError, match=rf"(?s){field}.*must be an integer"):
        SampleRequest.model_validate(body | {field: value})
    for name in ("max_tokens", "seed", "top_k"):
        with pytest.raises(ValidationError, match="must be an integer"):
            SamplingParams.model_validate({name: value})
    with pytest.raises(ValidationError, match="must be an integer"):
        LoraConfig.model_validate({"rank": value})


def requests() -> Iterator[type[Request]]:
    """Every type that a client sends."""
    for module in pkgutil.walk_packages(tinker_server.api_schemas.__path__, "tinker_server.api_schemas."):
        importlib.import_module(module.name)
    kinds: list[type[Request]] = [Request]
    while kinds:
        yield (kind := kinds.pop())
        kinds += [one for one in kind.__subclasses__() if one.__module__.startswith("tinker_server.api_schemas.")]


def inner(value: Any) -> Any:
    """The one value of lists and objects in each other."""
    while isinstance(value, list | dict) and value:
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value


def with_one(kind: type[Request], name: str) -> Any:
    """A type with just this field, named `value`."""
    field = kind.model_fields[name]
    value: Any = (field.annotation, field)
    return create_model("Only", __config__=ConfigDict(arbitrary_types_allowed=True), value=value)


FIELDS = [(kind, name) for kind in requests() for name in kind.model_fields]


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=[f"{kind.__name__}.{name}" for kind, name in FIELDS])
def test_no_field_makes_a_number_of_a_text_or_a_boolean(kind: type[Request], name: str) -> None:
    only = with_one(kind, name)
    for value in ("2", True):
        for sent in (value, [value], {"key": value}):
            try:
                got = inner(only.model_validate({"value": sent}).value)
            except ValidationError:
                continue
            assert not isinstance(got, int | float | np.ndarray) or type(got) is type(value)


@pytest.mark.parametrize(
    ("kind", "field", "values"),
    [
        (AdamParams, "learning_rate", [0, 1, 1e-4, 3.0]),
        (SamplingParams, "temperature", [0, 1, 0.7]),
        (SamplingParams, "max_tokens", [1, 2.0]),
        (ForwardBackwardInput, "loss_fn_config", [{"clip": 1}, {"clip": 0.2}, {"clip": "0.2"}]),
    ],
)
def test_numbers_are_taken_however_they_are_written(kind: type[Request], field: str, values: list[Any]) -> None:
    """Python's clients write 1.0 as 1 where a user wrote so."""
    only = with_one(kind, field)
    for value in values:
        assert only.model_validate({"value": value}).value == value
