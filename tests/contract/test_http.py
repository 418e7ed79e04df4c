"""The wire as the real SDK speaks it, and raw HTTP where the SDK would not err, on a backend of fakes."""

import asyncio
import gc
import json
import time
import uuid
from collections.abc import Iterator

import httpx
import pytest
import tinker
from tinker import types

from tests.factories import present
from tests.fake_server import Running, datum, forward_backward_body
from tinker_server.api_schemas.ids import sequence_id
from tinker_server.web.parameters import MAX_KEY_LENGTH

# The SDK leaves the connections of its first calls to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@pytest.fixture(scope="module")
def server(module_database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("server"), database_url=module_database_url)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as client:
        yield client
    gc.collect()


def test_a_client_trains_saves_resumes_and_samples(client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client("tiny", rank=8).result()
    info = training.get_info()
    assert (info.lora_rank, info.model_data.model_name, info.model_data.tokenizer_id) == (8, "tiny", "org/tiny")

    passed = training.forward_backward([datum(3), datum(2)], "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-3))
    outputs = passed.result()
    assert [output["logprobs"].tolist() for output in outputs.loss_fn_outputs] == [[-1] * 3, [-1] * 2]
    assert outputs.metrics == {"loss:sum": 2} and stepped.result().metrics == {"grad_norm": 1, "step": 1}

    path = training.save_state("checkpoint").result().path
    assert path == f"tinker://{training.model_id}/weights/checkpoint"
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    assert resumed.model_id != training.model_id and resumed.get_info().lora_rank == 8
    assert present(resumed.optim_step(types.AdamParams()).result().metrics)["step"] == 2
    fresh = client.create_training_client_from_state(path).result()
    assert present(fresh.optim_step(types.AdamParams()).result().metrics)["step"] == 1

    prompt, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)
    sampler = resumed.save_weights_and_get_sampling_client().result()
    sampled = sampler.sample(prompt, num_samples=2, sampling_params=params).result()
    assert [sequence.tokens for sequence in sampled.sequences] == [[2], [2]]
    assert sampled.sequences[0].stop_reason == "length" and sampled.sequences[0].logprobs == [-0.5]

    named = training.save_weights_for_sampler("final").result().path
    from_named = client.create_sampling_client(model_path=named).result()
    assert from_named.get_base_model() == "tiny"
    assert from_named.sample(prompt, 1, params).result().sequences[0].tokens == [1]
    base = client.create_sampling_client(base_model="tiny").result()
    assert base.sample(prompt, 1, params).result().sequences[0].tokens == [100]


def test_the_sdk_raises_a_failed_operation_with_its_category(client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client("tiny", rank=8).result()
    with pytest.raises(tinker.RequestFailedError, match="loss_fn 'wrong' is not known") as caught:
        training.forward_backward([datum()], "wrong").result()  # type: ignore[arg-type]
    assert caught.value.category == "user"
    with pytest.raises(tinker.RequestFailedError, match="incomplete"):
        training.optim_step(types.AdamParams()).result()
    assert training.optim_step(types.AdamParams()).result().metrics is not None
    with pytest.raises(tinker.RequestFailedError, match="served: tiny"):
        client.create_lora_training_client("other", rank=8).result()
    with pytest.raises(tinker.NotFoundError, match="served: tiny"):
        client.create_sampling_client(base_model="other").result()
    with pytest.raises(tinker.BadRequestError, match="the prompt is empty"):
        client.create_sampling_client(base_model="tiny").result().sample(
            types.ModelInput(chunks=[]), 1, types.SamplingParams()
        ).result()


def test_a_number_that_is_not_finite_is_refused_and_not_replaced_by_its_default(client: tinker.ServiceClient) -> None:
    """The SDK sends null for it."""
    training = client.create_lora_training_client("tiny", rank=8).result()
    with pytest.raises(
        tinker.APIStatusError, match="learning_rate: must be a number: null is what the SDK sends for NaN"
    ):
        training.optim_step(types.AdamParams(learning_rate=float("nan"))).result()


def test_a_repeated_session_request_makes_one_session(server: Running) -> None:
    key = {"x-idempotency-key": str(uuid.uuid4())}
    first, second = (server.http.post("/create_session", json={}, headers=key).json() for _ in range(2))
    assert first == second


def test_an_idempotency_key_is_bounded_since_a_database_indexes_it(server: Running) -> None:
    longest, longer = ({b"x-idempotency-key": b"\xff" * length} for length in (MAX_KEY_LENGTH, MAX_KEY_LENGTH + 1))
    first, second = (server.http.post("/create_session", json={}, headers=longest) for _ in range(2))
    assert first.status_code == 200 and first.json() == second.json()
    for path in ("/create_session", "/copy_weights", "/external_weights_upload_start"):
        refused = server.http.post(path, json={}, headers=longer)
        assert refused.status_code == 422, (path, refused.text)
        assert "x-idempotency-key" in refused.json()["detail"] and str(MAX_KEY_LENGTH) in refused.json()["detail"]


def test_a_repeated_submit_has_the_same_request_id_and_another_operation_is_400(server: Running) -> None:
    model_id = server.model()
    first, second = (server.post("/optim_step", model_id=model_id, seq_id=1).json() for _ in range(2))
    assert first == second
    conflict = server.post("/save_weights", model_id=model_id, seq_id=1, path="a")
    assert conflict.status_code == 400 and "seq_id 1" in conflict.json()["detail"]


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
def test_refused_bodies_have_an_answer_with_a_length_and_settle_their_number(server: Running) -> None:
    model_id = server.model()
    headers = {"content-type": "application/x-protobuf"}
    malformed = forward_backward_body(model_id, 1, tokens=b"\1")
    refused = [
        server.http.post("/forward_backward", content=malformed, headers=headers),
        server.http.post("/forward_backward", content=b"\xff", headers=headers),
        server.post("/forward_backward", model_id=model_id, seq_id=9),
        server.post("/optim_step", model_id=model_id, seq_id=2, adam_params={"beta1": 2}),
        server.post("/optim_step", model_id=model_id, seq_id=2**70),
        server.http.post("/optim_step", content=b"{"),
        server.post("/optim_step", model_id=model_id, seq_id=2, typo=1),
        server.post("/load_weights", path="tinker://a/weights/b", model_id=model_id),
    ]
    assert [answer.status_code for answer in refused] == [400, 400, 422, 422, 422, 422, 422, 400]
    assert all(int(answer.headers["content-length"]) > 0 and answer.json()["detail"] for answer in refused)
    assert "datum 0: tokens" in refused[0].json()["detail"] and "adam_params.beta1" in refused[3].json()["detail"]
    started = time.monotonic()
    third = server.http.post("/forward_backward", content=forward_backward_body(model_id, 3), headers=headers)
    server.result(third)
    assert time.monotonic() - started < server.settings.gap_grace_s


def test_unknown_things_are_404(server: Running) -> None:
    session_id = server.session()
    answers = [
        server.post("/retrieve_future", request_id="nothing"),
        server.post("/optim_step", model_id="nothing", seq_id=1),
        server.post("/get_info", model_id="nothing"),
        server.http.get("/samplers/nothing"),
        server.post(
            "/create_sampling_session",
            session_id=session_id,
            sampling_session_seq_id=0,
            model_path="tinker://run/sampler_weights/a",
        ),
        server.http.get("/nothing"),
    ]
    assert [answer.status_code for answer in answers] == [404] * 6


def test_a_body_over_the_limit_is_413_with_a_text(server: Running) -> None:
    refused = server.http.post("/optim_step", content=b"x" * (3 << 20))
    assert refused.status_code == 413 and "larger than 1048576 bytes" in refused.json()["detail"]
    chunked = server.http.post("/optim_step", content=iter([b"x" * (1 << 20)] * 3))
    assert chunked.status_code == 413


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt_alt_tokens_k": 200}, "prompt_alt_tokens_k"),
        ({"record_stability_info": True}, "record_stability_info"),
        ({"base_model": "tiny"}, "base_model"),
        ({"seq_id": None}, "seq_id"),
    ],
)
def test_samples_that_cannot_be_are_refused_by_name(server: Running, fields: dict[str, object], text: str) -> None:
    session_id = server.session()
    created = server.post(
        "/create_sampling_session", session_id=session_id, sampling_session_seq_id=0, base_model="tiny"
    )
    body = {
        "sampling_session_id": created.json()["sampling_session_id"],
        "seq_id": 0,
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [1], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 1},
    }
    refused = server.post("/asample", **(body | fields))
    assert refused.status_code == 400 and text in refused.json()["detail"]
    accepted = server.post("/asample", **body).json()
    assert len(set(accepted["sample_sequence_ids"])) == 2 and server.post("/asample", **body).json() == accepted


