"""The code that pages offer runs as it stands, by the real SDK and openai's package, on a server of fakes.

pytest tests/contract/test_code.py
"""

import base64
import html
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.pages import PHOTO
from tests.dashboard import Owner, with_keys
from tests.fake_server import Running

IMAGE = {"type": "image", "format": "jpeg"}


@pytest.fixture(scope="module")
def alice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    server, (key,) = with_keys(tmp_path_factory.mktemp("code"), "alice")
    with Owner(server, key) as alice:
        yield alice.sign_in()
    server.stop()


@pytest.fixture(autouse=True)
def own_key(alice: Owner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TINKER_API_KEY", alice.key)
    monkeypatch.chdir(tmp_path)


def offered(page: str) -> list[str]:
    """The texts that the buttons of a page copy."""
    return [html.unescape(text) for text in re.findall(r'data-copy="([^"]*)"', page)]


def run(program: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(program, "copied", "exec"), names)
    return names


def test_three_lines_train_on_from_a_saved_state_with_its_optimizer(alice: Owner) -> None:
    run_id = alice.new_run()
    alice.train(run_id, range(2))
    alice.save(run_id, 5, "second")
    for page in (f"/runs/{run_id}/checkpoints", "/checkpoints"):
        (program,) = (text for text in offered(alice.get(page).text) if "import tinker" in text)
        assert len(program.splitlines()) == 3 and alice.key not in program
        assert f'create_training_client_from_state_with_optimizer("tinker://{run_id}/weights/second")' in program
    training = run(program)["training"]
    assert training.model_id != run_id and training.get_info().model_data.model_name == "tiny"


def test_weights_that_have_no_optimizer_are_continued_without_and_those_for_a_sampler_are_not(alice: Owner) -> None:
    run_id = alice.new_run()
    alice.post("/save_weights_external", model_id=run_id, seq_id=1, path="out")
    alice.post("/save_weights_for_sampler", model_id=run_id, seq_id=2, path="drawn")
    programs = [text for text in offered(alice.get(f"/runs/{run_id}/checkpoints").text) if "import tinker" in text]
    assert len(programs) == 1 and "_with_optimizer" not in programs[0] and "external_weights/out" in programs[0]


@pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning")
def test_a_sample_is_drawn_again_by_each_program_of_its_page(alice: Owner, capsys: pytest.CaptureFixture[str]) -> None:
    alice.sample(tokens=[5, 6, 7])
    (there,) = set(re.findall(r'href="(/samples/\w+)"', alice.get("/samples").text))
    programs = [text for text in offered(alice.get(there).text)]
    assert len(programs) == 3
    sdk, openai, curl = programs
    asked = alice.server.backend.tiny.sampler
    run(sdk)
    run(openai)
    assert asked.chats[-1].body["prompt"] == [5, 6, 7] and asked.chats[-1].body["seed"] == 7
    said = subprocess.run(["bash", "-e", "-c", curl], capture_output=True, text=True, timeout=20, check=True)
    assert "said" in json.loads(said.stdout), said.stdout
    assert asked.chats[-1].body == asked.chats[-2].body
    assert re.search(r"^\[\d", capsys.readouterr().out, re.MULTILINE)


def test_a_sample_with_an_image_reads_it_from_a_file(alice: Owner, tmp_path: Path) -> None:
    alice.sample(IMAGE | {"data": base64.b64encode(PHOTO).decode()}, tokens=[5, 6])
    there = re.findall(r'href="(/samples/\w+)"', alice.get("/samples").text)[0]
    page = alice.get(there).text
    (program,) = offered(page)
    (tmp_path / "image-1.jpeg").write_bytes(alice.get(f"{there}/images/0").content)
    run(program)
    assert "Save the images of the prompt under the names" in page


def test_a_server_without_keys_names_a_key_that_it_takes(tmp_path: Path) -> None:

    server = Running(tmp_path / "open")
    owner = Owner(server, "tml-any")
    owner.sample(tokens=[1])
    there = re.findall(r'href="(/samples/\w+)"', owner.get("/samples").text)[0]
    assert all("tml-local" in text for text in offered(owner.get(there).text))
    owner.pages.close()
    server.stop()
