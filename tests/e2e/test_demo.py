"""The demo with `--keep`: the embedded model learns real photographs, names that it was never trained on; server and
dashboard stay until Ctrl-C; and it says what to do next.

pytest -m "slow or not slow" tests/e2e/test_demo.py
"""

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.photographs import EXAMPLES, SEEING, photographs

ROOT = EXAMPLES.parent
HEARS = ["env", "--default-signal=INT"]
"""Shells have their background jobs ignore Ctrl-C, with all that these start."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_teaches_photographs_and_leaves_its_server_until_it_is_interrupted(tmp_path: Path) -> None:
    program = EXAMPLES / "caltech10_demo.py"
    command = [*HEARS, sys.executable, str(program), "--keep", "--steps", "20", "--output", str(tmp_path)]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    try:
        said = ""
        while "serve a model of your own" not in said:
            line = demo.stdout.readline()
            assert line, said
            said += line
        accuracy = re.search(r"^accuracy (\S+) -> (\S+) on 200 held-out photographs$", said, re.MULTILINE)
        assert accuracy is not None
        assert float(accuracy[1]) < 0.1 and float(accuracy[2]) >= 0.85
        found = re.search(r"goes on at (\S+) until Ctrl-C", said)
        assert found is not None
        for address in re.findall(rf"^  ({found[1]}\S*)$", said, re.MULTILINE):
            assert httpx.get(address, timeout=60).status_code == 200, address
        assert "/playground?model_path=tinker://" in said
        for page in re.findall(r"^  (docs/\S+)", said, re.MULTILINE):
            assert (ROOT / page).exists(), page
        assert_the_guide_to_rl_learns(found[1])
    finally:
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=180)
    assert demo.returncode == 130
    with pytest.raises(httpx.TransportError):
        httpx.get(found[1], timeout=5)


def assert_the_guide_to_rl_learns(url: str) -> None:
    """With the model of the guide. (`test_docs.py` runs its code with a random one.)"""
    page = (ROOT / "docs/rl.md").read_text().replace("http://127.0.0.1:8000", url)
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True).stdout
    rise = re.search(r"first three steps (\S+), of the last three (\S+)$", said, re.MULTILINE)
    assert rise is not None, said
    assert float(rise[1]) < 0.6 and float(rise[2]) > 0.9


def test_as_many_held_out_photographs_of_each_class_are_asked_about() -> None:
    """An accuracy of 0.85 is then far beyond what an answer without looking has."""
    labels = [photo.label for photo in photographs("test", 200)]
    assert {labels.count(label) for label in labels} == {20} and len(set(labels)) == 10


def test_the_embedded_model_is_small_and_whole() -> None:
    files = {path.name: path.stat().st_size for path in SEEING.iterdir()}
    assert sum(files.values()) <= 25_000_000
    assert {"config.json", "tokenizer.json", "preprocessor_config.json", "chat_template.jinja"} <= files.keys()
