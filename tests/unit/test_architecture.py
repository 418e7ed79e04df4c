"""docs/architecture.md is a map: what it names is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/architecture.md").read_text()
PLACES = sorted(set(re.findall(r"`((?:api_schemas|backends|tinker_server)/[\w/]+\.py)(?::(\w+))?`", TEXT)))


@pytest.mark.parametrize(("path", "name"), PLACES)
def test_what_the_map_names_is_there(path: str, name: str) -> None:
    source = (ROOT / path).read_text()
    assert not name or re.search(rf"(?:def|class) {name}\b|^{name}\b.* = ", source, re.MULTILINE)


def test_the_map_has_every_room() -> None:
    for package in ("backends", "tinker_server"):
        for folder in (ROOT / package).iterdir():
            if (folder / "__init__.py").exists() and not folder.is_symlink():
                assert f"`{package}/{folder.name}/`" in TEXT


@pytest.mark.parametrize(
    "folder", ["backends/sampler", "backends/sampler/engine", "backends/trainer", "tinker_server/store"]
)
def test_the_index_of_a_folder_names_its_files(folder: str) -> None:
    index = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
    named = re.findall(r"`(\w+)`", "".join(re.findall(r"^- (.*?):", index, re.MULTILINE)))
    files = [path.stem for path in (ROOT / folder).glob("*.py") if path.stem != "__init__"]
    assert sorted(named) == sorted([*files, *(path.parent.name for path in (ROOT / folder).glob("*/__init__.py"))])
