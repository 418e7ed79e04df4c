"""Let torchvision's CUDA build, the one on PyPI, be imported on top of a CPU build of torch.

Its compiled ops need libtorch_cuda, so on CPU they do not load. `torchvision._meta_registrations` gives fake
kernels to two of them, `nms` and `qnms`, without checking that they exist, and the import fails with
"operator torchvision::nms does not exist". Declaring those two schemas is enough: resizing and normalising,
all that image processors ask of torchvision, are plain torch operations.

`python .ci/torchvision_shim.py` copies this file into site-packages beside a `.pth` file that registers
the import hook in every interpreter of the environment, vLLM's engine process and torch's ranks included.
The hook costs nothing until torchvision is imported, and does nothing where torchvision's own ops load.
This file therefore imports nothing of this project.
"""

import shutil
import sys
import sysconfig
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

INSTALLED_NAME = "tinker_server_torchvision_shim"

_declared: list[object] = []  # torch forgets the schemas when their Library object is collected


class MissingOps(MetaPathFinder):
    """Finds no module; it watches for the moment at which the schemas are needed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Declare the schemas between `torchvision.extension`, which tries the ops, and their first use."""
        if fullname == "torchvision._meta_registrations":
            sys.meta_path.remove(self)
            if not sys.modules["torchvision.extension"]._has_ops():
                _declare_schemas()
        return None


def _declare_schemas() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for op in ("nms", "qnms"):
        library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)


def register() -> None:
    """Add the hook to this interpreter; the `.pth` file calls this at start-up."""
    sys.meta_path.insert(0, MissingOps())


def install() -> Path:
    """Copy this file and its `.pth` into this interpreter's site-packages, and return that directory."""
    site_packages = Path(sysconfig.get_paths()["purelib"])
    shutil.copyfile(__file__, site_packages / f"{INSTALLED_NAME}.py")
    start_up = f"import {INSTALLED_NAME}; {INSTALLED_NAME}.register()\n"
    (site_packages / f"{INSTALLED_NAME}.pth").write_text(start_up, encoding="utf-8")
    return site_packages


if __name__ == "__main__":
    install()
