"""The server does what /openapi.json says, and nothing sent to any route is more than it can bear.

pytest tests/contract/test_openapi.py; OPENAPI_EXAMPLES=1000 OPENAPI_SEED=7 searches longer, and elsewhere.
"""

import os
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fake_server import Running, forward_backward_body
from tests.fakes import FakeBackend
from tinker_server.api_schemas import wire
from tinker_server.api_schemas.old_clients.results import ForwardBackwardJson, SampleJson
from tinker_server.app import create_app
from tinker_server.auth import keys
from tinker_server.settings import Settings

# Threads of other tests' SDK clients draw random numbers at any time, which hypothesis takes for its strategies'.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the .random. module inside strategies")
EXAMPLES = int(os.environ.get("OPENAPI_EXAMPLES", "6"))
SEED = int(os.environ.get("OPENAPI_SEED", "1"))
SPEC = create_app(Settings(), FakeBackend()).openapi()

schema = schemathesis.openapi.from_dict(SPEC)
schema.config.seed = SEED
schema.config.generation.update(modes=list(schemathesis.GenerationMode), max_examples=EXAMPLES)
OPERATIONS = {
    path.rpartition("/")[2]
    for path, methods in SPEC["paths"].items()
    if "SequenceConflict" in methods.get("post", {}).get("responses", {}).get("400", {}).get("description", "")
}
OPERATIONS -= {"forward", "forward_backward"}  # the fake trainer looks at no tensor, and so is no judge of them
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@schemathesis.serializer(wire.PROTOBUF)
def as_it_is(_: schemathesis.SerializationContext, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode(errors="replace")


@pytest.fixture(scope="module")
def server(module_database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    data_dir = tmp_path_factory.mktemp("openapi")
    running = Running(data_dir, database_url=module_database_url, poll_hold_s=0.02, gap_grace_s=0.02)
    yield running
    running.stop()


@pytest.fixture
def known(server: Running) -> dict[str, str]:
    """Names of what there is, by field: what is invented is refused too early to reach far."""
    model_id, sampler_id = server.model(), server.sampler()
    saved = server.result(server.post("/save_weights", model_id=model_id, seq_id=1, path="a")).json()["path"]
    sampled = server.sample(sampler_id).json()["request_id"]
    return {
        "session_id": server.session(),
        "model_id": model_id,
        "run_id": model_id,
        "kind": "weights",
        "name": "a",
        "sampling_session_id": sampler_id,
        "sampler_id": sampler_id,
        "request_id": sampled,
        "path": saved,
        "base_model": "tiny",
        "model_path": saved,
        "tinker_path": saved,
        "source_path": saved,
    }


ALTERNATIVES = {
    "asample": [{"sampling_session_id", "seq_id"}, {"base_model"}, {"model_path"}],
    "create_sampling_session": [{"base_model"}, {"model_path"}],
    "load_weights": [{"session_id", "model_seq_id"}, {"model_id", "seq_id"}],
    "copy_weights": [{"destination_project_id"}, {"session_id", "model_seq_id"}],
    "save_weights_for_sampler": [{"path"}, {"sampling_session_seq_id"}],
}
"""Fields of which a request has one set, and not the others."""


def sensible(name: str, body: Any, known: dict[str, str]) -> Any:
    """Mostly one set of the alternatives, whole, and numbers that no other request has."""
    if not isinstance(body, dict):
        return body
    number = zlib.crc32(repr(body).encode(errors="replace"))
    changed, sets = dict(body), ALTERNATIVES.get(name, [])
    if sets and (chosen := number % (len(sets) + 1)) < len(sets):
        changed = {key: value for key, value in body.items() if not any(key in one for one in sets)}
        changed |= {key: known.get(key, 2 + number if key.endswith("seq_id") else "a") for key in sorted(sets[chosen])}
    if isinstance(changed.get("seq_id"), int) and number % 8:
        changed["seq_id"] = 2 + number
    if changed.get("prompt") == {"chunks": []}:
        changed["prompt"] = {"chunks": [{"tokens": [1]}]}
    return changed


NESTED = (list, dict)


def with_known(value: Any, known: dict[str, str]) -> Any:
    """A request that means what there is, with three of four names; which, depends on the request alone."""
    if isinstance(value, list):  # some have a great many numbers
        return [with_known(part, known) if isinstance(part, NESTED) else part for part in value]
    if not isinstance(value, dict):
        return value
    has_names = any(key in known and isinstance(part, str) for key, part in value.items())
    number = zlib.crc32(repr(value).encode(errors="replace")) if has_names else 0
    return {
        key: known[key] if key in known and isinstance(part, str) and (number >> index) % 4 else with_known(part, known)
        for index, (key, part) in enumerate(value.items())
    }


FEW = settings(
    max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
BATCHES = r"/forward(_backward)?$"
"""Routes whose requests take hypothesis a minute to make."""


@schema.exclude(path_regex=BATCHES).parametrize()
@FEW
def test_every_answer_is_as_described(case: Case, server: Running, known: dict[str, str]) -> None:
    check_answer(case, server, known)


# What is slow is to make the requests, and the routes above are held to both kinds of database.
@pytest.mark.parametrize("module_database_url", ["sqlite"], indirect=True)
@pytest.mark.slow
@schema.include(path_regex=BATCHES).parametrize()
@FEW
def test_every_answer_to_a_batch_is_as_described(case: Case, server: Running, known: dict[str, str]) -> None:
    check_answer(case, server, known)


def check_answer(case: Case, server: Running, known: dict[str, str]) -> None:
    case.path_parameters = with_known(case.path_parameters, known)
    name = case.path.rpartition("/")[2]
    names = {key: text for key, text in known.items() if key != "path" or name == "load_weights"}
    case.body = with_known(sensible(name, case.body, names), names)
    headers = {"x-api-key": "tml-test"}
    answer = case.call_and_validate(base_url=server.url, headers=headers, checks=CHECKS, timeout=20)
    if answer.status_code == 200 and name in OPERATIONS:
        result = server.result(httpx.Response(200, content=answer.content))
        failed = result.json() if "json" in result.headers["content-type"] else {}
        assert failed.get("category") != "server" or "create it again" in failed["error"], failed
    assert server.http.get("/healthz").status_code == 200


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    data_dir = tmp_path_factory.mktemp("guarded")
    keys.add(data_dir / "keys", "alice")
    running = Running(data_dir)
    yield running
    running.stop()


# A parameter of our own: schemathesis names tests after their routes only then, and of several tests of one name
# workers run a single one.
@pytest.mark.parametrize("key", [None], ids=["no key"])
@schema.parametrize()
@FEW
def test_without_a_key_every_answer_is_401_whatever_was_sent(case: Case, guarded: Running, key: None) -> None:
    case.headers.pop("X-API-Key", None)
    answer = case.call(base_url=guarded.url, timeout=20)
    if "security" in case.operation.definition.raw:
        assert answer.status_code == 401, (case.method, case.path, answer.text)
        assert answer.json()["error"] == "Unauthenticated"
    else:
        assert answer.status_code < 500


def properties(described: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(described, dict):
        if isinstance(fields := described.get("properties"), dict):
            yield from fields.items()
        for part in described.values():
            yield from properties(part)


def test_every_field_parameter_and_answer_has_words() -> None:
    fields = list(properties(SPEC["components"]["schemas"]))
    assert len(fields) > 200
    assert [name for name, field in fields if "description" not in field and "const" not in field] == []
    assert all(tag["description"] for tag in SPEC["tags"])
    for path, operations in SPEC["paths"].items():
        for method, operation in operations.items():
            assert operation["description"] and operation["tags"], (method, path)
            assert all(parameter["description"] for parameter in operation.get("parameters", [])), (method, path)
            assert all(answer["description"] for answer in operation["responses"].values()), (method, path)
            assert method not in ("post", "put") or "requestBody" in operation or path.endswith("/publish"), path


def test_the_forms_of_a_result_are_described(server: Running) -> None:
    forms = SPEC["paths"]["/api/v1/retrieve_future"]["post"]["responses"]
    assert set(forms["200"]["content"]) == {"application/json", wire.PROTOBUF}
    assert {"408", "410", "404"} < set(forms)
    server.http.headers["accept"] = "application/json"
    content, headers = forward_backward_body(server.model(), 1), {"content-type": wire.PROTOBUF}
    passed = server.result(server.http.post("/forward_backward", content=content, headers=headers))
    sampled = server.result(server.sample(server.sampler()))
    server.http.headers["accept"] = wire.PROTOBUF
    assert ForwardBackwardJson.model_validate_json(passed.content).loss_fn_outputs[0]["logprobs"].data == [-1.0]
    assert SampleJson.model_validate_json(sampled.content).sequences[0].tokens == [100]
