"""The embedded model learns real photographs through the server: names that it was never trained on.

pytest tests/e2e/test_learning.py
"""

import json
import subprocess
import sys

import pytest

from tests.photographs import EXAMPLES, SEEING


@pytest.mark.slow
def test_the_embedded_model_learns_what_photographs_show(tmp_path):
    program = EXAMPLES / "tiny_vl" / "through_server.py"
    command = [sys.executable, str(program), "demo", "unused", str(tmp_path), "--steps", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    (figures,) = json.loads((tmp_path / "figures.json").read_text())
    assert figures["test_photographs"] == 200 and figures["accuracy_before"] < 0.1
    assert figures["accuracy"] >= 0.85 and figures["mean_per_class"] >= 0.85
    assert figures["loss_with_swapped_images"] > figures["loss"] + 0.3, "it answers without looking"


def test_the_embedded_model_is_small_and_whole():
    files = {path.name: path.stat().st_size for path in SEEING.iterdir()}
    assert sum(files.values()) <= 25_000_000
    assert {"config.json", "tokenizer.json", "preprocessor_config.json", "chat_template.jinja"} <= files.keys()
