"""Gives the package its version, which pyproject.toml cannot compute, and writes version and commit into the wheel."""

import json
import runpy
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py

_RELEASE: Any = runpy.run_path(str(Path(__file__).parent / "tinker_server/release.py"))
_BUILT = _RELEASE["find"](Path(__file__).resolve().parent)


class WriteRelease(build_py):
    """Copies the packages, and adds the file that `release.py` reads where there is no git."""

    def run(self) -> None:
        """Write into the build's folder only: an editable installation reads the checkout."""
        super().run()
        if not self.editable_mode:
            written = Path(self.build_lib, "tinker_server", _RELEASE["WRITTEN"])
            written.write_text(json.dumps(_BUILT._asdict()), encoding="utf-8")


setup(version=_BUILT.version, cmdclass={"build_py": WriteRelease})
