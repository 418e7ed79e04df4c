"""The embedded model sees: after a few steps of fine-tuning it calls a red square red.

pytest tests/e2e/test_squares.py
"""

from pathlib import Path

import pytest

from tests.photographs import SEEING
from tests.servers import Server
from tests.squares import check_that_a_red_square_is_called_red
from tinker_server.embedded import TINY_VL


@pytest.mark.slow
def test_a_red_square_is_called_red(tmp_path: Path) -> None:
    server = Server(tmp_path / "data", {TINY_VL: SEEING}).start()
    check_that_a_red_square_is_called_red(server.client(), TINY_VL)
    assert server.stop() == 0, server.log.read_text()[-4000:]
