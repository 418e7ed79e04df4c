"""The code of the documentation runs as it stands, but for the server's address and its model.

pytest tests/e2e/test_docs.py
"""

import json
import re
import subprocess
from pathlib import Path

import pytest

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


def test_every_endpoint_has_its_curl() -> None:
    asked = {re.findall(r"127\.0\.0\.1:8000(\S+)", one)[0] for one in CURLS}
    assert asked == {
        "/oai/api/v1/models",
        "/oai/api/v1/chat/completions",
        "/oai/api/v1/completions",
        "/anthropic/api/v1/messages",
        "/anthropic/api/v1/messages/count_tokens",
    }
