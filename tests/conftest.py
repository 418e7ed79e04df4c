"""Fixtures shared by all tests: tiny models, made once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.rendering import Renderer
from tests.models import make_tiny_text, make_tiny_vl
from tests.servers import MODEL, Server


@pytest.fixture(scope="session")
def tiny_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-VL of 0.3 M parameters."""
    return make_tiny_vl(tmp_path_factory.mktemp("models") / "tiny-vl")


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random text-only Qwen3."""
    return make_tiny_text(tmp_path_factory.mktemp("models") / "tiny-text")


@pytest.fixture(scope="session")
def renderer(tiny_vl: Path) -> Renderer:
    return make_renderer(tiny_vl)


def make_renderer(source: Path) -> Renderer:
    return Renderer(str(source), image_cache_bytes=1 << 26, max_image_pixels=10**7)


@pytest.fixture(scope="session")
def server(tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The one server, and so the one vLLM engine, of a test session."""
    running = Server(tmp_path_factory.mktemp("server") / "data", {MODEL: tiny_vl}).start()
    yield running
    assert running.stop() == 0, running.log.read_text()[-4000:]
