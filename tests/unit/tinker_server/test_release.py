"""Version and commit come from git in a checkout, and from the build's file elsewhere."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tinker_server.release import Release, find

ROOT = Path(__file__).parents[3]


def git(root: Path, *arguments: str) -> str:
    by = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, env=os.environ | by, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of one commit, whose changelog has closed 1.2.0."""
    root = tmp_path / "checkout"
    (root / "tinker_server").mkdir(parents=True)
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 1.2.0\n- a\n\n## 1.1.0\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "First")
    return root


def commit_of(root: Path) -> str:
    return git(root, "rev-parse", "--short=9", "HEAD")


def test_a_clean_checkout_of_a_tag_has_its_version_and_an_image_tag_with_the_commit(checkout: Path) -> None:
    git(checkout, "tag", "v1.2.0")
    commit = commit_of(checkout)
    found = find(checkout)
    assert found == Release("1.2.0", commit)
    assert found.tag == f"1.2.0-g{commit}" and found.label == f"1.2.0 (commit {commit})"


def test_commits_after_the_tag_and_changes_without_a_commit_tell_builds_apart(checkout: Path) -> None:
    git(checkout, "tag", "v1.2.0")
    git(checkout, "commit", "--quiet", "--allow-empty", "-m", "Second")
    commit = commit_of(checkout)
    assert find(checkout) == Release(f"1.2.0+1.g{commit}", commit)
    assert find(checkout).tag == f"1.2.0-1.g{commit}"
    (checkout / "CHANGELOG.md").write_text("changed")
    assert find(checkout) == Release(f"1.2.0+1.g{commit}.dirty", commit)


def test_a_clone_without_tags_has_the_version_that_the_changelog_closed_last(checkout: Path, tmp_path: Path) -> None:
    git(checkout, "tag", "v1.2.0")
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--quiet", "--depth", "1", "--no-tags", checkout.as_uri(), str(shallow))
    assert find(shallow) == Release(f"1.2.0+g{commit_of(checkout)}", commit_of(checkout))


def test_without_git_the_builds_file_counts_and_a_plain_source_tree_is_unknown(checkout: Path) -> None:
    (checkout / ".git").rename(checkout.parent / "no-git")
    assert find(checkout) == Release("1.2.0+unknown", "unknown")
    (checkout / "tinker_server/build.json").write_text(json.dumps({"version": "1.3.0", "commit": "abcdef012"}))
    assert find(checkout) == Release("1.3.0", "abcdef012")


def test_what_the_program_prints_is_what_compose_and_the_image_read() -> None:
    program = ["python3", str(ROOT / "tinker_server/release.py")]
    printed = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    lines = dict(line.split("=", 1) for line in printed.splitlines())
    found = find(ROOT)
    assert lines == {"VERSION": found.version, "COMMIT": found.commit, "TAG": found.tag}
