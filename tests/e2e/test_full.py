"""The SDK against a real server that trains all weights of its base.

pytest tests/e2e/test_full.py
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import tinker
from tinker import types
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.factories import image, make_renderer, present, prompt, words
from tests.full import assert_scores
from tests.servers import KEY, MODEL, Server, sdk_input
from tests.training import batch, logprobs_of, step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ADAM = types.AdamParams(learning_rate=1e-3, eps=1e-3)
PROMPT = sdk_input(prompt(words(30, 1), image(64, 96, 1), words(20, 2)))


@pytest.fixture
def full_server(tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("full") / "data", {MODEL: tiny_vl}, "--full").start()
    yield running
    assert running.stop() == 0, running.log.read_text()[-4000:]


def scores(sampler: tinker.SamplingClient) -> list[float]:
    return [present(one) for one in sampler.compute_logprobs(PROMPT).result()[1:]]


def kill_trainer(server: Server) -> None:
    """A crash of the process that holds the weights."""
    (rank,) = (
        one
        for one in psutil.Process(server.process.pid).children(recursive=True)
        if one.cmdline()[1:3] == ["-m", "backends.trainer.process"]
    )
    rank.kill()
    rank.wait(60)


def unload(server: Server, model_id: str) -> None:
    """For which the SDK has no method."""
    with httpx.Client(base_url=f"{server.base_url}/api/v1", headers={"X-API-Key": KEY}, timeout=60) as http:
        request_id = http.post("/unload_model", json={"model_id": model_id}).json()["request_id"]
        for _ in range(10):
            answer = http.post("/retrieve_future", json={"request_id": request_id}).json()
            if answer["type"] == "unload_model":
                return
        raise AssertionError(f"the model was not unloaded: {answer}")


def test_all_weights_are_trained_sampled_saved_and_recovered(full_server, renderer, tmp_path):
    service, data = full_server.client(), batch(renderer)
    client = service.create_lora_training_client(MODEL, rank=32).result()
    info = client.get_info()
    assert (info.is_lora, info.lora_rank) == (False, None)
    base = service.create_sampling_client(base_model=MODEL).result()
    fresh, original = logprobs_of(client, data), scores(base)

    step(client, data, ADAM)
    first = client.save_weights_and_get_sampling_client().result()
    of_first = scores(first)
    step(client, data, ADAM)
    saved = client.save_weights_for_sampler("whole").result().path
    second = service.create_sampling_client(model_path=saved).result()
    assert np.abs(np.subtract(of_first, original)).max() > 0.01
    assert np.abs(np.subtract(scores(second), of_first)).max() > 0.01
    assert scores(base) == pytest.approx(original, abs=1e-4)
    assert scores(first) == pytest.approx(of_first, abs=1e-4)

    directory = unpacked(full_server, saved, tmp_path)
    trained = logprobs_of(client, data)
    assert_scores(AutoModelForImageTextToText.from_pretrained(directory), make_renderer(directory), data, trained)
    assert AutoProcessor.from_pretrained(directory).tokenizer is not None

    with pytest.raises(tinker.TinkerError, match=rf"model {client.model_id} trains all weights .*backend\.full"):
        full_server.client().create_lora_training_client(MODEL, rank=8).result()

    state = client.save_state("state").result().path
    kill_trainer(full_server)
    np.testing.assert_allclose(np.concatenate(logprobs_of(client, data)), np.concatenate(trained), atol=1e-4)
    step(client, data, ADAM)
    wanted = logprobs_of(client, data)

    unload(full_server, client.model_id)
    again = service.create_lora_training_client(MODEL, rank=16).result()
    np.testing.assert_equal(logprobs_of(again, data), fresh)
    unload(full_server, again.model_id)
    resumed = service.create_training_client_from_state_with_optimizer(state).result()
    assert resumed.get_info().is_lora is False
    step(resumed, data, ADAM)
    np.testing.assert_allclose(np.concatenate(logprobs_of(resumed, data)), np.concatenate(wanted), atol=1e-5)


def unpacked(server: Server, path: str, folder: Path) -> Path:
    """The archive that `weights.download` gets."""
    run_id, _, name = path.removeprefix("tinker://").split("/")
    url = f"{server.base_url}/api/v1/training_runs/{run_id}/checkpoints/sampler_weights/{name}/archive"
    answer = httpx.get(url, headers={"X-API-Key": KEY}, follow_redirects=True, timeout=60)
    answer.raise_for_status()
    whole = folder / "whole"
    whole.mkdir()
    subprocess.run(["tar", "-xzf", "-", "-C", whole], input=answer.content, check=True)
    return whole
