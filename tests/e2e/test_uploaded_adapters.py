"""An exported adapter that is uploaded again samples, trains and exports as the one that was trained.

pytest tests/e2e/test_uploaded_adapters.py; the SDK has no method for it before 0.39, so the upload is by HTTP.
"""

import io
from uuid import uuid4

import httpx
import numpy as np
import pytest
import tinker
import torch
from safetensors.torch import load, save
from tinker import types

from tests.factories import MIXED
from tests.fake_server import fetch
from tests.servers import KEY, MODEL, Server, sdk_input
from tests.training import ADAM, batch, logprobs_of, step
from tests.uploading import FILES, Started

pytestmark = pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning")


@pytest.fixture
def api(server: Server):
    with httpx.Client(base_url=f"{server.base_url}/api/v1", headers={"x-api-key": KEY}, timeout=120) as client:
        yield client


def exported(server: Server, path: str, form: str = "") -> dict[str, bytes]:
    # The SDK keeps a client for each address and key, which is closed at the end of another file.
    rest = tinker.RestClient(base_url=server.base_url, api_key=f"tml-{uuid4()}")
    urls = rest.get_external_weights_urls(path).result().urls
    return {name: fetch(urls[f"{form}{name}"]) for name in FILES}


def trained(service: tinker.ServiceClient, renderer, *, attention_alone: bool = False) -> tinker.TrainingClient:
    client = service.create_lora_training_client(
        MODEL, rank=8, seed=3, train_mlp=not attention_alone, train_unembed=not attention_alone
    ).result()
    for number in range(2):
        step(client, batch(renderer, number), types.AdamParams(learning_rate=2e-2))
    return client


@pytest.mark.parametrize("form", ["", "peft/"], ids=["tools", "peft"])
def test_an_upload_is_the_adapter_that_was_exported(form: str, server: Server, renderer, api: httpx.Client) -> None:
    service = server.client()
    client = trained(service, renderer)
    sampler = client.save_weights_and_get_sampling_client().result()
    original = client.save_weights_external("e").result().path
    finished = Started.of(api, MODEL).put(exported(server, original, form)).finish()
    assert finished.status_code == 200, finished.text
    path = finished.json()["tinker_path"]

    # Exported again, it has the same tensors, bit for bit.
    for again in ("", "peft/"):
        before, after = (load(exported(server, one, again)[FILES[1]]) for one in (original, path))
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)

    # Sampled from, by its path: it scores a prompt with an image as the trained model does.
    for name in ("text", "one image"):
        prompt = sdk_input(MIXED[name])
        uploaded = service.create_sampling_client(model_path=path).result()
        got, expected = (np.array(one.compute_logprobs(prompt).result()[1:], float) for one in (uploaded, sampler))
        np.testing.assert_allclose(got, expected, atol=1e-5)

    # Trained on: the same steps as of the original, whose optimizer starts afresh too.
    state = client.save_state("s").result().path
    loaded = [service.create_training_client_from_state(one).result() for one in (state, path)]
    for number in range(2):
        for one in loaded:
            step(one, batch(renderer, 5 + number), ADAM)
    first, second = (logprobs_of(one, batch(renderer)) for one in loaded)
    for of_first, of_second in zip(first, second, strict=True):
        np.testing.assert_array_equal(of_first, of_second)
    with pytest.raises(tinker.RequestFailedError, match=r"no optimizer\.safetensors"):
        service.create_training_client_from_state_with_optimizer(path).result()


def test_half_precision_and_another_alpha_are_taken(server: Server, renderer, api: httpx.Client) -> None:
    service = server.client()
    client = trained(service, renderer)
    files = exported(server, client.save_weights_external("e").result().path, "peft/")
    half = {name: tensor.to(torch.bfloat16) for name, tensor in load(files[FILES[1]]).items()}
    config = files[FILES[0]].replace(b'"lora_alpha": 32', b'"lora_alpha": 16')
    path = Started.of(api, MODEL).put({FILES[0]: config, FILES[1]: save(half)}).finish().json()["tinker_path"]
    saved = load(exported(server, path, "peft/")[FILES[1]])
    for name, tensor in saved.items():
        expected = half[name].float() * (0.5 if "lora_B" in name else 1)
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected)


def test_an_adapter_without_some_modules_is_taken_with_the_flags_that_say_so(
    server: Server, renderer, api: httpx.Client
) -> None:
    service = server.client()
    flags = {"train_mlp": False, "train_unembed": False}
    client = trained(service, renderer, attention_alone=True)
    files = exported(server, client.save_weights_external("e").result().path)
    refused = Started.of(api, MODEL).put(files).finish()
    assert refused.status_code == 400 and "trains other modules than this model" in refused.json()["detail"]
    finished = Started.of(api, MODEL, **flags).put(files).finish()
    assert finished.status_code == 200, finished.text


def test_files_that_are_wrong_are_refused_by_name_and_the_server_goes_on(
    server: Server, renderer, api: httpx.Client
) -> None:
    service = server.client()
    client = trained(service, renderer)
    files = exported(server, client.save_weights_external("e").result().path, "peft/")
    tensors = load(files[FILES[1]])
    name = sorted(tensors)[0]
    other_rank = {key: one[:4] if "lora_A" in key else one[:, :4].contiguous() for key, one in tensors.items()}
    pickled = io.BytesIO()
    torch.save(tensors, pickled)
    wrong = {
        "NaN or infinity": save({**tensors, name: torch.full_like(tensors[name], float("inf"))}),
        "the LoRA ranks differ": save(other_rank),
        f"{name} has shape ()": save({**tensors, name: torch.tensor(1.0)}),
        f"{name} is of type I64": save({**tensors, name: torch.zeros_like(tensors[name], dtype=torch.int64)}),
        "no safetensors file": pickled.getvalue(),
        "save_embedding_layers=False": save(
            {**tensors, "base_model.model.lm_head.base_layer.weight": torch.ones(1, 1)}
        ),
        "which has no base_model.model.visual.q.lora_A.weight": save(
            {**tensors, "base_model.model.visual.q.lora_A.weight": torch.ones(8, 1)}
        ),
        "which has": save({key: one for key, one in tensors.items() if key != name}),
    }
    begun = Started.of(api, MODEL).put(files)
    for message, content in wrong.items():
        refused = begun.put({FILES[1]: content}).finish()
        assert refused.status_code == 400 and message in refused.json()["detail"], (message, refused.text)
    step(client, batch(renderer), ADAM)
    path = begun.put(files).finish().json()["tinker_path"]
    assert load(exported(server, path, "peft/")[FILES[1]]).keys() == tensors.keys()
