"""Old and new SDKs against one server: python -m tests.sdk_matrix.run [VERSION ...]

Each version runs the same scenario through its own public API in its own virtual environment, and must see the
numbers that the newest one sees. `.sdk-matrix` keeps the environments, so that only the first run is long, and of
the last run what each version saw (VERSION.json) and said (VERSION.log).
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from tests.factories import make_renderer
from tests.models import make_tiny_vl
from tests.sdk_matrix.comparison import contradictions, differences
from tests.sdk_matrix.work import work
from tests.servers import MODEL, Server

REFERENCE = "0.38.0"
VERSIONS = [REFERENCE, "0.34.0", "0.30.4", "0.26.2", "0.25.0", "0.24.1", "0.22.7", "0.16.1", "0.8.1"]
"""Minor versions between which the wire changed, each at its newest patch."""

CACHE = Path(__file__).parents[2] / ".sdk-matrix"
INSTALL_TIMEOUT_S = 900
CLIENT_TIMEOUT_S = 420
"""The SDK repeats a request that fails on the server for five minutes, and only then says why."""
MAX_REASON_CHARS = 400


class Failed(Exception):
    """A version does not install, does not run, or sees other numbers."""


def main(versions: Sequence[str]) -> int:
    """Prints a line per version, the reference first; returns the exit status."""
    disable_progress_bar()
    CACHE.mkdir(exist_ok=True)
    environments = {version: environment(version) for version in versions}
    with tempfile.TemporaryDirectory(prefix="sdk-matrix-") as name:
        directory = Path(name)
        model = make_tiny_vl(directory / "model")
        work_file = directory / "work.json"
        work_file.write_text(json.dumps(work(make_renderer(model))))
        server = Server(directory / "data", {MODEL: model}).start()
        try:
            num_ok = run_all(environments, server.base_url, work_file)
        finally:
            code = server.stop()
            shutil.copy(server.log, CACHE / "server.log")
    if code:
        print(f"FAILED: the server ended with exit status {code}; see {CACHE / 'server.log'}")
    print(f"sdk-matrix: {num_ok} of {len(versions)}")
    return int(num_ok < len(versions) or code != 0)


def environment(version: str) -> Path | Failed:
    """The Python of a version's environment; stamped last, so that an interrupted build is built again."""
    directory = CACHE / version
    python, stamp = directory / "bin" / "python", directory / ".installed"
    if python.exists() and stamp.exists() and stamp.read_text() == sys.version:
        return python
    say(version, "installing")
    quiet = ["--quiet", "--quiet", "--disable-pip-version-check", "--no-compile"]
    try:
        command([sys.executable, "-m", "venv", "--clear", str(directory)], INSTALL_TIMEOUT_S)
        command([str(python), "-m", "pip", "install", *quiet, f"tinker=={version}"], INSTALL_TIMEOUT_S)
    except Failed as error:
        return error
    stamp.write_text(sys.version)
    return python


def run_all(environments: dict[str, Path | Failed], base_url: str, work_file: Path) -> int:
    """Return the number of versions that agree with the reference."""
    reference: dict[str, Any] | None = None
    num_ok = 0
    for version, python in environments.items():
        started = time.monotonic()
        try:
            if isinstance(python, Failed):
                raise python
            seen = scenario(version, python, base_url, work_file)
            require_none(contradictions(seen))
            if version == REFERENCE:
                reference = seen
            if reference is None:
                raise Failed(f"it runs, but {REFERENCE} failed: there are no numbers to compare with")
            require_none(differences(reference, seen))
        except Failed as error:
            say(version, f"FAILED: {error}")
        else:
            num_ok += 1
            say(version, f"ok ({time.monotonic() - started:.1f} s)")
    return num_ok


def scenario(version: str, python: Path, base_url: str, work_file: Path) -> dict[str, Any]:
    """Isolated: neither our packages nor the caller's Python settings are in its sight."""
    client, result_file = Path(__file__).with_name("client.py"), CACHE / f"{version}.json"
    result_file.unlink(missing_ok=True)
    words = [str(python), "-I", str(client), base_url, str(work_file), str(result_file)]
    command(words, CLIENT_TIMEOUT_S, log=CACHE / f"{version}.log")
    seen: dict[str, Any] = json.loads(result_file.read_text())
    if seen["version"] != version:
        raise Failed(f"its environment holds {seen['version']}; remove {CACHE / version}")
    values: dict[str, Any] = seen["seen"]
    return values


def command(words: list[str], timeout_s: float, log: Path | None = None) -> None:
    """Raises Failed with the last line that the command said: an exception's, as a rule."""
    try:
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"no end after {timeout_s} s: {' '.join(words[:4])}") from error
    if log is not None:
        log.write_text(done.stdout)
    if done.returncode:
        lines = done.stdout.strip().splitlines() or ["no message"]
        raise Failed(f"{lines[-1][:MAX_REASON_CHARS]} (exit status {done.returncode})")


def require_none(found: Iterable[str]) -> None:
    texts = list(found)
    if texts:
        raise Failed(texts[0] + (f", and {len(texts) - 1} more" if texts[1:] else ""))


def say(version: str, text: str) -> None:
    print(f"sdk {version}: {text}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="sdk-matrix", description="Old and new SDKs against one server.")
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"by default {', '.join(VERSIONS)}")
    chosen = parser.parse_args().versions or VERSIONS
    sys.exit(main([REFERENCE, *(version for version in chosen if version != REFERENCE)]))
