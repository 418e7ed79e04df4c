"""A run's page without a browser: the client's metrics, labels, comparisons and states."""

import csv
import io
import re
from collections.abc import Iterator

import pytest

from tests.dashboard import Owner, with_keys


@pytest.fixture(scope="module")
def owners(module_database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Owner, Owner]]:
    folder = tmp_path_factory.mktemp("runs")
    server, made = with_keys(folder, "alice", "bob", database_url=module_database_url)
    with Owner(server, made[0]) as alice, Owner(server, made[1]) as bob:
        yield alice.sign_in(), bob.sign_in()
    server.stop()


@pytest.fixture
def alice(owners: tuple[Owner, Owner]) -> Owner:
    return owners[0]


@pytest.fixture
def bob(owners: tuple[Owner, Owner]) -> Owner:
    return owners[1]


def test_metrics_of_the_client_are_shown_downloaded_and_refused_by_name(alice: Owner, bob: Owner) -> None:
    run_id = alice.new_run()
    for step in range(3):
        assert alice.report(run_id, step, reward=step / 4, kl=0.1).status_code == 204
    assert alice.report(run_id, 2, reward=9.0).status_code == 204
    found = alice.get(f"/runs/{run_id}/metrics.json").json()
    assert (found["names"], found["important"], found["last_step"]) == (["kl", "reward"], ["reward"], 2)
    assert {name: of["value"] for name, of in found["metrics"].items()} == {"reward": [0.0, 0.25, 9.0]}
    part = alice.get(f"/runs/{run_id}/metrics.json?shown=kl&shown=none&first=1&last=1").json()["metrics"]
    assert {name: (of["step"], of["value"]) for name, of in part.items()} == {
        "reward": ([1], [0.25]),
        "kl": ([1], [0.1]),
    }
    lines = list(csv.DictReader(io.StringIO(alice.get(f"/runs/{run_id}/metrics.csv").text)))
    assert [(line["name"], line["step"]) for line in lines] == [(n, s) for n in ("kl", "reward") for s in "012"]
    assert bob.report(run_id, 0, reward=1).status_code == 404
    for body, named in (
        ({"step": -1, "metrics": {"a": 1}}, "step"),
        ({"step": 0, "metrics": {"a": "1"}}, "metrics.a"),
        ({"step": 0, "metrics": {"a": True}}, "metrics.a"),
        ({"step": 0, "metrics": {"": 1}}, "metrics"),
        ({"metrics": {"a": 1}}, "step"),
    ):
        url = f"/training_runs/{run_id}/metrics"
        refused = alice.server.http.post(url, json=body, headers={"x-api-key": alice.key})
        assert refused.status_code == 422 and named in refused.text, body


def test_a_run_is_named_tagged_and_found_by_its_words_and_its_metadata(alice: Owner) -> None:
    session = alice.post("/create_session", sdk_version="0.38.0", display_name="Grid search", tags=["sweep"])
    made = alice.post(
        "/create_model",
        session_id=session["session_id"],
        model_seq_id=0,
        base_model="tiny",
        lora_config={"rank": 8},
        user_metadata={"renderer": "Qwen3 VL", "größe": "fünf"},
    )
    run_id = made["model_id"]
    assert ">Grid search</a>" in alice.get("/runs").text
    labels = {"name": "Zählen <b>", "notes": "first\ntry", "tags": "vision, best , vision"}
    head = alice.change("POST", f"/runs/{run_id}/labels", **labels).text
    assert "Zählen &lt;b&gt;</h1>" in head and "first\ntry" in head and head.count(">vision</a>") == 1
    for words in ("Zählen", "BEST", "sweep", "renderer=qwen3", "renderer=Qwen3 VL", "größe=fünf", "try", run_id[:8]):
        assert run_id in alice.pages.get("/runs", params={"q": words}).text, words
    for words in ("renderer=other", "qwen=renderer", 'a"b=1', "a\\b=1", "=", "best nothing", "100%"):
        assert run_id not in alice.pages.get("/runs", params={"q": words}).text or words == "=", words
    alice.change("POST", f"/runs/{run_id}/labels", name="", notes="", tags="")
    assert ">Grid search</h1>" in alice.get(f"/runs/{run_id}").text
    assert alice.change("POST", f"/runs/{run_id}/labels", name="x" * 201).status_code == 404


