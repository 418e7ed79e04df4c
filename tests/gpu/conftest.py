"""The same server, on CUDA."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.agreement import share_kernels
from tests.servers import MODEL, Server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give these tests more time: most start engines, which compile, and share the machine's cores with others."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def server(tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    data_dir = tmp_path_factory.mktemp("server") / "data"
    share_kernels(data_dir / "scratch")
    running = Server(data_dir, {MODEL: tiny_vl}, "--device", "cuda").start()
    yield running
    assert running.stop() == 0, running.log.read_text()[-4000:]
