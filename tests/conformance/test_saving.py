"""Weights saved under names, and what can be done with them; numbers are the checklist's.

pytest tests/conformance/test_saving.py
"""

import time
from datetime import timedelta

import numpy as np
import pyrage
import pytest
import tinker
from safetensors.numpy import load
from tinker import types

from tests.fake_server import Running, fetch
from tests.fakes import ADAPTER

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning"),
]
PROMPT, ONE_TOKEN = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)


def test_024_and_025_weights_that_cannot_be_trained_on_are_refused(
    client: tinker.ServiceClient, rest: tinker.RestClient, training: tinker.TrainingClient
) -> None:
    path, sampler = training.save_state("a").result().path, training.save_weights_for_sampler("a").result().path
    rest.publish_checkpoint_from_tinker_path(path).result()
    resumed = client.create_training_client_from_state(path, user_metadata={"resumed": "yes"}).result()
    assert rest.get_training_run(resumed.model_id).result().user_metadata == {"resumed": "yes"}
    for wrong in (sampler, f"{path}b", "tinker://nothing/weights/a"):
        with pytest.raises((tinker.RequestFailedError, tinker.NotFoundError)):
            client.create_training_client_from_state(wrong).result()


def test_027_older_clients_resume_in_three_calls(training: tinker.TrainingClient, fake: Running) -> None:
    training.optim_step(types.AdamParams()).result()
    path = training.save_state("a").result().path
    info = fake.post("/weights_info", tinker_path=path).json()
    lora = {"rank": info["lora_rank"]} | {name: info[name] for name in ("train_unembed", "train_mlp", "train_attn")}
    session_id = fake.session()
    created = fake.post(
        "/create_model", session_id=session_id, model_seq_id=0, base_model=info["base_model"], lora_config=lora
    )
    model_id = fake.result(created).json()["model_id"]
    loaded = fake.result(fake.post("/load_weights", model_id=model_id, seq_id=1, path=path, optimizer=True)).json()
    assert "error" not in loaded
    stepped = fake.result(fake.post("/optim_step", model_id=model_id, seq_id=2)).json()
    assert stepped["metrics"]["step"] == 2


def test_056_save_state_has_a_path_metadata_and_an_expiry(
    rest: tinker.RestClient, training: tinker.TrainingClient
) -> None:
    path = training.save_state("a", ttl_seconds=7200, user_metadata={"step": "1"}).result().path
    assert path == f"tinker://{training.model_id}/weights/a"
    listed = rest.list_checkpoints(training.model_id).result().checkpoints[0]
    assert listed.user_metadata == {"step": "1"} and listed.expires_at == listed.time + timedelta(hours=2)


def test_057_an_existing_name_needs_overwrite(rest: tinker.RestClient, training: tinker.TrainingClient) -> None:
    rest.publish_checkpoint_from_tinker_path(
        training.save_state("a", user_metadata={"old": "1"}).result().path
    ).result()
    with pytest.raises(tinker.RequestFailedError, match="exists already") as failed:
        training.save_state("a").result()
    assert failed.value.category == "user"
    training.save_state("a", overwrite=True, user_metadata={"new": "1"}).result()
    (replaced,) = rest.list_checkpoints(training.model_id).result().checkpoints
    assert replaced.user_metadata == {"new": "1"} and not replaced.public


def test_057_a_name_whose_weights_have_expired_is_free(
    training: tinker.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are deleted once a minute, and no list shows them before."""
    path = training.save_state("a", ttl_seconds=3600).result().path
    now = time.time()
    with monkeypatch.context() as patch:
        patch.setattr("tinker_server.weights.saving.time.time", lambda: now + 3601)
        assert training.save_state("a").result().path == path


@pytest.mark.parametrize("name", ["a/b", "", "..", ".hidden", "a\n", "x" * 129])
def test_058_bad_names_and_ttls_are_the_users_errors(training: tinker.TrainingClient, name: str) -> None:
    for save in (training.save_state, training.save_weights_for_sampler, training.save_weights_external):
        with pytest.raises(tinker.RequestFailedError) as failed:
            save(name).result()
        assert failed.value.category == "user"
    with pytest.raises(tinker.RequestFailedError, match="ttl_seconds 10"):
        training.save_state("fine", ttl_seconds=10).result()


def test_059_sampler_weights_have_a_path(training: tinker.TrainingClient) -> None:
    path = training.save_weights_for_sampler("s").result().path
    assert path == f"tinker://{training.model_id}/sampler_weights/s"


def test_061_external_weights_are_files_under_both_names(
    rest: tinker.RestClient, training: tinker.TrainingClient
) -> None:
    path = training.save_weights_external("e").result().path
    assert path == f"tinker://{training.model_id}/external_weights/e"
    urls = rest.get_external_weights_urls(path).result().urls
    files = {name: fetch(url) for name, url in urls.items()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= files.keys()
    layer, head = "base_model.model.model.layers.0.self_attn.q_proj", "base_model.model.model.unembed_tokens"
    exported = load(files["adapter_model.safetensors"])
    assert exported.keys() == {f"{name}.lora_{half}.weight" for name in (layer, head) for half in "AB"}
    peft = load(files["peft/adapter_model.safetensors"])
    assert peft.keys() == ADAPTER.keys() and all(np.array_equal(peft[name], ADAPTER[name]) for name in ADAPTER)
    size_bytes = rest.list_checkpoints(training.model_id).result().checkpoints[0].size_bytes
    assert size_bytes == sum(len(content) for content in files.values())


def test_061_external_weights_can_be_encrypted_and_are_then_for_download_alone(
    client: tinker.ServiceClient, rest: tinker.RestClient, training: tinker.TrainingClient
) -> None:
    identities = [pyrage.x25519.Identity.generate() for _ in range(2)]
    recipients = [str(identity.to_public()) for identity in identities]
    path = training.save_weights_external("secret", age_encryption_recipients=recipients).result().path
    urls = rest.get_external_weights_urls(path).result().urls
    assert urls and all(name.endswith(".age") for name in urls)
    encrypted = fetch(urls["adapter_model.safetensors.age"])
    for identity in identities:
        assert len(load(pyrage.decrypt(encrypted, [identity]))) == len(ADAPTER)
    with pytest.raises(tinker.BadRequestError, match=r"is encrypted; take a .*sampler_weights"):
        client.create_sampling_client(model_path=path).result()


@pytest.mark.parametrize("recipients", [["age1nonsense"], ["me"], [], ["age1"] * 11])
def test_061_bad_recipients_are_the_users_errors(training: tinker.TrainingClient, recipients: list[str]) -> None:
    with pytest.raises(tinker.RequestFailedError, match="age_encryption_recipients") as failed:
        training.save_weights_external("secret", age_encryption_recipients=recipients).result()
    assert failed.value.category == "user"
