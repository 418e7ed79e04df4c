"""The wheel has every file that the server reads, says what it is, and its program starts."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

from tinker_server.release import find

ROOT = Path(__file__).parents[2]
PACKAGES = ("api_schemas", "backends", "migrations", "tinker_server")
PROJECT: Any = tomllib.loads((ROOT / "pyproject.toml").read_text())

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as pip builds it, from the files that git knows, by the setuptools that is installed: no index is asked."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in listed:
        if name.startswith(PACKAGES) or "/" not in name:
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name, follow_symlinks=False)
    (folder / "source/tinker_server/build.json").write_text(json.dumps(find(ROOT)._asdict()))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*command, "--wheel-dir", folder, folder / "source"], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_has_the_files_of_its_packages_and_of_nothing_else(wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = {name for name in listed if name.startswith(PACKAGES) and "/" in name and (ROOT / name).is_file()}
    ours = {name if name.startswith("tinker_server/") else f"tinker_server/{name}" for name in files}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == ours | {"tinker_server/build.json"}


def test_its_metadata_say_what_it_is_and_of_whom(wheel: Path, metadata: Message) -> None:
    assert metadata["Version"] == find(ROOT).version and metadata["Requires-Python"] == "<3.15,>=3.11"
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Author"] and metadata["Keywords"]
    assert "# tinker-server" in str(metadata.get_payload()) and metadata["Description-Content-Type"] == "text/markdown"
    first, behind = map(int, re.findall(r"3\.(\d+)", PROJECT["project"]["requires-python"]))
    named = re.findall(r"Python :: 3\.(\d+)", "\n".join(metadata.get_all("Classifier", [])))
    assert [int(minor) for minor in named] == list(range(first, behind))
    assert set(metadata.get_all("Provides-Extra", [])) == {"cpu", "gpu", "sdk", "postgres", "otel", "cluster"}


def test_it_has_the_licence_of_everything_that_it_brings(metadata: Message) -> None:
    named = {Path(name).name for name in metadata.get_all("License-File", [])}
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    vendored = {Path(name).name for name in listed.split() if Path(name).name.startswith(("LICENSE", "NOTICE"))}
    assert named == vendored | {"LICENSE"} and len(vendored) >= 6


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's program in an environment of its own, which borrows this one's other packages."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (borrowed,) = {path for path in map(Path, sys.path) if path.name == "site-packages"}
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(command, capture_output=True, check=True)
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    return folder / "bin/python"


def test_the_program_of_the_wheel_says_version_and_commit(program: Path, tmp_path: Path) -> None:
    (script,) = program.parents[1].glob("lib/python*/site-packages/bin/tinker-server")
    said = subprocess.run(
        [program, script, "--version"], cwd=tmp_path, env={}, capture_output=True, text=True, check=False
    )
    assert said.stdout == f"tinker-server {find(ROOT).label}\n", said.stderr


def test_the_wheel_knows_its_files_without_the_repository(program: Path, tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; import tinker_server; from tinker_server.embedded import DIRECTORIES;"
        "from tinker_server.dashboard.rendering import FOLDER;"
        "print(tinker_server.__file__, all(Path(path, 'config.json').is_file() for path in DIRECTORIES.values()),"
        " (FOLDER / 'templates/base.html').is_file())"
    )
    done = subprocess.run([program, "-c", code], cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
    file, *found = done.stdout.split()
    assert str(program.parents[1]) in file and found == ["True", "True"], done.stderr
