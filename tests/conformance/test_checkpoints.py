"""Saved weights as the SDK lists, publishes, deletes, downloads and copies them; numbers are the checklist's.

pytest tests/conformance/test_checkpoints.py
"""

import io
import json
import tarfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from safetensors.numpy import load
from tinker import types

from tests.factories import present
from tests.fake_server import Running, fetch, session_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning"),
]
PROMPT, ONE_TOKEN = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def fake_database_url(module_database_url: str) -> str:
    return module_database_url


def test_097_checkpoints_are_listed_newest_first_with_their_kind(
    rest: tinker.RestClient, training: tinker.TrainingClient, fake: Running
) -> None:
    training.save_state("a").result(), training.save_weights_for_sampler("a").result()
    training.save_weights_external("a").result()
    ids = ["external_weights/a", "sampler_weights/a", "weights/a"]
    listed = rest.list_checkpoints(training.model_id).result()
    assert [checkpoint.checkpoint_id for checkpoint in listed.checkpoints] == ids
    assert [checkpoint.checkpoint_type for checkpoint in listed.checkpoints] == ["external", "sampler", "training"]
    assert all((checkpoint.size_bytes or 0) > 0 and not checkpoint.public for checkpoint in listed.checkpoints)
    page = rest.list_user_checkpoints(limit=2, offset=1).result()
    assert [checkpoint.checkpoint_id for checkpoint in page.checkpoints] == ids[1:]
    assert (present(page.cursor).offset, present(page.cursor).limit) == (1, 2) and present(page.cursor).total_count >= 3
    with pytest.raises(tinker.NotFoundError):
        rest.list_checkpoints("nothing").result()
    for version, shown in (("0.27.3", 2), ("0.28.0", 3), ("0.8.1", 2), ("1.0", 3), ("odd", 3)):
        headers = {"x-stainless-package-version": version}
        answer = fake.http.get(f"/training_runs/{training.model_id}/checkpoints", headers=headers).json()
        assert len(answer["checkpoints"]) == answer["cursor"]["total_count"] == shown, version


def test_098_checkpoints_are_deleted_with_their_files_and_nothing_else(
    rest: tinker.RestClient, training: tinker.TrainingClient, fake: Running
) -> None:
    first, second = training.save_state("a").result().path, training.save_weights_for_sampler("b").result().path
    kept = training.save_state("kept").result().path
    directory = fake.settings.data_dir / "checkpoints" / training.model_id
    rest.delete_checkpoint(training.model_id, "weights/a").result()
    rest.delete_checkpoint_from_tinker_path(second).result()
    assert [c.tinker_path for c in rest.list_checkpoints(training.model_id).result().checkpoints] == [kept]
    assert not list(directory.glob("weights/a~*")) and not list(directory.glob("sampler_weights/*"))
    for unknown in (first, f"tinker://{training.model_id}/external_weights/b", "tinker://nothing/weights/a"):
        with pytest.raises(tinker.NotFoundError):
            rest.delete_checkpoint_from_tinker_path(unknown).result()
    run = f"/training_runs/{training.model_id}/checkpoints"
    for escape in ("weights/%2E%2E", "weights/..%2F..%2F..", "%2E%2E/kept", "ephemeral/1", "weights", "weights/a/b/c"):
        assert fake.http.delete(f"{run}/{escape}").status_code in (400, 404, 405), escape
        assert fake.http.put(f"{run}/{escape}/ttl", json={"ttl_seconds": 7200}).status_code in (400, 404, 405)
        assert fake.http.post(f"{run}/{escape}/publish").status_code in (400, 404, 405)
    assert len(list(directory.glob("weights/kept~*/steps"))) == 1


