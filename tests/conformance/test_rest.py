"""Runs, checkpoints, sessions and records, through the SDK's own clients and command line; numbers are the checklist's.

pytest tests/conformance/test_rest.py
"""

import gc
import io
import json
import os
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import numpy as np
import pyrage
import pytest
import tinker
from safetensors.numpy import load
from tinker import types
from tinker.types.session_search_request import SessionSearchRequest
from tinker.types.session_status_query import ActiveSessionStatusQuery, ClientFinishedSessionStatusQuery

from tests.contract.test_http import Running, datum
from tests.fakes import ADAPTER

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning"),
]
PROMPT, ONE_TOKEN = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def server(module_database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("rest"), database_url=module_database_url)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(
        base_url=server.url, api_key="tml-test", user_metadata={"team": "red"}, project_id="first"
    )
    with client:
        yield client
    gc.collect()


@pytest.fixture(scope="module")
def rest(server: Running) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key="tml-test")


@pytest.fixture
def model(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client("tiny", rank=8, user_metadata={"renderer_name": "plain"}).result()


def session_of(model: tinker.TrainingClient) -> str:
    return model.model_id.partition(":train:")[0]


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read()


def tinker_cli(server: Running, home: Path, *arguments: str) -> str:
    environment = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-test", "HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-m", "tinker.cli", *arguments],
        env={**os.environ, **environment},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_024_and_025_weights_that_cannot_be_trained_on_are_refused(
    client: tinker.ServiceClient, rest: tinker.RestClient, model: tinker.TrainingClient
) -> None:
    path, sampler = model.save_state("a").result().path, model.save_weights_for_sampler("a").result().path
    rest.publish_checkpoint_from_tinker_path(path).result()
    resumed = client.create_training_client_from_state(path, user_metadata={"resumed": "yes"}).result()
    assert rest.get_training_run(resumed.model_id).result().user_metadata == {"resumed": "yes"}
    for wrong in (sampler, f"{path}b", "tinker://nothing/weights/a"):
        with pytest.raises((tinker.RequestFailedError, tinker.NotFoundError)):
            client.create_training_client_from_state(wrong).result()


def test_027_older_clients_resume_in_three_calls(model: tinker.TrainingClient, server: Running) -> None:
    model.optim_step(types.AdamParams()).result()
    path = model.save_state("a").result().path
    info = server.post("/weights_info", tinker_path=path).json()
    lora = {"rank": info["lora_rank"]} | {name: info[name] for name in ("train_unembed", "train_mlp", "train_attn")}
    session_id = server.session()
    created = server.post(
        "/create_model", session_id=session_id, model_seq_id=0, base_model=info["base_model"], lora_config=lora
    )
    model_id = server.result(created).json()["model_id"]
    loaded = server.result(server.post("/load_weights", model_id=model_id, seq_id=1, path=path, optimizer=True)).json()
    assert "error" not in loaded
    stepped = server.result(server.post("/optim_step", model_id=model_id, seq_id=2)).json()
    assert stepped["metrics"]["step"] == 2


def test_056_save_state_has_a_path_metadata_and_an_expiry(
    rest: tinker.RestClient, model: tinker.TrainingClient
) -> None:
    path = model.save_state("a", ttl_seconds=7200, user_metadata={"step": "1"}).result().path
    assert path == f"tinker://{model.model_id}/weights/a"
    listed = rest.list_checkpoints(model.model_id).result().checkpoints[0]
    assert listed.user_metadata == {"step": "1"} and listed.expires_at - listed.time == timedelta(hours=2)


def test_057_an_existing_name_needs_overwrite(rest: tinker.RestClient, model: tinker.TrainingClient) -> None:
    rest.publish_checkpoint_from_tinker_path(model.save_state("a", user_metadata={"old": "1"}).result().path).result()
    with pytest.raises(tinker.RequestFailedError, match="exists already") as failed:
        model.save_state("a").result()
    assert failed.value.category == "user"
    model.save_state("a", overwrite=True, user_metadata={"new": "1"}).result()
    (replaced,) = rest.list_checkpoints(model.model_id).result().checkpoints
    assert replaced.user_metadata == {"new": "1"} and not replaced.public


@pytest.mark.parametrize("name", ["a/b", "", "..", ".hidden", "a\n", "x" * 129])
def test_058_bad_names_and_ttls_are_the_users_errors(model: tinker.TrainingClient, name: str) -> None:
    for save in (model.save_state, model.save_weights_for_sampler, model.save_weights_external):
        with pytest.raises(tinker.RequestFailedError) as failed:
            save(name).result()
        assert failed.value.category == "user"
    with pytest.raises(tinker.RequestFailedError, match="ttl_seconds 10"):
        model.save_state("fine", ttl_seconds=10).result()


def test_059_sampler_weights_have_a_path(model: tinker.TrainingClient) -> None:
    path = model.save_weights_for_sampler("s").result().path
    assert path == f"tinker://{model.model_id}/sampler_weights/s"


def test_061_external_weights_are_files_under_both_names(rest: tinker.RestClient, model: tinker.TrainingClient) -> None:
    path = model.save_weights_external("e").result().path
    assert path == f"tinker://{model.model_id}/external_weights/e"
    urls = rest.get_external_weights_urls(path).result().urls
    files = {name: fetch(url) for name, url in urls.items()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= files.keys()
    layer, head = "base_model.model.model.layers.0.self_attn.q_proj", "base_model.model.model.unembed_tokens"
    exported = load(files["adapter_model.safetensors"])
    assert exported.keys() == {f"{name}.lora_{half}.weight" for name in (layer, head) for half in "AB"}
    peft = load(files["peft/adapter_model.safetensors"])
    assert peft.keys() == ADAPTER.keys() and all(np.array_equal(peft[name], ADAPTER[name]) for name in ADAPTER)
    size_bytes = rest.list_checkpoints(model.model_id).result().checkpoints[0].size_bytes
    assert size_bytes == sum(len(content) for content in files.values())


def test_061_external_weights_can_be_encrypted(rest: tinker.RestClient, model: tinker.TrainingClient) -> None:
    identities = [pyrage.x25519.Identity.generate() for _ in range(2)]
    recipients = [str(identity.to_public()) for identity in identities]
    path = model.save_weights_external("secret", age_encryption_recipients=recipients).result().path
    urls = rest.get_external_weights_urls(path).result().urls
    assert urls and all(name.endswith(".age") for name in urls)
    encrypted = fetch(urls["adapter_model.safetensors.age"])
    for identity in identities:
        assert len(load(pyrage.decrypt(encrypted, [identity]))) == len(ADAPTER)


@pytest.mark.parametrize("recipients", [["age1nonsense"], ["me"], [], ["age1"] * 11])
def test_061_bad_recipients_are_the_users_errors(model: tinker.TrainingClient, recipients: list[str]) -> None:
    with pytest.raises(tinker.RequestFailedError, match="age_encryption_recipients") as failed:
        model.save_weights_external("secret", age_encryption_recipients=recipients).result()
    assert failed.value.category == "user"


def test_095_training_runs_are_found_and_unknown_ones_are_404(
    rest: tinker.RestClient, model: tinker.TrainingClient
) -> None:
    fresh = rest.get_training_run(model.model_id).result()
    assert (fresh.training_run_id, fresh.base_model, fresh.lora_rank) == (model.model_id, "tiny", 8)
    assert fresh.is_lora and not fresh.corrupted and fresh.last_checkpoint is None
    assert fresh.model_owner and fresh.user_metadata == {"renderer_name": "plain"}

    path = model.save_state("a").result().path
    sampler = model.save_weights_for_sampler("b").result().path
    last = model.save_state("c").result().path
    for scope in ("owned", "accessible"):
        run = rest.get_training_run_by_tinker_path(path, access_scope=scope).result()
        assert run.last_checkpoint.tinker_path == last and run.last_sampler_checkpoint.tinker_path == sampler
    assert fresh.last_request_time < run.last_request_time <= datetime.now(UTC)
    for unknown in ("nothing", "sess:train:0"):
        with pytest.raises(tinker.NotFoundError):
            rest.get_training_run(unknown).result()


def test_096_training_runs_are_listed_by_page_and_project(
    client: tinker.ServiceClient, rest: tinker.RestClient, server: Running
) -> None:
    models = [client.create_lora_training_client("tiny", rank=8).result().model_id for _ in range(3)]
    first = rest.list_training_runs(limit=2).result()
    assert [run.training_run_id for run in first.training_runs] == [models[2], models[1]]
    total = first.cursor.total_count
    assert (first.cursor.limit, first.cursor.offset) == (2, 0) and total >= 3
    last = rest.list_training_runs(limit=2, offset=total - 1).result()
    assert len(last.training_runs) == 1
    beyond = rest.list_training_runs(limit=2, offset=total + 5, access_scope="accessible").result()
    assert beyond.training_runs == [] and beyond.cursor.total_count == total
    other = server.model()
    ours = rest.list_training_runs(limit=1000, project_id="first").result()
    assert set(models) <= {run.training_run_id for run in ours.training_runs}
    assert other not in {run.training_run_id for run in ours.training_runs}
    without = rest.list_training_runs(project_id="default").result()
    assert without.training_runs[0].training_run_id == other
    assert rest.list_training_runs(project_id="none").result().cursor.total_count == 0


def test_097_checkpoints_are_listed_newest_first_with_their_kind(
    rest: tinker.RestClient, model: tinker.TrainingClient, server: Running
) -> None:
    model.save_state("a").result(), model.save_weights_for_sampler("a").result()
    model.save_weights_external("a").result()
    ids = ["external_weights/a", "sampler_weights/a", "weights/a"]
    listed = rest.list_checkpoints(model.model_id).result()
    assert [checkpoint.checkpoint_id for checkpoint in listed.checkpoints] == ids
    assert [checkpoint.checkpoint_type for checkpoint in listed.checkpoints] == ["external", "sampler", "training"]
    assert all(checkpoint.size_bytes > 0 and not checkpoint.public for checkpoint in listed.checkpoints)
    page = rest.list_user_checkpoints(limit=2, offset=1).result()
    assert [checkpoint.checkpoint_id for checkpoint in page.checkpoints] == ids[1:]
    assert (page.cursor.offset, page.cursor.limit) == (1, 2) and page.cursor.total_count >= 3
    with pytest.raises(tinker.NotFoundError):
        rest.list_checkpoints("nothing").result()
    for version, shown in (("0.27.3", 2), ("0.28.0", 3), ("0.8.1", 2), ("1.0", 3), ("odd", 3)):
        headers = {"x-stainless-package-version": version}
        answer = server.http.get(f"/training_runs/{model.model_id}/checkpoints", headers=headers).json()
        assert len(answer["checkpoints"]) == answer["cursor"]["total_count"] == shown, version


def test_098_checkpoints_are_deleted_with_their_files_and_nothing_else(
    rest: tinker.RestClient, model: tinker.TrainingClient, server: Running
) -> None:
    first, second = model.save_state("a").result().path, model.save_weights_for_sampler("b").result().path
    kept = model.save_state("kept").result().path
    directory = server.settings.data_dir / "checkpoints" / model.model_id
    rest.delete_checkpoint(model.model_id, "weights/a").result()
    rest.delete_checkpoint_from_tinker_path(second).result()
    assert [c.tinker_path for c in rest.list_checkpoints(model.model_id).result().checkpoints] == [kept]
    assert not list(directory.glob("weights/a~*")) and not list(directory.glob("sampler_weights/*"))
    for unknown in (first, f"tinker://{model.model_id}/external_weights/b", "tinker://nothing/weights/a"):
        with pytest.raises(tinker.NotFoundError):
            rest.delete_checkpoint_from_tinker_path(unknown).result()
    run = f"/training_runs/{model.model_id}/checkpoints"
    for escape in ("weights/%2E%2E", "weights/..%2F..%2F..", "%2E%2E/kept", "ephemeral/1", "weights", "weights/a/b/c"):
        assert server.http.delete(f"{run}/{escape}").status_code in (400, 404, 405), escape
        assert server.http.put(f"{run}/{escape}/ttl", json={"ttl_seconds": 7200}).status_code in (400, 404, 405)
        assert server.http.post(f"{run}/{escape}/publish").status_code in (400, 404, 405)
    assert len(list(directory.glob("weights/kept~*/steps"))) == 1


def test_098_a_sampler_outlives_other_weights_and_says_so_of_its_own(
    client: tinker.ServiceClient, rest: tinker.RestClient, model: tinker.TrainingClient
) -> None:
    path = model.save_weights_for_sampler("s").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    unnamed = model.save_weights_and_get_sampling_client().result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert unnamed.sample(PROMPT, 1, ONE_TOKEN).result().sequences[0].tokens == [0]
    with pytest.raises(tinker.RequestFailedError, match="deleted"):
        sampler.sample(PROMPT, 1, ONE_TOKEN).result()


def test_099_publishing_can_be_repeated_and_taken_back(rest: tinker.RestClient, model: tinker.TrainingClient) -> None:
    path = model.save_state("a").result().path
    for publish, public in (
        (rest.publish_checkpoint_from_tinker_path, True),
        (rest.unpublish_checkpoint_from_tinker_path, False),
    ):
        publish(path).result()
        publish(path).result()
        assert rest.list_checkpoints(model.model_id).result().checkpoints[0].public is public
        with pytest.raises(tinker.NotFoundError):
            publish(path + "b").result()


def test_100_a_ttl_is_set_cleared_and_real(
    rest: tinker.RestClient, model: tinker.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model.save_state("a").result().path
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    expires_at = rest.list_checkpoints(model.model_id).result().checkpoints[0].expires_at
    assert abs(expires_at - datetime.now(UTC) - timedelta(hours=2)) < timedelta(minutes=1)
    for wrong in (10, 0, -1, 315_360_001):
        with pytest.raises(tinker.BadRequestError, match="ttl_seconds"):
            rest.set_checkpoint_ttl_from_tinker_path(path, wrong).result()
    monkeypatch.setattr("time.time", lambda now=time.time: now() + 7300)
    assert rest.list_checkpoints(model.model_id).result().checkpoints == []
    with pytest.raises(tinker.NotFoundError, match="expired"):
        rest.get_weights_info_by_tinker_path(path).result()
    monkeypatch.undo()
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert rest.list_checkpoints(model.model_id).result().checkpoints[0].expires_at is None
    with pytest.raises(tinker.NotFoundError):
        rest.set_checkpoint_ttl_from_tinker_path(path + "b", None).result()


def test_100_what_has_expired_is_removed_from_the_disk(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_server.app.HOUSEKEEPING_S", 0.05)
    running = Running(tmp_path, database_url=database_url)
    try:
        model_id = running.model()
        for seq_id, fields in enumerate(({"path": "short", "ttl_seconds": 3600}, {"path": "long"}), start=1):
            running.result(running.post("/save_weights", model_id=model_id, seq_id=seq_id, **fields))
        assert len(list(tmp_path.glob("checkpoints/*/weights/*"))) == 2
        monkeypatch.setattr("time.time", lambda now=time.time: now() + 3700)
        deadline = time.monotonic() + 10
        while len(left := list(tmp_path.glob("checkpoints/*/weights/*"))) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [path.name.partition("~")[0] for path in left] == ["long"]
    finally:
        running.stop()


def test_101_weights_info_tells_the_shape(client: tinker.ServiceClient, rest: tinker.RestClient) -> None:
    model = client.create_lora_training_client("tiny", rank=4, train_unembed=False).result()
    for path in (model.save_state("a").result().path, model.save_weights_for_sampler("a").result().path):
        info = rest.get_weights_info_by_tinker_path(path).result()
        assert (info.base_model, info.is_lora, info.lora_rank) == ("tiny", True, 4)
        assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, True, False)
    with pytest.raises(tinker.NotFoundError):
        rest.get_weights_info_by_tinker_path(f"tinker://{model.model_id}/weights/b").result()
    with pytest.raises(tinker.BadRequestError):
        rest.get_weights_info_by_tinker_path("tinker://a/b").result()


def test_102_urls_work_without_headers_until_they_expire(
    rest: tinker.RestClient, model: tinker.TrainingClient, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model.save_weights_external("e").result().path
    answer = rest.get_external_weights_urls(path).result()
    assert answer.expires > datetime.now(UTC) + timedelta(minutes=5)
    url = answer.urls["adapter_config.json"]
    assert url.startswith(f"{server.url}/api/v1/files/") and json.loads(fetch(url))["lora_alpha"] == 32
    for forged in (
        url.replace("adapter_config.json", "adapter_model.safetensors"),
        url.replace("expires=", "expires=9"),
        url[:-1] + ("0" if url[-1] != "0" else "1"),
        url.partition("?")[0] + "?expires=99999999999&signature=%C3%A9",
    ):
        assert httpx.get(forged).status_code == 403
    assert httpx.get(url.partition("?")[0]).status_code == 422
    monkeypatch.setattr("time.time", lambda now=time.time: now() + 3700)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        fetch(url)
    assert fetch(rest.get_external_weights_urls(path).result().urls["adapter_config.json"])
    monkeypatch.undo()
    secret = server.settings.data_dir / "link-secret"
    assert secret.stat().st_mode & 0o777 == 0o600 and len(secret.read_bytes()) == 32
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert httpx.get(url).status_code == 404
    model.save_state("a").result()
    refused = server.http.get(f"/training_runs/{model.model_id}/checkpoints/weights/a/external_weights_urls")
    assert refused.status_code == 400 and "save_weights_external" in refused.json()["detail"]


def test_102_urls_are_on_the_server_as_the_client_reaches_it(model: tinker.TrainingClient, server: Running) -> None:
    model.save_weights_external("e").result()
    route = f"/training_runs/{model.model_id}/checkpoints/external_weights/e/external_weights_urls"
    headers = {"host": "tinker.example:8443", "x-forwarded-proto": "https", "x-forwarded-prefix": "/services/x"}
    urls = server.http.get(route, headers=headers).json()["urls"]
    assert all(url.startswith("https://tinker.example:8443/services/x/api/v1/files/") for url in urls.values())


def test_102_older_clients_are_led_to_an_archive(model: tinker.TrainingClient, server: Running) -> None:
    model.save_weights_for_sampler("s").result()
    answer = server.http.get(f"/training_runs/{model.model_id}/checkpoints/sampler_weights/s/archive")
    assert answer.status_code == 302 and answer.headers["expires"].endswith("GMT")
    for _ in range(2):
        with tarfile.open(fileobj=io.BytesIO(fetch(answer.headers["location"]))) as tar:
            names = set(tar.getnames())
            weights = load(tar.extractfile("adapter_model.safetensors").read())
        assert {"adapter_config.json", "peft/adapter_model.safetensors"} <= names
        assert "base_model.model.model.unembed_tokens.lora_A.weight" in weights
    assert len(list((server.settings.data_dir / "archives").iterdir())) == 1
    server.http.delete(f"/training_runs/{model.model_id}/checkpoints/sampler_weights/s")
    assert not list((server.settings.data_dir / "archives").iterdir())
    assert httpx.get(answer.headers["location"]).status_code == 404


def test_103_copies_stand_on_their_own(
    client: tinker.ServiceClient, rest: tinker.RestClient, model: tinker.TrainingClient, server: Running
) -> None:
    model.optim_step(types.AdamParams()).result()
    source = model.save_state("a", ttl_seconds=7200, user_metadata={"k": "v"}).result().path
    copy = client.copy_weights(source).result()
    again = rest.copy_weights(source, "second", ttl_seconds=3600).result()
    assert len({source, copy, again}) == 3 and copy.endswith("/weights/a")
    rest.delete_checkpoint_from_tinker_path(source).result()
    resumed = client.create_training_client_from_state_with_optimizer(copy).result()
    assert resumed.optim_step(types.AdamParams()).result().metrics["step"] == 2
    run = rest.get_training_run_by_tinker_path(copy).result()
    assert run.base_model == "tiny" and run.last_checkpoint.user_metadata == {"k": "v"}
    assert run.last_checkpoint.expires_at is None
    assert rest.get_training_run_by_tinker_path(again).result().last_checkpoint.expires_at is not None
    copied = rest.list_training_runs(project_id="second").result().training_runs
    assert [run.last_checkpoint.tinker_path for run in copied] == [again]
    with pytest.raises(tinker.NotFoundError):
        client.copy_weights(source).result()


def test_103_a_retried_copy_is_the_first_one(model: tinker.TrainingClient, server: Running) -> None:
    source = model.save_weights_for_sampler("s").result().path
    session_id = server.session()
    headers = {"x-idempotency-key": "one"}
    for body in ({"destination_project_id": "p"}, {"session_id": session_id, "model_seq_id": 3}):
        answers = [
            server.http.post("/copy_weights", json={"source_path": source, **body}, headers=headers).json()
            for _ in range(3)
        ]
        assert answers[0] == answers[1] == answers[2]
    assert answers[0]["tinker_path"] == f"tinker://{session_id}:train:3/sampler_weights/s"
    wrong = [
        {"source_path": source},
        {"source_path": "nothing", "destination_project_id": "p"},
        {"source_path": source, "session_id": session_id},
        {"source_path": source, "destination_project_id": "p", "ttl_seconds": 10},
        {"source_path": source, "session_id": session_of(model), "model_seq_id": int(model.model_id[-1])},
    ]
    assert [server.http.post("/copy_weights", json=body).status_code for body in wrong] == [400] * 5
    unknown = {"source_path": source, "session_id": "nothing", "model_seq_id": 0}
    assert server.http.post("/copy_weights", json=unknown).status_code == 404


def test_103_no_model_is_made_in_the_place_of_a_copy(model: tinker.TrainingClient, server: Running) -> None:
    source = model.save_state("a").result().path
    place = {"session_id": server.session(), "model_seq_id": 0}
    assert server.post("/copy_weights", source_path=source, **place).status_code == 200
    submitted = server.post("/create_model", **place, base_model="tiny", lora_config={"rank": 8})
    failed = server.result(submitted).json()
    assert failed["category"] == "user" and "take another model_seq_id" in failed["error"]
    model_id = f"{place['session_id']}:train:0"
    assert model_id not in server.backend.tiny.trainer.steps
    assert server.post("/weights_info", tinker_path=f"tinker://{model_id}/weights/a").status_code == 200


def test_104_sessions_and_samplers_are_found(
    client: tinker.ServiceClient, rest: tinker.RestClient, model: tinker.TrainingClient
) -> None:
    session_id = session_of(model)
    assert session_id in rest.list_sessions().result().sessions
    assert rest.list_sessions(limit=1, offset=10_000).result().sessions == []
    path = model.save_weights_for_sampler("s").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    session = rest.get_session(session_id).result()
    assert model.model_id in session.training_run_ids and session.user_metadata == {"team": "red"}
    found = [rest.get_sampler(sampler_id).result() for sampler_id in session.sampler_ids]
    assert path in [one.model_path for one in found] and {one.base_model for one in found} == {"tiny"}
    assert sampler.get_base_model() == "tiny"
    for get in (rest.get_session, rest.get_sampler):
        with pytest.raises(tinker.NotFoundError):
            get("nothing").result()


def test_105_sessions_are_searched_and_assigned(
    rest: tinker.RestClient, model: tinker.TrainingClient, server: Running
) -> None:
    model.save_state("a").result()
    names = ["Blue whale run", "blue WHALE", "red whale"]
    ids = [
        server.post("/create_session", display_name=name, user_metadata={"n": str(index % 2)}).json()["session_id"]
        for index, name in enumerate(names)
    ]
    server.post(f"/sessions/{ids[0]}/finish", reason={"type": "errored"}, detail="why")

    def search(**conditions: object) -> list[str]:
        found, cursor = [], None
        while True:
            request = SessionSearchRequest(limit=1, cursor=cursor, **conditions)
            page = rest.search_sessions(request).result()
            found += [session.session_id for session in page.sessions]
            if (cursor := page.next_cursor) is None:
                return found

    assert search(display_name="whale blue") == [ids[1], ids[0]]
    assert search(display_name="%") == [] and search(session_id=ids[2], display_name="run") == [ids[2], ids[0]]
    assert search(display_name="whale", user_metadata={"n": "0"}) == [ids[2], ids[0]]
    finished = ClientFinishedSessionStatusQuery(reasons=["errored"])
    assert search(display_name="whale", statuses=[finished]) == [ids[0]]
    assert search(display_name="whale", statuses=[ActiveSessionStatusQuery()]) == [ids[2], ids[1]]
    assert search(display_name="whale", owner={"type": "user", "owner_urns": ["nobody"]}) == []

    with pytest.raises(tinker.BadRequestError, match="cannot be searched"):
        search(user_metadata={'a"b': "0"})
    assert search(user_metadata={"a.b$[0]'": "0"}) == []
    rest.assign_session_project(ids[1], "whales").result()
    assert search(project_ids=["whales"]) == [ids[1]] and ids[1] not in search(project_ids=["default"])
    summary = rest.search_sessions(SessionSearchRequest(session_id=ids[0])).result().sessions[0]
    assert (summary.status.type, summary.status.reason.type, summary.status.detail) == (
        "client_finished",
        "errored",
        "why",
    )
    ours = rest.search_sessions(SessionSearchRequest(session_id=session_of(model))).result().sessions[0]
    assert ours.project_id == "first" and ours.checkpoints_count >= 1 and ours.checkpoint_storage_bytes > 0
    with pytest.raises(tinker.NotFoundError):
        rest.assign_session_project("nothing", "whales").result()


def test_106_a_trace_is_ready_and_holds_the_operations(rest: tinker.RestClient, model: tinker.TrainingClient) -> None:
    model.forward_backward([datum()], "cross_entropy").result()
    trace = json.loads(fetch(rest.export_session_trace(session_of(model)).result()))
    ours = [event for event in trace["traceEvents"] if event["tid"] == model.model_id]
    assert [event["name"] for event in ours][:2] == ["create_model", "forward_backward"]
    assert all(event["ph"] == "X" and event["dur"] >= 0 for event in ours[:1])
    with pytest.raises(tinker.NotFoundError):
        rest.export_session_trace("nothing").result()


def test_107_the_audit_log_has_what_was_done(
    rest: tinker.RestClient, model: tinker.TrainingClient, admin: tinker.AdminClient
) -> None:
    path = model.save_state("a").result().path
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.assign_session_project(session_of(model), "first").result()
    entries = admin.get_audit_log(event_type="checkpoints").result().entries
    ours = [entry.event for entry in entries if entry.event_details.get("tinker_path") == path]
    assert ours == ["checkpoint_saved", "checkpoint_published"]
    assert admin.get_audit_log(event_type="projects").result().entries[-1].event == "project_assigned"
    assert admin.get_audit_log(event_type="teams").result().entries == []
    assert admin.get_audit_log(day=datetime(2020, 1, 1).date()).result().entries == []


def test_107_usage_counts_tokens_and_bytes(
    client: tinker.ServiceClient, rest: tinker.RestClient, admin: tinker.AdminClient, server: Running
) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key="tml-test", project_id="usage") as counted:
        model = counted.create_lora_training_client("tiny", rank=8).result()
        model.forward_backward([datum(5), datum(2)], "cross_entropy").result()
        model.save_state("a").result()
        model.save_weights_and_get_sampling_client().result().sample(PROMPT, 3, ONE_TOKEN).result()
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    usage = admin.get_billing_usage(starting_on=hour, ending_before=hour + timedelta(hours=1)).result()
    ours = [event for event in usage.data if event.session_id == session_of(model)]
    amounts = {event.event_info.type: event.event_info.model_dump(exclude={"type"}) for event in ours}
    assert amounts == {
        "training": {"token_count": 7},
        "sampling_prefill": {"cached": False, "token_count": 2},
        "sampling_sample": {"token_count": 3},
        "checkpoint": {"count": 1},
    }
    assert {(event.project_id, event.base_model) for event in ours} == {("usage", "tiny")}
    assert all(event.bucket_start == hour and event.estimated_cost_usd is None for event in ours)
    assert session_of(model) in usage.sessions
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    earlier = admin.get_billing_usage(starting_on=long_ago, ending_before=long_ago + timedelta(days=1)).result()
    assert earlier.data == []
    stored = admin.get_current_checkpoint_storage_usage(project_id="usage").result().data
    size_bytes = rest.list_checkpoints(model.model_id).result().checkpoints[0].size_bytes
    assert [(item.checkpoint_count, item.size_bytes) for item in stored] == [(1, size_bytes)]
    assert len(admin.get_current_checkpoint_storage_usage().result().data) > 1


@pytest.fixture(scope="module")
def admin(server: Running) -> tinker.AdminClient:
    return tinker.AdminClient(base_url=server.url, api_key="tml-test")


@pytest.mark.parametrize("module_database_url", ["sqlite"], indirect=True)  # slow, and the others have shown the SQL
def test_108_the_command_line_works(
    rest: tinker.RestClient, model: tinker.TrainingClient, server: Running, tmp_path: Path
) -> None:
    path, external = model.save_state("a").result().path, model.save_weights_external("e").result().path
    assert path in tinker_cli(server, tmp_path, "-f", "json", "checkpoint", "list", "--run-id", model.model_id)
    assert model.model_id in tinker_cli(server, tmp_path, "-f", "json", "run", "list", "--limit", "0")
    assert '"tiny"' in tinker_cli(server, tmp_path, "-f", "json", "run", "info", model.model_id)
    assert "weights/a" in tinker_cli(server, tmp_path, "-f", "json", "checkpoint", "info", path)
    tinker_cli(server, tmp_path, "checkpoint", "publish", path)
    assert rest.list_checkpoints(model.model_id).result().checkpoints[1].public
    tinker_cli(server, tmp_path, "checkpoint", "download", external, "--output", str(tmp_path / "out"))
    tinker_cli(server, tmp_path, "checkpoint", "download", path, "--output", str(tmp_path / "out"))
    assert len(list((tmp_path / "out").rglob("peft/adapter_model.safetensors"))) == 2
    tinker_cli(server, tmp_path, "checkpoint", "delete", "--yes", path)
    assert [c.tinker_path for c in rest.list_checkpoints(model.model_id).result().checkpoints] == [external]
    trace = tmp_path / "trace.json"
    tinker_cli(server, tmp_path, "session", "export-trace", session_of(model), "--output", str(trace))
    assert json.loads(trace.read_text())["traceEvents"]


def test_108_a_key_is_known_and_can_be_given_up(server: Running) -> None:
    me = server.http.get("/auth/apikey/me", headers={"x-api-key": "tml-test"}).json()
    assert me["key_id"] == 0 and me["note"] and me["details"]["org_details"]["name"] == me["name"]
    assert server.http.delete("/auth/apikey/me").status_code == 204
