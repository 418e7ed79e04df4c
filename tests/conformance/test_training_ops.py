"""Training operations whose computing does not matter: order, gaps, repeats, bodies; numbers are the checklist's.

pytest tests/conformance/test_training_ops.py
"""

import gc
from collections.abc import Iterator

import pytest
import tinker
import zstandard
from tinker import types

from tests.contract.test_http import Running, datum, forward_backward_body

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
PROTOBUF = {"content-type": "application/x-protobuf"}
ADAM = types.AdamParams()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("training"))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as client:
        yield client
    gc.collect()


def test_030_a_step_submitted_at_once_runs_after_its_gradient(server: Running, client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client("tiny", rank=8).result()
    passed, stepped = training.forward_backward([datum()], "cross_entropy"), training.optim_step(ADAM)
    assert stepped.result().metrics["step"] == 1 and passed.result().metrics == {"loss:sum": 1}
    assert server.backend.tiny.trainer.calls[-2:] == [
        ("cross_entropy", training.model_id),
        ("optim_step", training.model_id),
    ]


def test_034_zstd_bodies_are_read_and_corrupt_or_cut_ones_are_400(server: Running) -> None:
    model_id = server.model()
    headers = PROTOBUF | {"content-encoding": "zstd"}
    body = zstandard.compress(forward_backward_body(model_id, 1))
    for wrong in (b"nonsense", body[:-3], b"", zstandard.compress(b"\0" * (2 << 20))):
        refused = server.http.post("/forward_backward", content=wrong, headers=headers)
        assert refused.status_code == 400 and "zstd" in refused.json()["detail"]
    assert server.result(server.http.post("/forward_backward", content=body, headers=headers)).status_code == 200


def test_039_an_unknown_loss_fails_and_numbering_goes_on(client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client("tiny", rank=8).result()
    failed, stepped = training.forward_backward([datum()], "wrong"), training.optim_step(ADAM)  # type: ignore[arg-type]
    with pytest.raises(tinker.RequestFailedError, match="'wrong'"):
        failed.result()
    assert stepped.result().metrics["step"] == 1


def test_053_the_same_number_twice_is_one_execution(server: Running) -> None:
    model_id = server.model()
    first = server.post("/optim_step", model_id=model_id, seq_id=1)
    server.result(first)
    assert server.post("/optim_step", model_id=model_id, seq_id=1).json() == first.json()
    assert server.backend.tiny.trainer.steps[model_id] == 1


def test_054_a_refused_number_is_not_waited_for(server: Running) -> None:
    model_id = server.model()
    assert server.post("/optim_step", model_id=model_id, seq_id=1, adam_params={"beta1": 5}).status_code == 422
    second = server.http.post("/forward_backward", content=forward_backward_body(model_id, 2), headers=PROTOBUF)
    assert server.result(second).status_code == 200


def test_055_an_unknown_model_is_404(server: Running) -> None:
    for path, body in (("/optim_step", {"seq_id": 1}), ("/get_info", {}), ("/unload_model", {})):
        assert server.post(path, model_id="nobody:train:0", **body).status_code == 404
    content = forward_backward_body("nobody:train:0", 1)
    assert server.http.post("/forward_backward", content=content, headers=PROTOBUF).status_code == 404
    assert server.http.post("/forward_backward", content=content[:-3], headers=PROTOBUF).status_code == 400
