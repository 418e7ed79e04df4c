"""One engine for all tests of the sampler in this folder."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.sampling import (
    RANKS,
    Reference,
    sampler_config,
)
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.sampler.pool import SamplerPool


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def sampler(tiny_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SamplerPool]:
    running = SamplerPool(sampler_config(tiny_vl, tmp_path_factory.mktemp("scratch")))
    await running.start()
    yield running
    await running.stop()


@pytest.fixture(scope="package")
def reference(tiny_vl: Path, renderer: Renderer) -> Reference:
    return Reference(tiny_vl, renderer, RANKS)


@pytest.fixture(scope="package")
def adapters(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path | None]:
    """Saved directories by adapter name; None is the base model."""
    root = tmp_path_factory.mktemp("adapters")
    return {None: None} | {name: reference.save(name, rank, root / name) for name, rank in RANKS.items()}
