"""Promises and their results: holding, failing, logs, cancelling, back-pressure; numbers are the checklist's.

pytest tests/conformance/test_futures.py
"""

import asyncio
import concurrent.futures
import json
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import tinker
from tinker import types

from tests.fake_server import HOLD_S, Running, datum, forward_backward_body
from tinker_server.api_schemas import tinker_wire_pb2 as pb

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
PROMPT, ONE_TOKEN = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)
PROTOBUF = {"content-type": "application/x-protobuf"}


@pytest.fixture(scope="module")
def fake_database_url(module_database_url: str) -> str:
    return module_database_url


@pytest.fixture
def gate(fake: Running) -> Iterator[asyncio.Event]:
    """Holds all samples while it is shut; shut at first, and open again after the test."""
    gate = fake.backend.tiny.sampler.gate
    fake.set_gate(gate, is_open=False)
    yield gate
    fake.set_gate(gate, is_open=True)


def log(fake: Running, sampler_id: str, cursor: int = 0, clone: int = 0, **fields: object) -> dict:
    target = {"type": "sampling_session", "sampling_session_id": sampler_id, "cloned_sampler_id": clone}
    answer = fake.post("/retrieve_futures", target=target, prev_cursor=cursor, **fields)
    assert answer.status_code == 200, answer.text
    body: dict = answer.json()
    return body


def test_079_load_beyond_the_bound_is_429_and_the_client_recovers(
    fake: Running, client: tinker.ServiceClient, gate: asyncio.Event
) -> None:
    sampler = client.create_sampling_client(base_model="tiny").result()
    big = types.ModelInput.from_ints([999] * 200_000)  # 0.8 MB of a bound of 2 MiB
    begun = fake.backend.tiny.sampler.num_begun
    futures = [sampler.sample(big, 1, ONE_TOKEN) for _ in range(4)]
    raw = fake.sampler()
    deadline = time.monotonic() + 10
    fields = {"prompt": {"chunks": [{"tokens": [999] * 200_000}]}}
    number = 0
    while (refused := fake.sample(raw, number, **fields)).status_code != 429 and time.monotonic() < deadline:
        number += 1
    assert refused.status_code == 429 and "are in flight" in refused.json()["detail"]
    assert fake.backend.tiny.sampler.running < 4
    fake.set_gate(gate, is_open=True)
    assert [future.result().sequences[0].tokens for future in futures] == [[100]] * 4
    assert fake.backend.tiny.sampler.num_begun - begun == 4 + number


def test_080_two_thousand_samples_at_once_all_finish(client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model="tiny").result()
    futures = [sampler.sample(PROMPT, 1, ONE_TOKEN) for _ in range(2000)]
    assert sum(future.result().sequences[0].tokens == [100] for future in futures) == 2000


def test_082_an_abandoned_sample_is_cancelled_and_a_later_poll_says_so(
    fake: Running, client: tinker.ServiceClient, gate: asyncio.Event
) -> None:
    sampler = client.create_sampling_client(base_model="tiny").result()
    running = fake.backend.tiny.sampler.running
    future = sampler.sample(PROMPT, 1, ONE_TOKEN)
    deadline = time.monotonic() + 10
    while fake.backend.tiny.sampler.running == running and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises((TimeoutError, asyncio.TimeoutError)):
        asyncio.run(future.result_async(timeout=0.2))
    while fake.backend.tiny.sampler.running > running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert fake.backend.tiny.sampler.running == running

    submitted = fake.sample(fake.sampler())
    for _ in range(2):
        assert fake.post("/cancel_future", request_id=submitted.json()["request_id"]).status_code == 204
    answer = fake.result(submitted).json()
    assert answer["category"] == "user" and "cancelled by its client" in answer["error"]
    assert fake.post("/cancel_future", request_id="f" * 32).status_code == 404
    assert fake.post("/cancel_future", request_id="../x").status_code == 404


def test_082_only_samples_can_be_cancelled(fake: Running) -> None:
    model_id = fake.model()
    loss = fake.backend.tiny.trainer.gates["cross_entropy"]
    fake.set_gate(loss, is_open=False)
    submitted = fake.http.post("/forward_backward", content=forward_backward_body(model_id, 1), headers=PROTOBUF)
    refused = fake.post("/cancel_future", request_id=submitted.json()["request_id"])
    fake.set_gate(loss, is_open=True)
    assert refused.status_code == 400 and "only samples" in refused.json()["detail"]
    assert fake.result(submitted).status_code == 200