def test_a_sampler_knows_the_names_that_a_client_has_of_its_sequences(server: Running) -> None:
    """They are those by which a datum says where its tokens come from."""
    submitted = server.sample(server.sampler(), num_samples=2)
    assert server.result(submitted).status_code == 200
    request_id = server.backend.tiny.sampler.request_ids[-1]
    assert submitted.json()["sample_sequence_ids"] == [sequence_id(request_id, index) for index in range(2)]


def test_two_hundred_submits_at_once_are_all_accepted(server: Running) -> None:
    model_id = server.model()

    async def submit_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=f"{server.url}/api/v1", timeout=20, headers=server.http.headers) as http:
            bodies = [{"model_id": model_id, "seq_id": number} for number in range(1, 201)]
            return await asyncio.gather(*(http.post("/optim_step", json=body) for body in bodies))

    answers = asyncio.run(submit_all())
    assert len({answer.json()["request_id"] for answer in answers}) == 200
    last = server.result(answers[-1])
    assert json.loads(last.content)["metrics"]["grad_norm"] == 1


@pytest.mark.parametrize(
    "path", ["/v1/models/a%00b", "/oai/api/v1/models/a%00", "/api/v1/training_runs/a%00b", "/runs/a%00b?owner=%00"]
)
def test_what_no_database_holds_is_refused_on_every_router(server: Running, path: str) -> None:
    answer = server.http.get(f"{server.url}{path}")
    assert answer.status_code in (404, 422), answer.text
    assert answer.status_code == 422 or path.startswith("/runs"), "pages of no such name are not found"
    if answer.status_code == 422:
        assert "NUL" in answer.text


