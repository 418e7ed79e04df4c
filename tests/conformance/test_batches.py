"""Batches in parts, large datums, and numbers that never come, on fakes; numbers are the checklist's.

pytest tests/conformance/test_batches.py
"""

import concurrent.futures
import contextlib
import time
from collections.abc import Iterator

import numpy as np
import pytest
import tinker
from tinker import types

from tests.conformance.wire import Wire
from tests.factories import present
from tests.fake_server import Running, datum, forward_backward_body
from tinker_server.api_schemas import tinker_wire_pb2 as pb
from tinker_server.api_schemas.wire import envelope_of

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
PROTOBUF = {"content-type": "application/x-protobuf"}
ADAM = types.AdamParams()


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory, wire: Wire) -> Iterator[Running]:
    """A server of fakes that takes bodies as large as a real one does."""
    running = Running(tmp_path_factory.mktemp("roomy"), around=wire.around, max_body_bytes=256 << 20)
    yield running
    running.stop()


@contextlib.contextmanager
def parallel_parts(client: tinker.ServiceClient) -> Iterator[None]:
    """Post the parts of a batch as clients without the flag for order do: the first one last."""
    config = client.holder.get_client_config()
    client.holder._client_config = config.model_copy(update={"parallel_fwdbwd_chunks": True})
    try:
        yield
    finally:
        client.holder._client_config = config


def image_datum(num_bytes: int, num_tokens: int = 3) -> types.Datum:
    data = np.random.default_rng(0).bytes(num_bytes)
    return types.Datum(
        model_input=types.ModelInput(chunks=[types.ImageChunk(data=data, format="png", expected_tokens=num_tokens)]),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.arange(num_tokens))},
    )


@pytest.mark.parametrize("in_parallel", [False, True])
def test_031_fifteen_hundred_datums_are_two_requests_and_come_back_in_order(
    wire: Wire, client: tinker.ServiceClient, training: tinker.TrainingClient, in_parallel: bool
) -> None:
    lengths = [1 + index % 7 for index in range(1500)]
    batch = [datum(length) for length in lengths]
    with wire.recording() as requests, parallel_parts(client) if in_parallel else contextlib.nullcontext():
        outputs = training.forward_backward(batch, "cross_entropy").result()
        stepped = training.optim_step(ADAM).result()
    assert [len(output["logprobs"].data) for output in outputs.loss_fn_outputs] == lengths
    assert outputs.metrics == {"loss:sum": 1500} and present(stepped.metrics)["step"] == 1
    parts = [one for one in requests() if one.path == "/forward_backward"]
    numbers = [present(envelope_of(part.body))[:2] for part in parts]
    expected = [(training.model_id, 2), (training.model_id, 1)]
    assert numbers == (expected if in_parallel else expected[::-1])
    sizes = sorted(len(pb.ForwardBackwardRequest.FromString(part.body).data) for part in parts)
    assert sizes == [476, 1024] and all(part.status == 200 for part in parts)


def test_031_a_batch_over_five_megabytes_is_split_by_its_size(roomy: Running, wire: Wire) -> None:
    with tinker.ServiceClient(base_url=roomy.url, api_key="tml-test") as client:
        training = client.create_lora_training_client("tiny", rank=8).result()
        with wire.recording() as requests, parallel_parts(client):
            batch = [image_datum(1000, 2), image_datum(9_000_000, 5), image_datum(1000, 3)]
            outputs = training.forward_backward(batch, "cross_entropy").result()
        assert [len(output["logprobs"].data) for output in outputs.loss_fn_outputs] == [2, 5, 3]
        assert [one.status for one in requests() if one.path == "/forward_backward"] == [200] * 3
        assert present(training.optim_step(ADAM).result().metrics)["step"] == 1


def test_032_ten_parts_in_parallel_with_the_first_last_run_in_order(fake: Running) -> None:
    """The fake takes any loss name, and so each part has its own."""
    model_id = fake.model()
    trainer = fake.backend.tiny.trainer

    def post(number: int) -> str:
        body = forward_backward_body(model_id, number, loss_fn=f"part {number}")
        answer = fake.http.post("/forward_backward", content=body, headers=PROTOBUF)
        assert answer.status_code == 200, answer.text
        request_id: str = answer.json()["request_id"]
        return request_id

    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        last = list(pool.map(post, range(10, 1, -1)))
    assert not [call for call in trainer.calls if call[1] == model_id and call[0] != "create_model"]
    assert len({post(1), *last}) == 10
    stepped = fake.result(fake.post("/optim_step", model_id=model_id, seq_id=11)).json()
    assert stepped["metrics"]["step"] == 1
    ran = [call[0] for call in trainer.calls if call[1] == model_id]
    assert ran == ["create_model", *(f"part {number}" for number in range(1, 11)), "optim_step"]


def test_033_a_datum_of_twenty_megabytes_is_taken_or_refused_with_a_text(
    roomy: Running, training: tinker.TrainingClient
) -> None:
    large = image_datum(20_000_000)
    with tinker.ServiceClient(base_url=roomy.url, api_key="tml-test") as client:
        model = client.create_lora_training_client("tiny", rank=8).result()
        assert model.forward_backward([large], "cross_entropy").result(timeout=60).metrics == {"loss:sum": 1}
    refused, stepped = training.forward_backward([large], "cross_entropy"), training.optim_step(ADAM)
    with pytest.raises(tinker.APIStatusError, match="larger than 1048576 bytes") as caught:
        refused.result(timeout=60)
    assert caught.value.status_code == 413
    with pytest.raises(tinker.RequestFailedError, match="the gradient is incomplete") as incomplete:
        stepped.result(timeout=60)
    assert incomplete.value.category == "user"
    training.forward_backward([datum()], "cross_entropy").result(timeout=60)
    assert present(training.optim_step(ADAM).result(timeout=60).metrics)["step"] == 1


def test_046_an_operation_that_never_left_the_client_leaves_no_hole(
    wire: Wire, training: tinker.TrainingClient
) -> None:
    """An image by location cannot be sent for training: the SDK notices after it has taken a number."""
    pointer = types.ImageAssetPointerChunk(format="png", location="https://nowhere.example/x.png", expected_tokens=3)
    never = types.Datum(model_input=types.ModelInput(chunks=[pointer]), loss_fn_inputs=datum(3).loss_fn_inputs)
    with wire.recording() as requests:
        passed = training.forward_backward([datum()], "cross_entropy")
        unsent = training.forward_backward([never], "cross_entropy")
        stepped, again = training.optim_step(ADAM), training.forward_backward([never], "cross_entropy")
        began, later = time.monotonic(), training.forward_backward([datum()], "cross_entropy")
        for failed in (unsent, again):
            with pytest.raises(Exception, match=r"(?i)image_?asset"):
                failed.result()
        assert passed.result().metrics == later.result().metrics == {"loss:sum": 1}
        assert time.monotonic() - began < 10
        with pytest.raises(tinker.RequestFailedError, match="the gradient is incomplete") as incomplete:
            stepped.result()
        assert incomplete.value.category == "user"
    numbers = [present(envelope_of(one.body))[:2] for one in requests() if one.path == "/forward_backward"]
    assert numbers == [(training.model_id, 1), (training.model_id, 5)]