def test_083_the_sdk_polls_one_log_for_all_its_samples(client: tinker.ServiceClient) -> None:
    config = client.holder.get_client_config()
    client.holder._client_config = config.model_copy(update={"sample_use_retrieve_futures": True})
    try:
        sampler = client.create_sampling_client(base_model="tiny").result()
        futures = [sampler.sample(PROMPT, 1, ONE_TOKEN) for _ in range(100)]
        assert all(future.result().sequences[0].tokens == [100] for future in futures)
    finally:
        client.holder._client_config = config


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
def test_083_the_log_has_what_finished_since_the_cursor_failures_included(fake: Running, gate: asyncio.Event) -> None:
    sampler_id = fake.sampler()
    ids = [fake.sample(sampler_id, seq_id).json()["request_id"] for seq_id in (0, 1, 10**9 + 5)]
    started = time.monotonic()
    assert log(fake, sampler_id, timeout=0) == {"completions": [], "cursor": 0}
    assert time.monotonic() - started < HOLD_S
    assert log(fake, sampler_id)["completions"] == [] and time.monotonic() - started >= HOLD_S
    fake.post("/cancel_future", request_id=ids[1])
    first = log(fake, sampler_id)
    assert first["completions"] == [{"state": "failed", "request_id": ids[1]}]
    threading.Timer(HOLD_S / 3, lambda: fake.set_gate(gate, is_open=True)).start()
    second = log(fake, sampler_id, first["cursor"])
    (done,) = second["completions"]
    size = len(fake.post("/retrieve_future", request_id=ids[0]).content)
    assert done == {"state": "finished", "request_id": ids[0], "response_payload_uncompressed_size": size}
    assert log(fake, sampler_id, second["cursor"], timeout=0) == {"completions": [], "cursor": second["cursor"]}
    assert [one["request_id"] for one in log(fake, sampler_id, clone=1)["completions"]] == [ids[2]]
    whole = log(fake, sampler_id)["completions"]
    assert [one["request_id"] for one in whole] == [ids[1], ids[0]]  # cursor 0 begins again


def test_083_acknowledged_results_are_deleted_and_foreign_ones_are_not(fake: Running) -> None:
    mine, foreign = fake.sampler(), fake.sampler()
    submitted = [fake.sample(mine), fake.sample(foreign)]
    ids = [one.json()["request_id"] for one in submitted]
    for one in submitted:
        assert fake.result(one).status_code == 200
    cursor = log(fake, mine)["cursor"]
    log(fake, mine, cursor, retrieved_request_ids=[*ids, "nonsense"], timeout=0)
    deadline = time.monotonic() + 5
    while fake.post("/retrieve_future", request_id=ids[0]).status_code != 410 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert fake.post("/retrieve_future", request_id=ids[0]).status_code == 410
    assert fake.post("/retrieve_future", request_id=ids[1]).status_code == 200
    again = fake.sample(mine).json()
    assert again["request_id"] == ids[0]  # a repeat of the submit does not run again
    unknown = {"type": "sampling_session", "sampling_session_id": "nothing"}
    assert fake.post("/retrieve_futures", target=unknown).status_code == 404


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
def test_086_an_unfinished_poll_is_held_then_408_and_a_result_wakes_it(fake: Running, gate: asyncio.Event) -> None:
    submitted = fake.sample(fake.sampler())
    started = time.monotonic()
    pending = fake.post("/retrieve_future", request_id=submitted.json()["request_id"], allow_metadata_only=True)
    assert pending.status_code == 408 and time.monotonic() - started >= HOLD_S
    assert pending.json()["queue_state"] == "active" and pending.json()["type"] == "try_again"
    threading.Timer(HOLD_S / 3, lambda: fake.set_gate(gate, is_open=True)).start()
    started = time.monotonic()
    assert fake.post("/retrieve_future", request_id=submitted.json()["request_id"]).status_code == 200
    assert time.monotonic() - started < HOLD_S