def test_098_a_retried_deletion_deletes_nothing_more(training: tinker.TrainingClient, fake: Running) -> None:
    """The SDK has a key for each call, and sends it again if the answer was lost."""
    training.save_state("a").result()
    url = f"/training_runs/{training.model_id}/checkpoints/weights/a"

    def delete(key: str) -> int:
        return fake.http.delete(url, headers={"x-idempotency-key": key}).status_code

    assert [delete("first"), delete("first"), delete("second")] == [204, 204, 404]
    path = training.save_state("a").result().path
    assert delete("first") == 204
    assert fake.post("/weights_info", tinker_path=path).status_code == 200
    assert [delete("second"), delete("second"), delete("third")] == [204, 204, 404]


def test_098_a_sampler_outlives_other_weights_and_says_so_of_its_own(
    client: tinker.ServiceClient, rest: tinker.RestClient, training: tinker.TrainingClient
) -> None:
    path = training.save_weights_for_sampler("s").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    unnamed = training.save_weights_and_get_sampling_client().result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert unnamed.sample(PROMPT, 1, ONE_TOKEN).result().sequences[0].tokens == [0]
    with pytest.raises(tinker.RequestFailedError, match="deleted"):
        sampler.sample(PROMPT, 1, ONE_TOKEN).result()


def test_099_publishing_can_be_repeated_and_taken_back(
    rest: tinker.RestClient, training: tinker.TrainingClient
) -> None:
    path = training.save_state("a").result().path
    for publish, public in (
        (rest.publish_checkpoint_from_tinker_path, True),
        (rest.unpublish_checkpoint_from_tinker_path, False),
    ):
        publish(path).result()
        publish(path).result()
        assert rest.list_checkpoints(training.model_id).result().checkpoints[0].public is public
        with pytest.raises(tinker.NotFoundError):
            publish(path + "b").result()


