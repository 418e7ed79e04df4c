"""Forms of clients before 0.25: JSON both ways, explicit nulls, no `type`; numbers are the checklist's.

pytest tests/conformance/test_old_clients.py
"""

import pytest

from tests.fake_server import Running

JSON = {"accept": "application/json"}
DATUM = {
    "model_input": {"chunks": [{"tokens": [1, 2, 3]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
        "weights": {"data": [1.0, 1.0, 1.0], "dtype": "float32", "shape": None},
    },
}
WORK = {"data": [DATUM], "loss_fn": "cross_entropy", "loss_fn_config": None}


@pytest.fixture(scope="module")
def server(fake: Running) -> Running:
    """Asked for JSON alone."""
    fake.http.headers["accept"] = "application/json"
    return fake


def result(server: Running, path: str, /, **body: object) -> dict:
    """As 0.8.1 asks for it."""
    answer: dict = server.result(server.post(path, **body)).json()
    return answer


def model(server: Running) -> str:
    created = result(
        server,
        "/create_model",
        session_id=server.session(),
        model_seq_id=0,
        base_model="tiny",
        user_metadata=None,
        lora_config={"rank": 8},
    )
    model_id: str = created["model_id"]
    return model_id


def test_027_weights_info_then_create_then_load_resumes(server: Running) -> None:
    first = model(server)
    result(server, "/optim_step", model_id=first, seq_id=1, adam_params={})
    saved = result(server, "/save_weights", model_id=first, seq_id=2, path="a", ttl_seconds=None)
    info = server.post("/weights_info", tinker_path=saved["path"]).json()
    assert info["is_lora"] and info["lora_rank"] == 8
    second = model(server)
    loaded = result(server, "/load_weights", model_id=second, seq_id=1, path=saved["path"], optimizer=True)
    assert loaded["model_id"] == second
    assert result(server, "/optim_step", model_id=second, seq_id=2, adam_params={})["metrics"]["step"] == 2


def test_052_missing_and_empty_adam_params_are_the_defaults(server: Running) -> None:
    model_id = model(server)
    for seq_id, adam in ((1, {"adam_params": {}}), (2, {"adam_params": None}), (3, {})):
        assert result(server, "/optim_step", model_id=model_id, seq_id=seq_id, **adam)["metrics"]["step"] == seq_id


@pytest.mark.parametrize("path", ["/forward", "/forward_backward"])
def test_110_training_in_json(server: Running, path: str) -> None:
    model_id = model(server)
    work = {path[1:] + "_input": WORK}
    assert result(server, path, model_id=model_id, seq_id=1, **work) == {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [
            {
                "logprobs": {"data": [-1.0] * 3, "dtype": "float32", "shape": [3]},
                "elementwise_loss": {"data": [1.0] * 3, "dtype": "float32", "shape": [3]},
            }
        ],
        "metrics": {"loss:sum": 1.0},
    }
    assert server.backend.tiny.trainer.calls[-1] == ("cross_entropy", model_id)


def test_110_sampling_in_json(server: Running) -> None:
    submitted = server.sample(server.sampler(), 1, num_samples=2, prompt_logprobs=None, sampling_params={})
    assert len(submitted.json()["sample_sequence_ids"]) == 2
    one = {"stop_reason": "length", "tokens": [100], "logprobs": [-0.5]}
    assert server.result(submitted).json() == {"type": "sample", "sequences": [one, one]}


def test_110_images_of_clients_before_0_6_are_read(server: Running) -> None:
    image = {"data": "aGVsbG8=", "format": "png", "height": 32, "width": 32, "tokens": 4, "type": "image"}
    for chunk in (image, {key: value for key, value in image.items() if key != "type"}):
        answer = server.sample(server.sampler(), prompt={"chunks": [chunk]})
        assert answer.status_code == 200, answer.text


def test_110_an_unloaded_model_is_gone_once_its_queued_work_is_done(server: Running) -> None:
    model_id = model(server)
    stepped = server.post("/optim_step", model_id=model_id, seq_id=1, adam_params={})
    unloaded = server.post("/unload_model", model_id=model_id)
    assert server.post("/unload_model", model_id=model_id).json() == unloaded.json()
    assert server.result(unloaded).json() == {"type": "unload_model", "model_id": model_id}
    assert server.result(stepped).json()["metrics"]["step"] == 1
    failed = result(server, "/optim_step", model_id=model_id, seq_id=2, adam_params={})
    assert failed["category"] == "server" and "create it again" in failed["error"]
