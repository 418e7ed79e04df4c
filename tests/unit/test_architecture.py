"""docs/architecture.md is a map: what it names is there."""

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
            if (folder / "__init__.py").exists():
                assert f"`{package}/{folder.name}/`" in TEXT