def test_100_a_ttl_is_set_cleared_and_real(
    rest: tinker.RestClient, training: tinker.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = training.save_state("a").result().path
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    expires_at = rest.list_checkpoints(training.model_id).result().checkpoints[0].expires_at
    assert expires_at is not None and abs(expires_at - datetime.now(UTC) - timedelta(hours=2)) < timedelta(minutes=1)
    for wrong in (10, 0, -1, 315_360_001):
        with pytest.raises(tinker.BadRequestError, match="ttl_seconds"):
            rest.set_checkpoint_ttl_from_tinker_path(path, wrong).result()
    monkeypatch.setattr("time.time", lambda now=time.time: now() + 7300)
    assert rest.list_checkpoints(training.model_id).result().checkpoints == []
    with pytest.raises(tinker.NotFoundError, match="expired"):
        rest.get_weights_info_by_tinker_path(path).result()
    monkeypatch.undo()
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert rest.list_checkpoints(training.model_id).result().checkpoints[0].expires_at is None
    with pytest.raises(tinker.NotFoundError):
        rest.set_checkpoint_ttl_from_tinker_path(path + "b", None).result()


def test_100_what_has_expired_is_removed_from_the_disk(tmp_path: Path) -> None:
    shift_s = [0.0]
    running = Running(tmp_path, session_timeout_s=1, clock=lambda: time.time() + shift_s[0])
    try:
        model_id = running.model()
        asked: list[dict[str, Any]] = [{"path": "short", "ttl_seconds": 3600}, {"path": "long"}]
        for seq_id, fields in enumerate(asked, start=1):
            running.result(running.post("/save_weights", model_id=model_id, seq_id=seq_id, **fields))
        assert len(list(tmp_path.glob("checkpoints/*/weights/*"))) == 2
        shift_s[0] = 3700
        deadline = time.monotonic() + 10
        while len(left := list(tmp_path.glob("checkpoints/*/weights/*"))) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [path.name.partition("~")[0] for path in left] == ["long"]
    finally:
        running.stop()


def test_101_weights_info_has_the_shape(client: tinker.ServiceClient, rest: tinker.RestClient) -> None:
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
    rest: tinker.RestClient, training: tinker.TrainingClient, fake: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = training.save_weights_external("e").result().path
    answer = rest.get_external_weights_urls(path).result()
    assert answer.expires > datetime.now(UTC) + timedelta(minutes=5)
    url = answer.urls["adapter_config.json"]
    assert url.startswith(f"{fake.url}/api/v1/files/") and json.loads(fetch(url))["lora_alpha"] == 32
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
    secret = fake.settings.data_dir / "link-secret"
    assert secret.stat().st_mode & 0o777 == 0o600 and len(secret.read_bytes()) == 32
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert httpx.get(url).status_code == 404
    training.save_state("a").result()
    refused = fake.http.get(f"/training_runs/{training.model_id}/checkpoints/weights/a/external_weights_urls")
    assert refused.status_code == 400 and "save_weights_external" in refused.json()["detail"]


def test_102_urls_are_on_the_server_as_the_client_reaches_it(training: tinker.TrainingClient, fake: Running) -> None:
    training.save_weights_external("e").result()
    route = f"/training_runs/{training.model_id}/checkpoints/external_weights/e/external_weights_urls"
    headers = {"host": "localhost:8443", "x-forwarded-proto": "https", "x-forwarded-prefix": "/services/x"}
    urls = fake.http.get(route, headers=headers).json()["urls"]
    assert all(url.startswith("https://localhost:8443/services/x/api/v1/files/") for url in urls.values())


def test_102_older_clients_are_led_to_an_archive(training: tinker.TrainingClient, fake: Running) -> None:
    training.save_weights_for_sampler("s").result()
    answer = fake.http.get(f"/training_runs/{training.model_id}/checkpoints/sampler_weights/s/archive")
    assert answer.status_code == 302 and answer.headers["expires"].endswith("GMT")
    for _ in range(2):
        with tarfile.open(fileobj=io.BytesIO(fetch(answer.headers["location"]))) as tar:
            names = set(tar.getnames())
            weights = load(present(tar.extractfile("adapter_model.safetensors")).read())
        assert {"adapter_config.json", "peft/adapter_model.safetensors"} <= names
        assert "base_model.model.model.unembed_tokens.lora_A.weight" in weights
    assert len(list((fake.settings.data_dir / "archives").iterdir())) == 1
    fake.http.delete(f"/training_runs/{training.model_id}/checkpoints/sampler_weights/s")
    assert not list((fake.settings.data_dir / "archives").iterdir())
    assert httpx.get(answer.headers["location"]).status_code == 404


def test_102_head_on_a_link_gives_the_size_of_what_get_sends(
    training: tinker.TrainingClient, rest: tinker.RestClient, fake: Running
) -> None:
    """The archive is packed by the first of several requests, of whatever kind it is."""
    training.save_weights_for_sampler("s").result()
    exported = training.save_weights_external("e").result().path
    moved = fake.http.get(f"/training_runs/{training.model_id}/checkpoints/sampler_weights/s/archive")
    archive, *files = moved.headers["location"], *rest.get_external_weights_urls(exported).result().urls.values()
    with ThreadPoolExecutor(4) as pool:
        heads = [*pool.map(lambda method: httpx.request(method, archive), ("HEAD", "GET", "HEAD"))]
    (packed,) = (fake.settings.data_dir / "archives").iterdir()
    written = packed.stat()
    assert {head.headers["content-length"] for head in heads} == {str(written.st_size)}
    for url in (archive, *files):
        head, whole = httpx.head(url), httpx.get(url)
        assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(len(whole.content)))
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert (packed.stat().st_ino, packed.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    assert httpx.head(f"{archive[:-1]}!").status_code == 403
    fake.http.delete(f"/training_runs/{training.model_id}/checkpoints/sampler_weights/s")
    assert httpx.head(archive).status_code == 404


def test_103_copies_stand_on_their_own(
    client: tinker.ServiceClient, rest: tinker.RestClient, training: tinker.TrainingClient
) -> None:
    training.optim_step(types.AdamParams()).result()
    source = training.save_state("a", ttl_seconds=7200, user_metadata={"k": "v"}).result().path
    copy = client.copy_weights(source).result()
    again = rest.copy_weights(source, "second", ttl_seconds=3600).result()
    assert len({source, copy, again}) == 3 and copy.endswith("/weights/a")
    rest.delete_checkpoint_from_tinker_path(source).result()
    resumed = client.create_training_client_from_state_with_optimizer(copy).result()
    assert present(resumed.optim_step(types.AdamParams()).result().metrics)["step"] == 2
    run = rest.get_training_run_by_tinker_path(copy).result()
    assert run.base_model == "tiny" and present(run.last_checkpoint).user_metadata == {"k": "v"}
    assert present(run.last_checkpoint).expires_at is None
    assert present(rest.get_training_run_by_tinker_path(again).result().last_checkpoint).expires_at is not None
    copied = rest.list_training_runs(project_id="second").result().training_runs
    assert [present(run.last_checkpoint).tinker_path for run in copied] == [again]
    with pytest.raises(tinker.NotFoundError):
        client.copy_weights(source).result()


def test_103_a_retried_copy_is_the_first_one(training: tinker.TrainingClient, fake: Running) -> None:
    source = training.save_weights_for_sampler("s").result().path
    session_id = fake.session()
    headers = {"x-idempotency-key": "one"}
    for body in ({"destination_project_id": "p"}, {"session_id": session_id, "model_seq_id": 3}):
        answers = [
            fake.http.post("/copy_weights", json={"source_path": source, **body}, headers=headers).json()
            for _ in range(3)
        ]
        assert answers[0] == answers[1] == answers[2]
    assert answers[0]["tinker_path"] == f"tinker://{session_id}:train:3/sampler_weights/s"
    wrong = [
        {"source_path": source},
        {"source_path": "nothing", "destination_project_id": "p"},
        {"source_path": source, "session_id": session_id},
        {"source_path": source, "destination_project_id": "p", "ttl_seconds": 10},
        {"source_path": source, "session_id": session_of(training), "model_seq_id": int(training.model_id[-1])},
    ]
    assert [fake.http.post("/copy_weights", json=body).status_code for body in wrong] == [400] * 5
    unknown = {"source_path": source, "session_id": "nothing", "model_seq_id": 0}
    assert fake.http.post("/copy_weights", json=unknown).status_code == 404


def test_103_a_retried_copy_is_the_first_one_though_its_source_is_deleted(
    training: tinker.TrainingClient, fake: Running
) -> None:
    source = training.save_state("a").result().path
    session_id = fake.session()

    def copy(key: str, **place: Any) -> str:
        body, headers = {"source_path": source, **place}, {"x-idempotency-key": key}
        return str(fake.http.post("/copy_weights", json=body, headers=headers).json().get("tinker_path"))

    def copy_to_both() -> list[str]:
        return [copy("first", destination_project_id="p"), copy("first", session_id=session_id, model_seq_id=3)]

    copies = copy_to_both()
    fake.http.delete(f"/training_runs/{training.model_id}/checkpoints/weights/a")
    assert copy_to_both() == copies and "None" not in copies
    assert copy("second", destination_project_id="p") == "None"
    assert copy("first", session_id=session_id, model_seq_id=4) == "None"


def test_103_no_model_is_made_in_the_place_of_a_copy(training: tinker.TrainingClient, fake: Running) -> None:
    source = training.save_state("a").result().path
    place = {"session_id": fake.session(), "model_seq_id": 0}
    assert fake.post("/copy_weights", source_path=source, **place).status_code == 200
    submitted = fake.post("/create_model", **place, base_model="tiny", lora_config={"rank": 8})
    failed = fake.result(submitted).json()
    assert failed["category"] == "user" and "take another model_seq_id" in failed["error"]
    model_id = f"{place['session_id']}:train:0"
    assert model_id not in fake.backend.tiny.trainer.steps
    assert fake.post("/weights_info", tinker_path=f"tinker://{model_id}/weights/a").status_code == 200
