"""A pytest plugin that `make test-fast` loads: an import of torch, or of what brings it, fails by the file's name."""

import os
import sys
import sysconfig
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import FrameType, ModuleType

import pytest

REFUSED = ("ray", "torch", "transformers", "vllm")
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))


class Refusal(MetaPathFinder):
    """Stands before all finders, and finds nothing."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Fail in place of an ImportError, which the SDK would take for a machine without torch."""
        if fullname in REFUSED:
            pytest.fail(f"{_importer(sys._getframe(1))} imports {fullname}: not in make test-fast")


def _importer(frame: FrameType | None) -> str:
    """Return the file that is closest to the import and belongs to no library."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_absolute() and "site-packages" not in path.parts and not path.is_relative_to(STANDARD_LIBRARY):
            return f"{os.path.relpath(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return "a library"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    _refuse()


def pytest_configure() -> None:
    """Refuse in a worker too, which has loaded its conftests before."""
    _refuse()


def _refuse() -> None:
    if imported := [name for name in REFUSED if name in sys.modules]:
        raise pytest.UsageError(f"already imported: {', '.join(imported)}: not in make test-fast")
    if not any(isinstance(finder, Refusal) for finder in sys.meta_path):
        sys.meta_path.insert(0, Refusal())
