"""Options of `make chaos`."""

import pytest

from tests.databases import KINDS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rounds", type=int, help="processes that are killed; each kind of one machine without it")
    parser.addoption("--engines", type=int, default=1, help="engines of the sampler")
    parser.addoption("--nodes", type=int, default=1, help="machines: one that serves, the others have joined it")
    parser.addoption("--database", choices=KINDS, default=KINDS[0], help="on PostgreSQL, with TEST_DATABASE_URL")
    parser.addoption("--seed", type=int, default=20, help="of what is done and who is killed")