def test_a_page_of_runs_that_is_no_longer_there_is_the_last(alice: Owner) -> None:
    run_id = alice.new_run()
    for path in ("/?page=9", "/runs?page=9"):
        text = alice.get(path).text
        assert run_id in text and 'name="page" value="1"' in text and "No runs yet" not in text


def test_several_runs_are_compared_on_the_page_of_the_first(alice: Owner) -> None:
    run_id, second, third = (alice.new_run() for _ in range(3))
    there = alice.pages.get("/compare", params={"run": [run_id, second, third]}).headers["location"]
    assert there.startswith(f"/runs/{run_id}?with=")
    assert re.findall(r'value="([^"]+)" data-name="[^"]*" checked', alice.get(there).text) == [third, second]


def test_a_run_whose_weights_are_sampled_from_is_sampling(alice: Owner) -> None:
    run_id = alice.new_run()
    saved = alice.post("/save_weights_for_sampler", model_id=run_id, seq_id=1, path="now")["path"]
    gate = alice.server.backend.tiny.sampler.gate
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
    session_id = alice.post("/create_session", sdk_version="0.38.0")["session_id"]
    client = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": saved}
    sampler_id = alice.post("/create_sampling_session", **client)["sampling_session_id"]
    for body in ({"sampling_session_id": sampler_id, "seq_id": 0}, {"model_path": saved}):
        alice.server.set_gate(gate, is_open=False)
        sent = {**body, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
        accepted = alice.server.http.post("/asample", json=sent, headers={"x-api-key": alice.key})
        seen = alice.get(f"/runs/{run_id}/summary").text
        found = alice.get("/runs?q=sampling").text
        alice.server.set_gate(gate, is_open=True)
        alice._result(accepted)
        assert '<span class="state sampling">sampling</span>' in seen and run_id in found, body
    assert '<span class="state idle">idle</span>' in alice.get(f"/runs/{run_id}/summary").text


def test_the_settings_in_which_compared_runs_differ_are_a_table(alice: Owner, bob: Owner) -> None:
    runs = [alice.new_run({"lr": rate, "task": "counting", "name": f"rate {rate}"}) for rate in ("1e-4", "3e-4")]
    alice.train(runs[0], range(1))
    text = alice.get(f"/runs/{runs[0]}/settings?with={runs[1]}").text
    table = text.partition("Equal settings")[0]
    rows = {
        row[0]: row[1:] for row in re.findall(r'<th scope="row">([^<]*)</th><td>([^<]*)</td><td>([^<]*)</td>', table)
    }
    assert rows.pop("metadata lr") == ("1e-4", "3e-4") and rows.pop("learning rate (last)") == ("0.25", "–")
    assert set(rows) == {"seed"}
    assert "metadata task" in text and ">counting<" in text and ">rate 1e-4<" in table
    assert alice.get(f"/runs/{runs[0]}/settings").text.strip() == ""
    foreign = bob.new_run()
    assert alice.get(f"/runs/{runs[0]}/settings?with={foreign}").status_code == 404


def test_a_group_leads_to_the_mean_curves_of_its_newest_runs(alice: Owner) -> None:
    runs = [alice.new_run({"sweep": "mean"}) for _ in range(9)]
    link = alice.get("/?group=sweep").text
    assert "/compare?group=sweep&amp;in=mean&amp;only=true" in link
    there = alice.pages.get("/compare", params={"group": "sweep", "in": "mean", "only": "true"}).headers["location"]
    assert there.startswith(f"/runs/{runs[8]}?with=") and there.endswith("&band=true") and there.count("with=") == 7
    page = alice.get(there).text
    assert page.count(" checked>") == 8
    assert alice.pages.get("/compare").status_code == 400


def test_all_groups_are_reached_by_pages(bob: Owner) -> None:
    for number in range(52):
        bob.new_run({"trial": f"{number:02}"})
    pages = [bob.get(f"/?group=trial&page={number}").text for number in (1, 2, 3)]
    first, second, last = (set(re.findall(r"in=(\d\d)&amp;", text)) for text in pages)
    assert first | second == {f"{number:02}" for number in range(52)} and not first & second
    assert last == second, "behind the last page is the last"
    assert "page=2&amp;group=trial" in pages[0] and ">Smaller<" in pages[0] and ">Smaller<" not in pages[1]
