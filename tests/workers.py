"""Keeps tests of a file, and all that share a server or an engine, on one worker."""

from xdist.scheduler import LoadScopeScheduling

TOGETHER = ("tests/contract/sampler/", "tests/conformance/", "tests/e2e/")
"""The first has an engine of its own, all others the one server of a test session."""
APART = "tests/chaos/"
"""Each test takes minutes, and has its own server."""


class ByEngine(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a worker one file after the other, or all files of an engine, or one test."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(TOGETHER[0]):
            return "sampler"
        if nodeid.startswith(APART):
            return nodeid
        return "server" if nodeid.startswith(TOGETHER[1:]) else nodeid.partition("::")[0]
