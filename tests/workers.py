"""Keeps tests of a file, and all that share a server or an engine, on one worker."""

from xdist.scheduler import LoadScopeScheduling

TOGETHER = ("tests/contract/sampler/", "tests/conformance/", "tests/e2e/", "tests/chaos/")
"""The first has an engine of its own, all others the one server of a test session."""


class ByEngine(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a worker one file after the other, or all files of an engine."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(TOGETHER[0]):
            return "sampler"
        return "server" if nodeid.startswith(TOGETHER[1:]) else nodeid.partition("::")[0]
