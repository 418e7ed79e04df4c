"""Training operations whose computing does not matter: order, gaps, repeats, bodies; numbers are the checklist's.

pytest tests/conformance/test_training_ops.py
"""

import time

import pytest
import tinker
import torch
import zstandard
from tinker import types

from tests.conformance.wire import Wire, paths
from tests.factories import present
from tests.fake_server import HOLD_S, Running, datum, forward_backward_body

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
PROTOBUF = {"content-type": "application/x-protobuf"}
ADAM = types.AdamParams()


@pytest.mark.flaky(reruns=1)  # holds a limit of wall time
def test_028_a_submit_is_answered_before_the_work_is_done(fake: Running) -> None:
    model_id = fake.model()
    gate = fake.backend.tiny.trainer.gates["cross_entropy"]
    fake.set_gate(gate, is_open=False)
    began = time.monotonic()
    submitted = fake.http.post("/forward_backward", content=forward_backward_body(model_id, 1), headers=PROTOBUF)
    assert submitted.json()["request_id"] and time.monotonic() - began < HOLD_S
    assert fake.post("/retrieve_future", request_id=submitted.json()["request_id"]).status_code == 408
    fake.set_gate(gate, is_open=True)
    assert fake.result(submitted).headers["content-type"] == "application/x-protobuf"


def test_030_a_step_submitted_at_once_runs_after_its_gradient(fake: Running, client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client("tiny", rank=8).result()
    passed, stepped = training.forward_backward([datum()], "cross_entropy"), training.optim_step(ADAM)
    assert present(stepped.result().metrics)["step"] == 1 and passed.result().metrics == {"loss:sum": 1}
    assert fake.backend.tiny.trainer.calls[-2:] == [
        ("cross_entropy", training.model_id),
        ("optim_step", training.model_id),
    ]


def test_034_zstd_bodies_are_read_and_corrupt_or_cut_ones_are_400(fake: Running) -> None:
    model_id = fake.model()
    headers = PROTOBUF | {"content-encoding": "zstd"}
    body = zstandard.compress(forward_backward_body(model_id, 1))
    for wrong in (b"nonsense", body[:-3], b"", zstandard.compress(b"\0" * (2 << 20))):
        refused = fake.http.post("/forward_backward", content=wrong, headers=headers)
        assert refused.status_code == 400 and "zstd" in refused.json()["detail"]
    assert fake.result(fake.http.post("/forward_backward", content=body, headers=headers)).status_code == 200


def test_039_an_unknown_loss_fails_and_numbering_goes_on(client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client("tiny", rank=8).result()
    failed, stepped = training.forward_backward([datum()], "wrong"), training.optim_step(ADAM)  # type: ignore[arg-type]
    with pytest.raises(tinker.RequestFailedError, match="'wrong'"):
        failed.result()
    with pytest.raises(tinker.RequestFailedError, match="incomplete"):
        stepped.result()
    assert present(training.optim_step(ADAM).result().metrics)["step"] == 1


def test_049_a_traced_loss_costs_no_request_and_runs_on_the_client(
    fake: Running, wire: Wire, client: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    """The flag for losses on the server is off; their route is not there either."""

    def loss(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = -(logprobs * weights).sum()
        return value, {"custom/likelihood:sum": value}

    assert not client.holder.get_client_config().custom_loss_server_side
    with wire.recording() as requests:
        handle = client.create_custom_loss(loss, input_ranks={"logprobs": 1, "weights": 1}).result()
    assert requests() == [] and handle.loss_id is None
    with wire.recording() as requests:
        output = training.forward_backward_custom([datum(3), datum(2)], handle).result()
    assert paths(requests()) == ["/forward_backward"] * 2
    assert output.metrics["loss:sum"] == output.metrics["custom/likelihood:sum"] == 5
    assert fake.post("/create_custom_loss", session_id=client.holder.get_session_id()).status_code == 404


def test_051_another_optimizers_parameters_are_refused(training: tinker.TrainingClient) -> None:
    refused = training.optim_step(types.DimuonParams(learning_rate=0.1))
    stepped = training.optim_step(ADAM)
    with pytest.raises(tinker.RequestFailedError, match=r"optimizer_params is not supported.*adamw") as failed:
        refused.result()
    assert failed.value.category == "user"
    assert present(stepped.result().metrics)["step"] == 1


def test_053_the_same_number_twice_is_one_execution(fake: Running) -> None:
    model_id = fake.model()
    first = fake.post("/optim_step", model_id=model_id, seq_id=1)
    fake.result(first)
    assert fake.post("/optim_step", model_id=model_id, seq_id=1).json() == first.json()
    assert fake.backend.tiny.trainer.steps[model_id] == 1


def test_054_a_refused_number_is_not_waited_for(fake: Running) -> None:
    model_id = fake.model()
    assert fake.post("/optim_step", model_id=model_id, seq_id=1, adam_params={"beta1": 5}).status_code == 422
    second = fake.http.post("/forward_backward", content=forward_backward_body(model_id, 2), headers=PROTOBUF)
    assert fake.result(second).status_code == 200


def test_055_an_unknown_model_is_404(fake: Running) -> None:
    for path, body in (("/optim_step", {"seq_id": 1}), ("/get_info", {}), ("/unload_model", {})):
        assert fake.post(path, model_id="nobody:train:0", **body).status_code == 404
    content = forward_backward_body("nobody:train:0", 1)
    assert fake.http.post("/forward_backward", content=content, headers=PROTOBUF).status_code == 404
    assert fake.http.post("/forward_backward", content=content[:-3], headers=PROTOBUF).status_code == 400


@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")
@pytest.mark.parametrize("after", ["nothing", "a step", "a forward pass", "a gradient", "a failure", "a sampler"])
def test_062_a_state_can_be_loaded_into_a_model_at_any_time(
    client: tinker.ServiceClient, training: tinker.TrainingClient, after: str
) -> None:
    for _ in range(2):
        training.optim_step(ADAM).result()
    path = training.save_state("a").result().path
    for load, step in (("load_state", 1), ("load_state_with_optimizer", 3)):
        model = client.create_lora_training_client("tiny", rank=8).result()
        match after:
            case "a step":
                model.optim_step(ADAM).result()
            case "a forward pass":
                model.forward([datum(3)], "cross_entropy").result()
            case "a gradient":
                model.forward_backward([datum(3)], "cross_entropy").result()
            case "a failure":
                with pytest.raises(tinker.RequestFailedError):
                    model.forward_backward([datum(3)], "wrong").result()  # type: ignore[arg-type]
            case "a sampler":
                model.save_weights_and_get_sampling_client().result()
        assert getattr(model, load)(path).result().path == path
        assert present(model.optim_step(ADAM).result().metrics)["step"] == step
