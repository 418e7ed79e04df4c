"""A torchvision that does not load with its torch is named in a line."""

import subprocess
import sys
from pathlib import Path

BROKEN = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
    del sys.modules[name]
sys.path.insert(0, sys.argv[1])
from tinker_server.__main__ import main
sys.argv = ["tinker-server", "doctor", "--model", "tinker-server/tiny-vl", "--data-dir", sys.argv[1]]
sys.exit(main())
"""


def test_a_torchvision_of_another_torch_is_named_in_one_line(tmp_path: Path) -> None:
    """As the build for CUDA says it beside a torch for the CPU."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist\\nfurther lines')"
    )
    done = subprocess.run([sys.executable, "-c", BROKEN, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("tinker-server: this torchvision (0.") and "does not belong to this torch (2." in line
    assert ".ci/install.sh" in line and line.endswith("(operator torchvision::nms does not exist)")
