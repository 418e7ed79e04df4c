"""Version and commit of this build: by git in a checkout, else from the file that the build wrote.

`setup.py`, `make image` and the workflows run this file before anything is installed, so it imports only the standard
library. As a program it prints what `deploy/.env` and an image need.
"""

import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parents[1]
WRITTEN = "build.json"
"""The file beside this one that a build writes."""
UNKNOWN = "unknown"
_DESCRIBE = ("describe", "--tags", "--match", "v[0-9]*", "--long", "--always", "--dirty", "--abbrev=9")
_DESCRIBED = re.compile(r"(?:v(?P<version>\d[\w.]*)-(?P<distance>\d+)-g)?(?P<commit>[0-9a-f]{7,40})(?P<dirty>-dirty)?")
_CLOSED = re.compile(r"^## (\d[\w.]*)", re.MULTILINE)


class Release(NamedTuple):
    """What tells builds apart."""

    version: str
    """The tag, such as 1.0.0. If the build is not exactly the tag's, then +COMMITS_SINCE.gCOMMIT follows."""
    commit: str

    @property
    def tag(self) -> str:
        """The tag of an image: it always names the commit, and has no +, which tags may not have."""
        tag = self.version.replace("+", "-")
        return tag if self.commit in tag else f"{tag}-g{self.commit}"

    @property
    def label(self) -> str:
        """Both, for people."""
        return f"{self.version} (commit {self.commit})"


@cache
def release() -> Release:
    """Return the release that runs."""
    return find(_ROOT)


def find(root: Path) -> Release:
    """Return the release of the tree `root`, a checkout or a directory where the package is installed."""
    written = root / "tinker_server" / WRITTEN
    if (root / ".git").exists() and (found := _ask_git(root)):
        return found
    if written.exists():
        return Release(**json.loads(written.read_text()))
    return Release(f"{_last_closed(root)}+{UNKNOWN}", UNKNOWN)


def _ask_git(root: Path) -> Release | None:
    """Return a checkout's release; None if git is missing or refuses."""
    try:
        done = subprocess.run(["git", "-C", root, *_DESCRIBE], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    found = _DESCRIBED.fullmatch(done.stdout.strip())
    if found is None:
        return None
    commit, distance = found["commit"], int(found["distance"] or 0)
    is_tagged = found["version"] is not None and distance == 0 and not found["dirty"]
    parts = [str(distance)] * bool(distance) + [f"g{commit}"] + ["dirty"] * bool(found["dirty"])
    version = found["version"] or _last_closed(root)  # a shallow clone has no tags
    return Release(version if is_tagged else f"{version}+{'.'.join(parts)}", commit)


def _last_closed(root: Path) -> str:
    """Return the version that the changelog closed last."""
    changelog = root / "CHANGELOG.md"
    found = _CLOSED.search(changelog.read_text(encoding="utf-8")) if changelog.exists() else None
    return found[1] if found else "0"


if __name__ == "__main__":
    built = release()
    print(f"VERSION={built.version}\nCOMMIT={built.commit}\nTAG={built.tag}")
