"""Metrics of a server on fakes as Prometheus reads them, and the records of a finished step."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fake_server import Running, forward_backward_body
from tinker_server.auth import keys
from tinker_server.backends.protocol import EngineBatch, EngineUse

PROTOBUF = {"content-type": "application/x-protobuf"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path / "data")
    yield running
    running.stop()


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[tuple[Running, str]]:
    key = keys.add(tmp_path / "keys", "alice")
    running = Running(tmp_path / "data", keys_file=tmp_path / "keys", metrics_open=True)
    running.http.headers["x-api-key"] = key
    yield running, key
    running.stop()


def scrape(server: Running, **headers: str) -> httpx.Response:
    return httpx.get(f"{server.url}/metrics", headers=headers, timeout=20)


def samples(server: Running) -> dict[tuple[str, ...], float]:
    """By name and the values of its labels in order of their names."""
    answer = scrape(server, **{"x-api-key": server.http.headers["x-api-key"]})
    assert answer.status_code == 200, answer.text
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def train(server: Running, model_id: str, number: int) -> None:
    """A batch and a step."""
    body = forward_backward_body(model_id, 2 * number + 1)
    server.result(server.http.post("/forward_backward", content=body, headers=PROTOBUF))
    step: dict[str, Any] = {"model_id": model_id, "seq_id": 2 * number + 2}
    server.result(server.post("/optim_step", **step, adam_params={"learning_rate": 0.25}))


def test_requests_operations_tokens_queues_and_processes_are_measured(server: Running) -> None:
    train(server, server.model(), 0)
    server.result(server.sample(server.sampler()))
    server.http.get("/nowhere")
    failed = server.post("/unload_model", model_id="no-such-model")
    found = samples(server)
    assert failed.status_code == 404
    assert found["tinker_http_requests_total", "POST", "/api/v1/forward_backward", "200"] == 1
    assert found["tinker_http_requests_total", "POST", "/api/v1/unload_model", "404"] == 1
    assert found["tinker_http_requests_total", "GET", "none", "404"] == 1
    for kind in ("create_model", "forward_backward", "optim_step", "sample"):
        assert found["tinker_operations_accepted_total", kind] == 1
        assert found["tinker_operations_ended_total", kind, "done"] == 1
        assert found["tinker_operation_run_seconds_count", kind] == 1
        assert found["tinker_operation_wait_seconds_count", kind] == 1
    assert found["tinker_tokens_total", "tiny", "training"] == 1
    assert found["tinker_tokens_total", "tiny", "sampled"] == 1
    assert found["tinker_process_up", "tiny", "sampler"] == 1
    assert found["tinker_process_restarts_total", "tiny", "sampler"] == 1
    assert found["tinker_engine_sequences", "tiny", "most"] == 256
    assert found["tinker_engine_batch", "tiny", "waiting"] == 2
    assert found["tinker_engine_kv_cache_used", "tiny"] == 0.375
    assert found["tinker_disk_free_bytes",] > 0


def test_each_of_several_engines_is_measured_beside_their_sum(server: Running) -> None:
    batch = EngineBatch(3, 1, 0.25)
    server.backend.tiny.engines = {0: EngineUse(3, 1, 256, 2, 8, batch), 1: EngineUse(5, 0, 256, 1, 8)}
    found = samples(server)
    assert found["tinker_pool_sequences", "tiny", "0", "running"] == 3
    assert found["tinker_pool_sequences", "tiny", "0", "waiting"] == 1
    assert found["tinker_pool_sequences", "tiny", "1", "running"] == 5
    assert found["tinker_pool_kv_cache_used", "tiny", "0"] == 0.25
    assert ("tinker_pool_kv_cache_used", "tiny", "1") not in found
    assert found["tinker_engine_sequences", "tiny", "most"] == 256


def test_what_waits_and_what_runs_is_counted_by_kind(server: Running) -> None:
    model_id = server.model()
    gate = server.backend.tiny.trainer.gates["cross_entropy"]
    server.set_gate(gate, is_open=False)
    submitted = [
        server.http.post("/forward_backward", content=forward_backward_body(model_id, number), headers=PROTOBUF)
        for number in (1, 2, 3)
    ]
    found = samples(server)
    server.set_gate(gate, is_open=True)
    for one in submitted:
        server.result(one)
    assert found["tinker_operations", "forward_backward", "running"] == 1
    assert found["tinker_operations", "forward_backward", "waiting"] == 2
    assert ("tinker_operations", "forward_backward", "waiting") not in samples(server)


def test_failures_are_counted_by_category(server: Running) -> None:
    model_id = server.model()
    for number, loss_fn in enumerate(("wrong", "broken"), start=1):
        body = forward_backward_body(model_id, number, loss_fn=loss_fn)
        server.result(server.http.post("/forward_backward", content=body, headers=PROTOBUF))
    found = samples(server)
    assert found["tinker_operations_ended_total", "forward_backward", "user_error"] == 1
    assert found["tinker_operations_ended_total", "forward_backward", "server_error"] == 1


def test_labels_name_no_run_session_or_owner(server: Running) -> None:
    model_id = server.model()
    train(server, model_id, 0)
    server.http.get(f"/training_runs/{model_id}")
    text = scrape(server, **{"x-api-key": "tml-test"}).text
    assert "/api/v1/training_runs/{run_id}" in text
    assert model_id not in text and model_id.partition(":")[0] not in text and "local" not in text


def test_metrics_ask_for_a_key_like_everything_else(server: Running) -> None:
    refused = scrape(server)
    assert refused.status_code == 401 and "X-API-Key, or as `Authorization: Bearer KEY`" in refused.text
    training = server.http.post("/create_session", json={}, headers={"x-api-key": ""})
    assert training.status_code == 401 and "send it in the header X-API-Key" in training.text
    assert "Bearer" not in training.text  # which these routes do not read
    read = scrape(server, **{"x-api-key": "tml-test"})
    assert read.status_code == 200 and "_created" not in read.text


def test_a_bearer_token_is_a_key_too_and_a_wrong_one_is_none(keyed: tuple[Running, str]) -> None:
    server, key = keyed
    proxied = {"x-forwarded-for": "127.0.0.1"}
    assert scrape(server, authorization=f"Bearer {key}", **proxied).status_code == 200
    assert scrape(server, authorization="Bearer tml-wrong", **proxied).status_code == 401


def test_an_open_endpoint_is_open_to_this_machine_and_not_to_what_a_proxy_hands_on(keyed: tuple[Running, str]) -> None:
    server, _ = keyed
    assert scrape(server).status_code == 200
    for header in ("x-forwarded-for", "forwarded", "x-real-ip"):
        assert scrape(server, **{header: "for=127.0.0.1" if header == "forwarded" else "127.0.0.1"}).status_code == 401


def test_a_run_goes_on_counting_its_steps_after_a_restart(tmp_path: Path) -> None:
    server = Running(tmp_path / "data")
    model_id = server.model()
    train(server, model_id, 0)
    train(server, model_id, 1)
    server.stop()
    server = Running(tmp_path / "data")
    train(server, model_id, 2)
    store = server.app.state.services.steps
    found = asyncio.run_coroutine_threadsafe(store.recent([model_id], 100), server.loop).result(20)[model_id]
    server.stop()
    assert [(step.seq_id, step.step) for step in found] == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2)]
    assert [step.total_tokens for step in found] == [1, 1, 2, 2, 3, 3]
    assert [(step.loss, step.loss_tokens) for step in found[::2]] == [(1.0, 1)] * 3
    assert [(step.learning_rate, step.grad_norm) for step in found[1::2]] == [(0.25, 1.0)] * 3
    assert all(step.waited_s >= 0 and step.run_s >= 0 for step in found)


def test_the_grafana_dashboard_asks_only_for_what_is_measured(server: Running) -> None:
    train(server, server.model(), 0)
    text = scrape(server, **{"x-api-key": "tml-test"}).text
    dashboard = Path(__file__).parents[2] / "deploy/grafana/tinker-server.json"
    asked = set(re.findall(r"tinker_[a-z_]+", " ".join(json.dumps(one["targets"]) for one in panels(dashboard))))
    assert asked and not {name for name in asked if name not in text}


def panels(dashboard: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(dashboard.read_text())["panels"]
    return found
