"""The registry of changes inside other projects' code: each is made to the code that it was written for, or refused."""

import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tinker_server.backends.configure.examine import PATCHES
from tinker_server.backends.families.tower_patches import tower_patch
from tinker_server.backends.patches import Patch, for_device, hash_of, require_as_written, source_of
from tinker_server.backends.protocol import BackendFailed

Project = Callable[..., str]
NUMBERS = itertools.count()
"""Sources are read once in a process."""

CODE = """
LIMIT = 3


def first(limit=LIMIT):
    return "first"


class Engine:
    size = LIMIT

    @staticmethod
    def step():
        return "their step"

    def other(self):
        return 1
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Writes the files of another project, by module, and gives its package's name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(**modules: str) -> str:
        name = f"other_project_{next(NUMBERS)}"
        (tmp_path / name).mkdir()
        for module, text in {"__init__": "", **modules}.items():
            (tmp_path / name / f"{module}.py").write_text(text)
        importlib.invalidate_caches()
        return name

    return make


def patched(target: str, as_in: str | None = None, **fields: object) -> Patch:
    """A change of `target`, written for the code that is at `as_in`."""
    source = source_of(as_in or target)
    assert source is not None
    return Patch("a change", target, hash_of(source), "a reason", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_the_installed_versions_have_the_code_that_each_change_was_written_for(patch: Patch) -> None:
    assert patch.state == "as written", patch.target
    assert patch.why and all(len(known) == 64 for known in patch.hashes)


def test_no_two_changes_have_one_name_or_one_target() -> None:
    assert len({patch.name for patch in PATCHES}) == len({patch.target for patch in PATCHES}) == len(PATCHES)


def test_a_change_names_a_page_of_docs_upstream_or_is_ours() -> None:
    pages = {page.name for page in (Path(__file__).parents[3] / "docs/upstream").glob("*.md")} - {"index.md"}
    assert {patch.upstream for patch in PATCHES} - {"ours"} == pages


def test_a_target_is_replaced_and_what_was_there_is_given_back(project: Project) -> None:
    name = project(engine=CODE)
    patch = patched(f"{name}.engine:Engine.step")
    theirs = patch.replace(staticmethod(lambda: f"ours, then {theirs()}"))
    assert importlib.import_module(f"{name}.engine").Engine.step() == "ours, then their step"


def test_the_attribute_of_one_object_is_replaced_alone(project: Project) -> None:
    name = project(engine=CODE)
    one, other = (importlib.import_module(f"{name}.engine").Engine() for _ in range(2))
    patched(f"{name}.engine:Engine.other").replace(lambda: 2, on=one)
    patched(f"{name}.engine:Engine.step").replace(lambda: 3, on=one, attribute="size")
    assert (one.other(), other.other(), one.size(), other.size) == (2, 1, 3, 3)


def test_a_changed_target_is_refused_by_name_and_stays_as_it_is(project: Project) -> None:
    before, after = project(engine=CODE), project(engine=CODE.replace("their step", "another step"))
    patch = patched(f"{after}.engine:Engine.step", as_in=f"{before}.engine:Engine.step")
    assert patch.state == "changed"
    with pytest.raises(BackendFailed, match=rf"a change: {after}\.engine:Engine\.step is changed \(expected sha256"):
        patch.replace(lambda: "ours")
    assert importlib.import_module(f"{after}.engine").Engine.step() == "another step"


@pytest.mark.parametrize("path", ["engine:Engine.turn", "engine:Engines.step", "engine:second", "steps:Engine.step"])
def test_an_absent_target_is_refused_by_name(project: Project, path: str) -> None:
    name = project(engine=CODE)
    patch = patched(f"{name}.{path}", as_in=f"{name}.engine:Engine.step")
    assert patch.state == "absent"
    with pytest.raises(BackendFailed, match=rf"{name}\.{path} is absent .*found nothing"):
        require_as_written([patch])


def test_a_project_that_is_not_installed_is_absent() -> None:
    assert Patch("a change", "no_such_project.engine:Engine", "0" * 64, "a reason").state == "absent"


def test_one_error_names_all_changed_targets_with_the_version_and_the_remedy() -> None:
    targets = ["transformers.modeling_layers:GradientCheckpointingLayer.__call__", "torch.ops:aten.no_such_operator"]
    with pytest.raises(BackendFailed) as refused:
        require_as_written([Patch(f"change {n}", target, "0" * 64, "why") for n, target in enumerate(targets)])
    text = str(refused.value)
    assert all(target in text for target in targets)
    assert "transformers 5." in text and "sha256 000000000000" in text and "Install the versions" in text


def test_a_change_may_be_written_for_several_versions(project: Project) -> None:
    before, after = project(engine=CODE), project(engine=CODE.replace("their step", "another step"))
    known = tuple(hash_of(str(source_of(f"{name}.engine:Engine.step"))) for name in (before, after))
    for name in (before, after):
        assert Patch("a change", f"{name}.engine:Engine.step", known, "a reason").state == "as written"


def test_decorators_are_part_of_a_target_and_its_neighbours_are_not(project: Project) -> None:
    whole = project(engine=CODE)
    target = f"{whole}.engine:Engine.step"
    assert patched(f"{project(engine=CODE.replace('return 1', 'return 2'))}.engine:Engine.step", target).state == (
        "as written"
    )
    assert patched(f"{project(engine=CODE.replace('@static', '@class'))}.engine:Engine.step", target).state == "changed"


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (("LIMIT = 3", "LIMIT = 4"), "changed"),
        (("limit=LIMIT", "limit=1 + LIMIT"), "changed"),
        (("size = LIMIT", "size = 3"), "changed"),
        (("return 1", "return 2"), "as written"),
    ],
)
def test_a_variable_is_its_value_and_whatever_reads_it(project: Project, change: tuple[str, str], state: str) -> None:
    before, after = project(engine=CODE), project(engine=CODE.replace(*change))
    assert patched(f"{after}.engine:LIMIT", as_in=f"{before}.engine:LIMIT").state == state


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (("'first'", "'last'"), "changed"),
        (("run(first)", "run(1, first)"), "changed"),
        (("idle", "rest"), "as written"),
    ],
)
def test_an_imported_name_is_its_definition_and_whatever_uses_it(
    project: Project, change: tuple[str, str], state: str
) -> None:
    steps = "def first():\n    return 'first'\n"
    loop = "from {0}.steps import first\n\n\ndef work():\n    run(first)\n\n\ndef idle():\n    pass\n"
    names = [project(steps=steps), project(steps=steps.replace(*change))]
    for name, text in zip(names, [loop, loop.replace(*change)], strict=True):
        root = Path(str(importlib.import_module(name).__file__)).parent
        (root / "loop.py").write_text(text.format(name))
    found = [str(source_of(f"{name}.loop:first")).replace(name, "it") for name in names]
    assert ("as written" if found[0] == found[1] else "changed") == state


def test_an_operators_schema_is_its_source() -> None:
    assert source_of("torch.ops:aten.relu") == str(torch.ops.aten.relu.default._schema)
    assert source_of("torch.ops:aten.no_such_operator") is None


def test_what_is_added_must_not_be_there_yet(project: Project) -> None:
    name = project(engine=CODE)
    new = Patch("a change", f"{name}.engine:Engine.count", (), "a reason", how="added")

    def count(_: object) -> int:
        return 5

    assert new.replace(count) is count
    assert importlib.import_module(f"{name}.engine").Engine().count() == 5
    with pytest.raises(BackendFailed, match=r"Engine\.step is changed \(expected nothing, found sha256"):
        Patch("a change", f"{name}.engine:Engine.step", (), "a reason", how="added").replace(lambda self: 5)


def test_only_what_applies_on_a_device_is_compared_there() -> None:
    cpu, cuda, both = (Patch("a change", "a:b", "", "why", device=device) for device in ("cpu", "cuda", None))  # type: ignore[arg-type]
    assert for_device([cpu, cuda, both], "cuda") == [cuda, both]


def test_a_vision_tower_of_a_class_that_no_change_was_written_for_is_refused() -> None:
    with pytest.raises(BackendFailed, match=r"Linear\.forward is not among the methods that are replaced"):
        tower_patch(nn.Linear(1, 1), "forward")
    with pytest.raises(BackendFailed, match="SimpleNamespace"):
        tower_patch(SimpleNamespace(), "get_image_features")