def test_087_one_result_serves_every_way_of_asking(client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client("tiny", rank=8).result()
    future = training.forward_backward([datum()], "cross_entropy")
    assert future.result().metrics == future.result().metrics == {"loss:sum": 1}
    assert future.future().result().metrics == {"loss:sum": 1}

    async def ask() -> list[dict[str, float]]:
        first, second = (training.forward_backward([datum()], "cross_entropy") for _ in range(2))
        return [(await first).metrics, (await second.result_async()).metrics]

    assert asyncio.run(ask()) == [{"loss:sum": 1}] * 2


@pytest.mark.parametrize(("loss", "category"), [("wrong", "user"), ("broken", "server")])
def test_088_a_failed_operation_names_its_category(client: tinker.ServiceClient, loss: str, category: str) -> None:
    training = client.create_lora_training_client("tiny", rank=8).result()
    with pytest.raises(tinker.RequestFailedError) as caught:
        training.forward_backward([datum()], loss).result()  # type: ignore[arg-type]
    assert caught.value.category == category and caught.value.request_id


@pytest.mark.parametrize("request_id", ["nothing", "", "0", "f" * 32, "a\0b", "../../etc", "x" * 10_000])
def test_089_unknown_and_malformed_ids_are_404(fake: Running, request_id: str) -> None:
    refused = fake.post("/retrieve_future", request_id=request_id)
    assert refused.status_code == (422 if "\0" in request_id else 404) and refused.json()["detail"]


def test_089_an_expired_result_is_410(fake: Running) -> None:
    submitted = fake.sample(fake.sampler())
    fake.result(submitted)
    futures = fake.app.state.services.futures
    asyncio.run_coroutine_threadsafe(futures.expire(time.time() + 1), fake.loop).result(5)
    assert fake.post("/retrieve_future", request_id=submitted.json()["request_id"]).status_code == 410


def test_090_the_same_id_again_gives_the_same_bytes(fake: Running) -> None:
    submitted = fake.sample(fake.sampler())
    assert fake.result(submitted).content == fake.result(submitted).content


def test_090_a_result_lost_on_the_wire_is_delivered_at_the_next_poll(fake: Running, gate: asyncio.Event) -> None:
    request_id = fake.sample(fake.sampler()).json()["request_id"]
    with pytest.raises(httpx.ReadTimeout):
        fake.http.post("/retrieve_future", json={"request_id": request_id}, timeout=HOLD_S / 10)
    fake.set_gate(gate, is_open=True)
    assert fake.post("/retrieve_future", request_id=request_id).status_code == 200


def test_091_a_large_result_gives_its_size_once_if_that_is_allowed(fake: Running, client: tinker.ServiceClient) -> None:
    submitted = fake.sample(fake.sampler(), num_samples=100_000)
    plain = fake.result(submitted).content
    body = {"request_id": submitted.json()["request_id"], "allow_metadata_only": True}
    assert fake.post("/retrieve_future", **body).json() == {
        "status": "complete_metadata",
        "response_payload_size": len(plain),
    }
    assert fake.post("/retrieve_future", **body).content == plain
    small = fake.sample(fake.sampler()).json()
    assert fake.post("/retrieve_future", request_id=small["request_id"], allow_metadata_only=True).content != b""
    sampler = client.create_sampling_client(base_model="tiny").result()
    assert len(sampler.sample(PROMPT, 100_000, ONE_TOKEN).result().sequences) == 100_000


def test_092_results_are_protobuf_where_accepted_and_else_json(fake: Running) -> None:
    submitted = fake.sample(fake.sampler())
    body = {"request_id": submitted.json()["request_id"]}
    fake.result(submitted)
    for accept, kind in (
        ("application/x-protobuf", "application/x-protobuf"),
        ("application/x-protobuf, application/json", "application/x-protobuf"),
        ("application/json", "application/json"),
        ("*/*", "application/json"),
    ):
        answer = fake.http.post("/retrieve_future", json=body, headers={"accept": accept})
        assert answer.headers["content-type"] == kind
    assert answer.json() == {
        "type": "sample",
        "sequences": [{"stop_reason": "length", "tokens": [100], "logprobs": [-0.5]}],
    }


def test_093_nan_metrics_are_not_in_json(fake: Running) -> None:
    model_id = fake.model()
    content = forward_backward_body(model_id, 1, loss_fn="nan")
    submitted = fake.http.post("/forward_backward", content=content, headers=PROTOBUF)
    metrics = pb.ForwardBackwardOutput.FromString(fake.result(submitted).content).metrics
    assert set(metrics) == {"loss:sum", "nan:mean"}
    as_json = fake.http.post(
        "/retrieve_future", json={"request_id": submitted.json()["request_id"]}, headers={"accept": "application/json"}
    )
    assert json.loads(as_json.content, parse_constant=pytest.fail)["metrics"] == {"loss:sum": 1}


def test_094_every_400_has_a_body_and_its_length(fake: Running) -> None:
    sampler_id = fake.sampler()
    deep = b'{"a":' * 100_000
    refused = [
        fake.http.post("/forward_backward", content=b"\xff\xff", headers=PROTOBUF),
        fake.http.post("/forward_backward", content=b"", headers={"content-type": "text/plain"}),
        fake.sample(sampler_id, prompt={"chunks": []}),
        fake.sample(sampler_id, seq_id=-1),
        fake.http.post("/asample", content=deep),
        fake.http.post("/create_session", content=deep),
        fake.http.post("/retrieve_future", content=b"\x80"),
    ]
    assert [answer.status_code for answer in refused] == [400, 400, 400, 400, 422, 422, 400]
    assert all(int(answer.headers["content-length"]) > 0 and answer.json()["detail"] for answer in refused)


def test_094_a_body_of_a_gibibyte_is_413_before_it_is_read(fake: Running) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(1024):
            yield b"x" * (1 << 20)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        refused = pool.submit(lambda: fake.http.post("/optim_step", content=endless()))
        assert refused.result(20).status_code == 413
    assert fake.http.get("/healthz").status_code == 200
