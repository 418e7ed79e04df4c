"""The repository's own habits: workflows, hooks and pages agree with the project they serve."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.factories import present
from tinker_server.release import release

ROOT = Path(__file__).parents[2]


def test_the_workflow_runs_ci_on_every_supported_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    job = workflow["jobs"]["test"]
    supported = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    first, behind = (int(minor) for minor in present(re.fullmatch(r">=3\.(\d+),<3\.(\d+)", supported)).groups())
    assert job["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(first, behind)]
    assert job["steps"][-1]["run"] == ".ci/run"


def test_a_tag_builds_the_wheel_and_both_images_and_installs_the_wheel_on_every_supported_python() -> None:
    workflow, ci = (yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text()) for name in ("release", "ci"))
    jobs = workflow["jobs"]
    assert workflow[True] == {"push": {"tags": ["v[0-9]*"]}}  # YAML 1.1 reads `on` as true
    assert jobs["install"]["strategy"]["matrix"] == ci["jobs"]["test"]["strategy"]["matrix"]
    assert jobs["image"]["strategy"]["matrix"]["extra"] == ["gpu", "cpu"]
    for name, made in (("wheel", "make wheel"), ("image", "make image EXTRA=${{ matrix.extra }}")):
        checkout, *steps = jobs[name]["steps"]
        assert checkout["with"] == {"fetch-depth": 0}, "the version is counted from the tag"
        assert made in [step.get("run") for step in steps]
    assert set(jobs["publish"]["needs"]) == {"install", "image"}


@pytest.mark.parametrize(
    ("subject", "is_taken"),
    [
        ("Add a test", True),
        ("A" * 72, True),
        ("A" * 73, False),
        ("Add a test.", False),
        ("# comment\nAdd a test", True),
    ],
)
def test_a_commit_subject_is_short_and_has_no_full_stop(subject: str, is_taken: bool, tmp_path: Path) -> None:
    (tmp_path / "message").write_text(
        subject + "\n\nA body may be as long as it needs to be, beyond seventy-two letters.\n"
    )
    ended = subprocess.run([ROOT / ".ci/commit_subject.sh", tmp_path / "message"], capture_output=True, check=False)
    assert (ended.returncode == 0) == is_taken


def test_hooks_and_templates_are_whole() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    entries = [hook["entry"].split()[0] for hook in hooks]
    assert all(entry.startswith(".venv/bin/") or (ROOT / entry).exists() for entry in entries)
    for template in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(template.read_text())


def test_the_changelog_begins_with_what_is_not_released() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == "Unreleased" and all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions[1:])
    assert release().version.partition("+")[0] in versions


def test_the_glossary_is_in_the_order_of_the_alphabet() -> None:
    words = re.findall(r"^\| ([^|]+) \| ", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)[1:]
    assert words == sorted(words, key=str.casefold)


def test_the_docstring_of_a_function_begins_with_a_verb() -> None:
    """As far as a pattern sees it: with no article and no shape. An `__init__` may describe its parameters."""
    files = [path for room in ("api_schemas", "backends", "tinker_server") for path in (ROOT / room).rglob("*.py")]
    nouns = [
        f"{path.relative_to(ROOT)}: {node.name}" for path in files for node in _functions_described_by_a_noun(path)
    ]
    assert len(files) > 300 and nouns == []


def _functions_described_by_a_noun(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.walk(ast.parse(path.read_text()))
    functions = [node for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [
        node
        for node in functions
        if re.match(r"\[|(The|A|An) ", ast.get_docstring(node) or "") and not _may_be_a_noun(node)
    ]


def _may_be_a_noun(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return node.name == "__init__" or any("property" in ast.unparse(one) for one in node.decorator_list)


def test_a_docstring_that_begins_with_a_noun_is_found(tmp_path: Path) -> None:
    (tmp_path / "nouns.py").write_text(
        """
def found(): "The number."
async def also(): "[T] float32."
def verb(): "Return the number."
class Thing:
    @property
    def number(self): "The number."
    @cached_property
    def other(self): "A number."
    def __init__(self): "The number is even."
"""
    )
    assert [node.name for node in _functions_described_by_a_noun(tmp_path / "nouns.py")] == ["found", "also"]
