"""One trace from submit to result, of a server on fakes that sends to a collector in the test."""

import itertools
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.collector import Collector, Span
from tests.fake_server import Running, forward_backward_body
from tinker_server.auth import keys
from tinker_server.backends.processes.spans import ANSWERED, ProcessSpan, emit
from tinker_server.errors import StartFailed
from tinker_server.observability.tracing import exporter
from tinker_server.observability.tracing.exporter import FLUSH_S
from tinker_server.observability.tracing.hooks import start_tracing
from tinker_server.observability.tracing.trace import MAX_PROCESS_SPANS
from tinker_server.settings import Settings

PROTOBUF = {"content-type": "application/x-protobuf"}
STAGES = {"accept", "queue", "run", "store"}
Serve = Callable[..., Running]
CLIENTS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.close()


@pytest.fixture
def serve(collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts a server that sends to the collector; the next one finds what the one before left."""
    monkeypatch.setattr(exporter, "FLUSH_S", 15.0)  # on a busy machine
    started: list[Running] = []

    def start(**settings: Any) -> Running:
        started.append(Running(tmp_path / "data", **{"otel_endpoint": collector.url} | settings))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def forward_backward(
    server: Running, model_id: str, seq_id: int = 1, loss_fn: str = "cross_entropy", **headers: str
) -> str:
    """Its request_id, once it has a result."""
    body = forward_backward_body(model_id, seq_id, loss_fn=loss_fn)
    submitted = server.http.post("/forward_backward", content=body, headers=PROTOBUF | headers)
    server.result(submitted)
    request_id: str = submitted.json()["request_id"]
    return request_id


def children(trace: dict[str, Span], parent: Span) -> set[str]:
    return {name for name, one in trace.items() if one.parent_id == parent.span_id}


def check_times(trace: dict[str, Span], root: Span) -> None:
    """One stage after the other, all within the root."""
    stages = [trace[name] for name in ("accept", "queue", "run", "store")]
    assert stages[0].began_ns == root.began_ns
    for before, after in itertools.pairwise(stages):
        assert before.began_ns <= before.ended_ns <= after.began_ns
    assert stages[-1].ended_ns <= root.ended_ns
    assert abs(root.ended_ns / 1e9 - time.time()) < 600


def test_an_operation_is_one_trace_from_its_submit_until_its_result_is_stored(
    collector: Collector, serve: Serve
) -> None:
    server = serve()
    model_id = server.model()
    trained = forward_backward(server, model_id)
    sampler_id = server.sampler()
    sampled = server.sample(sampler_id)
    server.result(sampled)
    server.stop()
    assert set(collector.paths) == {"/v1/traces"}

    trace = collector.trace(trained)
    root, work = trace["forward_backward"], trace["trainer.compute_microbatch"]
    assert root.parent_id == "" and set(trace) == {"forward_backward", "trainer.compute_microbatch", *STAGES}
    assert children(trace, root) == STAGES and children(trace, trace["run"]) == {"trainer.compute_microbatch"}
    check_times(trace, root)
    assert trace["run"].began_ns <= work.began_ns <= work.ended_ns <= trace["run"].ended_ns
    assert root.attributes == {
        "tinker.operation": "forward_backward",
        "tinker.request_id": trained,
        "tinker.model_id": model_id,
        "tinker.seq_id": 1,
        "tinker.owner": "local",
        "tinker.base_model": "tiny",
        "tinker.trained_tokens": 1,
    }
    assert (root.service, work.service) == ("tinker-server", "tinker-trainer")
    assert work.attributes == {"tinker.process": "trainer tiny rank 0"}
    assert not any(one.failed for one in trace.values())

    trace = collector.trace(sampled.json()["request_id"])
    root = trace["sample"]
    assert set(trace) == {"sample", "sampler.sample", *STAGES}
    assert children(trace, root) == STAGES and children(trace, trace["run"]) == {"sampler.sample"}
    check_times(trace, root)
    assert root.attributes["tinker.sampling_session_id"] == sampler_id
    tokens = {name: value for name, value in root.attributes.items() if name.endswith("_tokens")}
    assert tokens == {"tinker.prompt_tokens": 1, "tinker.cached_tokens": 0, "tinker.sampled_tokens": 1}
    assert trace["sampler.sample"].service == "tinker-sampler"


def test_a_client_that_has_begun_a_trace_finds_its_operation_in_it(collector: Collector, serve: Serve) -> None:
    server = serve()
    model_id = server.model()
    own = forward_backward(server, model_id, 1, traceparent=CLIENTS)
    malformed = forward_backward(server, model_id, 2, traceparent="00-not-a-trace-01")
    unsampled = forward_backward(server, model_id, 3, traceparent=CLIENTS[:-2] + "00")
    server.stop()
    trace = collector.trace(own)
    assert len(trace) == 6 and {one.trace_id for one in trace.values()} == {CLIENTS.split("-")[1]}
    assert trace["forward_backward"].parent_id == CLIENTS.split("-")[2]
    assert collector.trace(malformed)["forward_backward"].parent_id == ""
    assert unsampled not in {one.attributes.get("tinker.request_id") for one in collector.spans()}


def test_failures_have_a_category_and_traces_hold_no_text_or_key(
    collector: Collector, serve: Serve, tmp_path: Path
) -> None:
    key = keys.add(tmp_path / "keys", "alice")
    server = serve(keys_file=tmp_path / "keys")
    server.http.headers["x-api-key"] = key
    model_id = server.model()
    users = forward_backward(server, model_id, 1, "wrong")
    ours = forward_backward(server, model_id, 2, "broken")
    server.result(server.post("/optim_step", model_id=model_id, seq_id=3, adam_params={"learning_rate": 0.25}))
    server.result(server.post("/save_weights", model_id=model_id, seq_id=4, path="word-of-alice"))
    params = {"max_tokens": 1, "stop": ["word-of-alice"]}
    sampler_id = server.sampler()
    server.result(server.sample(sampler_id, prompt=_text(98_765), sampling_params=params))
    missing = server.post("/create_model", session_id=server.session(), model_seq_id=0, base_model="word-of-alice")
    server.result(missing)
    server.stop()

    trace = collector.trace(users)
    root, work = trace["forward_backward"], trace["trainer.compute_microbatch"]
    assert root.failed and root.attributes["error.type"] == "user" and "tinker.trained_tokens" not in root.attributes
    assert work.failed and work.attributes["error.type"] == "invalid"
    assert collector.trace(ours)["forward_backward"].attributes["error.type"] == "server"
    assert collector.trace(missing.json()["request_id"])["create_model"].failed
    assert {one.attributes.get("tinker.owner", "alice") for one in collector.spans()} == {"alice"}
    for secret in (key.encode(), key.removeprefix("tml-").encode(), b"word-of-alice", b"wrong"):
        assert not any(secret in body for body in collector.bodies), secret
    values = [value for one in collector.spans() for value in one.attributes.values()]
    assert 98_765 not in values and len(values) > 50


def _text(token: int) -> dict[str, Any]:
    return {"chunks": [{"tokens": [token], "type": "encoded_text"}]}


def test_a_trace_goes_on_with_the_server_that_takes_the_operation_up(collector: Collector, serve: Serve) -> None:
    first = serve(drain_s=0)
    sampler_id = first.sampler()
    first.set_gate(first.backend.tiny.sampler.gate, is_open=False)
    submitted = first.sample(sampler_id)
    first.stop()
    cut_off = {one.name: one for one in collector.spans() if one.name in STAGES}
    assert "sample" not in {one.name for one in collector.spans()} and set(cut_off) == {"accept", "queue", "run"}
    second = serve()
    assert second.result(submitted).status_code == 200
    second.stop()
    spans = [one for one in collector.spans() if one.trace_id == cut_off["accept"].trace_id]
    (root,) = [one for one in spans if one.name == "sample"]
    assert root.attributes["tinker.request_id"] == submitted.json()["request_id"]
    assert {one.parent_id for one in spans if one.name in STAGES} == {root.span_id}
    assert sorted(one.name for one in spans) == sorted(
        ["sample", "accept", *2 * ["queue", "run", "sampler.sample"], "store"]
    )
    assert root.began_ns <= cut_off["queue"].ended_ns


def test_a_collector_that_is_away_costs_its_spans_and_one_line(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setattr(exporter, "FLUSH_S", FLUSH_S)
    with socket.socket() as nobody:  # bound, and not listening
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        with caplog.at_level(logging.INFO):
            server = serve(otel_endpoint=f"http://{address}")
            model_id = server.model()
            _until(lambda: len(lines_on_tracing(caplog)) > 0)
            for number in range(1, 6):
                forward_backward(server, model_id, number)
                time.sleep(0.1)
            server.stop()  # fails where it takes too long
    (level, text), *more = lines_on_tracing(caplog)
    assert level == "WARNING" and more == []
    assert f"the collector at {address} takes no traces, which are dropped after some tries: " in text
    assert "Connection refused" in text


def lines_on_tracing(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Level and text of what is logged of it, by whomever."""
    names = ("opentelemetry", "tinker_server.observability.tracing", "urllib3")
    said = [one for one in caplog.records if one.name.startswith(names) and one.levelno > logging.DEBUG]
    return [(one.levelname, one.getMessage()) for one in said]


def test_a_collector_that_is_back_gets_traces_again(
    collector: Collector,
    serve: Serve,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    collector.status = 400
    with caplog.at_level(logging.INFO):
        server = serve()
        model_id = server.model()
        _until(lambda: "takes no traces" in caplog.text)
        collector.status = 200
        request_id = forward_backward(server, model_id)
        server.stop()
    assert "forward_backward" in collector.trace(request_id)
    assert [level for level, _ in lines_on_tracing(caplog)] == ["WARNING", "INFO"]


def _until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until, "it did not come to that within a minute"
        time.sleep(0.02)


def test_a_collector_without_the_extra_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in ("exporter", "collector"):
        monkeypatch.delitem(sys.modules, f"tinker_server.observability.tracing.{module}")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(StartFailed, match=r"otel_endpoint is set, .* pip install '\.\[otel\]'"):
        start_tracing(Settings(data_dir=tmp_path, otel_endpoint="http://127.0.0.1:4318"))


WITHOUT = """
import sys
import tinker_server.__main__
from tinker_server.settings import Settings
from tinker_server.observability.tracing.hooks import start_tracing

tracing = start_tracing(Settings())
print([name for name in sys.modules if "opentelemetry" in name])
"""


def test_a_server_without_a_collector_does_not_import_opentelemetry() -> None:
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", WITHOUT], cwd=root, capture_output=True, text=True, timeout=200)
    assert ended.stdout.strip() == "[]", ended.stderr


def test_a_trace_holds_so_many_spans_of_processes_and_counts_the_others(collector: Collector, serve: Serve) -> None:
    server = serve()
    sampler = server.backend.tiny.sampler
    once = sampler.sample

    async def often(task: Any) -> Any:
        for number in range(MAX_PROCESS_SPANS + 9):
            emit(ProcessSpan("sampler tiny", "Sample", number, number + 1, ANSWERED))
        return await once(task)

    sampler.sample = often  # type: ignore[method-assign]
    sampled = server.sample(server.sampler())
    server.result(sampled)
    server.stop()
    spans = collector.spans()
    (root,) = [one for one in spans if one.name == "sample"]
    assert sum(one.name == "sampler.sample" for one in spans) == MAX_PROCESS_SPANS
    assert root.attributes["tinker.spans_left_out"] == 10
