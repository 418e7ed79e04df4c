"""A pytest plugin that `make test-fast` loads: an import of torch, or of what brings it, fails by the file's name."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import FrameType, ModuleType

import pytest

LEFT_OUT = ("ray", "torch", "transformers", "vllm")
ROOT = Path(__file__).parents[1]


class Refusal(MetaPathFinder):
    """Stands before all finders, and finds nothing."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Fail rather than raise ImportError: the SDK would take that for a machine without torch."""
        if fullname in LEFT_OUT:
            pytest.fail(f"{_importer(sys._getframe())} imports {fullname}, which make test-fast leaves out")


def _importer(frame: FrameType | None) -> str:
    """Return the file of this project that is closest to the import."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts and path != Path(__file__):
            return f"{path.relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "a library"


sys.meta_path.insert(0, Refusal())
