"""The code of the documentation runs as it stands, but for the server's address and its model.

pytest tests/e2e/test_docs.py
"""

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.photographs import photographs
from tests.servers import KEY, MODEL, Server

pytestmark = pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning")
DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md") if "```python" in path.read_text())
CURLS = re.findall(r"```bash\n(.*?)```", (DOCS / "chat.md").read_text(), re.DOTALL)


def here(text: str, server: Server, directory: Path) -> str:
    """For the one server of the tests, whose model is in the directory."""
    text = text.replace('DIRECTORIES["tinker-server/tiny-vl"]', repr(str(directory)))
    changed = text.replace("http://127.0.0.1:8000", server.base_url).replace("tinker-server/tiny-vl", MODEL)
    return changed.replace("tml-local", KEY)


@pytest.mark.parametrize("page", PAGES)
def test_a_pages_code_runs_block_after_block(
    page: str, server: Server, tiny_vl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a page may write files
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    namespace: dict[str, object] = {}
    for number, block in enumerate(blocks):
        exec(compile(here(block, server, tiny_vl), f"{page}, block {number}", "exec"), namespace)


@pytest.mark.parametrize("command", CURLS, ids=lambda text: text.split()[2].rpartition("/")[2])
def test_a_curl_of_each_endpoint_is_answered(command: str, server: Server, tiny_vl: Path) -> None:
    said = subprocess.run(
        ["bash", "-e", "-c", here(command, server, tiny_vl)], capture_output=True, text=True, timeout=60, check=True
    )
    answer = json.loads(said.stdout)
    assert "error" not in answer and {"data", "choices", "content", "input_tokens"} & set(answer), answer


def test_a_run_by_curl_trains_saves_and_samples_with_text_and_with_a_picture(
    server: Server, tiny_vl: Path, tmp_path: Path
) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (DOCS / "curl.md").read_text(), re.DOTALL)
    (tmp_path / "photo.jpg").write_bytes(photographs("test", 1)[0].jpeg)
    script = here("\n".join(blocks), server, tiny_vl)
    said = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert said.stderr == ""
    answers = [json.loads(line) for line in said.stdout.splitlines() if line.startswith('{"')]
    (batch,) = (one for one in answers if "loss_fn_outputs" in one)
    assert batch["loss_fn_outputs"][0]["logprobs"]["shape"] == [5] and batch["metrics"]["tokens:sum"] == 3
    (metrics,) = (ast.literal_eval(line) for line in said.stdout.splitlines() if line.startswith("{'"))
    assert metrics["tokens:sum"] == 1 and metrics["loss:sum"] > 0, "the step with a picture"
    assert len([one for one in answers if one.get("type") == "optim_step"]) == 2
    two, of_picture = (one["sequences"] for one in answers if "sequences" in one)
    assert [len(one) for one in (two, of_picture)] == [2, 1]
    refusals = [one["detail"] for one in answers if "detail" in one]
    assert "Expected 1 tokens, got" in refusals[0] and refusals[1].startswith("adam_params.learning_rate: ")


def test_every_endpoint_has_its_curl() -> None:
    asked = {re.findall(r"127\.0\.0\.1:8000(\S+)", one)[0] for one in CURLS}
    assert asked == {
        "/oai/api/v1/models",
        "/oai/api/v1/chat/completions",
        "/oai/api/v1/completions",
        "/anthropic/api/v1/messages",
        "/anthropic/api/v1/messages/count_tokens",
    }