@pytest.mark.parametrize("path", ["/docs/files?a=b", "/api/v1/healthz/?a=b"])
def test_the_redirect_to_a_path_with_another_slash_keeps_the_prefix_of_a_proxy(server: Running, path: str) -> None:
    bare, query = path.split("?")
    other = f"{bare[:-1] if bare.endswith('/') else f'{bare}/'}?{query}"
    for prefix, kept in (("/training", "/training"), ("/a/b/", "/a/b"), ("//evil.example", ""), (None, "")):
        headers = {} if prefix is None else {"x-forwarded-prefix": prefix}
        answer = server.http.get(f"{server.url}{path}", headers=headers)
        assert (answer.status_code, answer.headers["location"]) == (307, f"{server.url}{kept}{other}"), prefix


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
def test_what_is_the_same_for_everybody_is_made_once(
    server: Running, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = server.http.get(f"{server.url}{path}")
    assert first.status_code == 200 and "create_model" in first.text
    monkeypatch.setattr(server.app, "openapi", lambda: pytest.fail("it was made again"))
    again = server.http.get(f"{server.url}{path}")
    assert again.content == first.content and again.headers["content-type"] == first.headers["content-type"]
    cached = server.http.get(f"{server.url}{path}", headers={"if-none-match": first.headers["etag"]})
    assert (cached.status_code, cached.content) == (304, b"")


@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded", "application/json"])
def test_json_is_taken_by_every_route_as_curl_sends_it(server: Running, content_type: str | None) -> None:
    def post(path: str, **body: object) -> httpx.Response:
        headers = {} if content_type is None else {"content-type": content_type}
        return server.http.post(path, content=json.dumps(body), headers=headers)

    session_id = post("/create_session").json()["session_id"]
    made = post("/create_model", session_id=session_id, model_seq_id=0, base_model="tiny", lora_config={"rank": 8})
    model_id = json.loads(server.result(made).content)["model_id"]
    chunk = {"type": "encoded_text", "tokens": [1]}
    target = {"data": [1], "dtype": "int64", "shape": [1]}
    one = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": {"target_tokens": target}}
    batch = {"data": [one], "loss_fn": "cross_entropy"}
    answers = [
        post("/create_sampling_session", session_id=session_id, sampling_session_seq_id=0, base_model="tiny"),
        post("/get_info", model_id=model_id),
        post("/forward_backward", model_id=model_id, seq_id=1, forward_backward_input=batch),
        post("/optim_step", model_id=model_id, seq_id=2),
        post("/session_heartbeat", session_id=session_id),
    ]
    assert [answer.status_code for answer in answers] == [200] * 5, [answer.text for answer in answers]


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
@pytest.mark.parametrize(
    "path", ["/api/v1/create_session", "/api/v1/optim_step", "/api/v1/asample", "/v1/chat/completions", "/v1/messages"]
)
def test_an_encoding_that_a_route_cannot_read_is_refused_by_its_name(server: Running, path: str, encoding: str) -> None:
    headers = {"content-encoding": encoding, "authorization": "Bearer tml-test"}
    refused = server.http.post(f"{server.url}{path}", content=b"\x28\xb5\x2f\xfd", headers=headers)
    assert refused.status_code == 400
    if path.endswith("asample") and encoding == "zstd":
        assert "the zstd body is corrupt" in refused.text or "cut short" in refused.text
    else:
        assert f"Content-Encoding '{encoding}' is not supported by {path}" in refused.text
