"""The registry of changes inside other projects' code: vLLM, transformers, torch.

Each change names its target and the hash of the code that it was written for, and is made to that code alone: on other
code it would give wrong numbers without an error. Code is read from files here; nothing is imported for a check.
"""

import ast
import hashlib
import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeVar

from tinker_server.backends.protocol import BackendFailed

T = TypeVar("T")
OURS = "ours"
"""A change that belongs here, not into the other project."""
State = Literal["as written", "changed", "absent"]
How = Literal["replaced", "overridden", "added", "relied on"]
OPERATORS = "torch.ops"


@dataclass(frozen=True)
class Patch:
    """An internal of another project that is changed, or relied on, here."""

    name: str
    target: str
    """`package.module:Class.attribute`, or `torch.ops:namespace.operator`."""
    sha256: str | tuple[str, ...]
    """Hash of the target's source (`source_of`), one for each version that the change was written for."""
    why: str
    upstream: str = OURS
    """The page of docs/upstream that proposes the change to the other project."""
    how: How = "replaced"
    device: Literal["cpu", "cuda"] | None = None
    """The only device on which it applies."""

    @property
    def state(self) -> State:
        """Compare the installed source with the version that the change was written for."""
        source = source_of(self.target)
        if self.how == "added":
            return "as written" if source is None else "changed"
        if source is None:
            return "absent"
        return "as written" if hash_of(source) in self.hashes else "changed"

    @property
    def hashes(self) -> tuple[str, ...]:
        """Hashes of the known sources."""
        return (self.sha256,) if isinstance(self.sha256, str) else self.sha256

    def replace(self, new: T, on: object = None, attribute: str | None = None) -> T:
        """Set the target to `new` and return what was there before, or `new` where nothing was.

        `on` names the object whose attribute is set instead, by the target's last name unless `attribute` is
        another. Raises BackendFailed for a target that is not as written.
        """
        require_as_written([self])
        module, _, path = self.target.partition(":")
        *holders, last = path.split(".")
        attribute = attribute or last
        holder = on
        if on is None:
            holder = importlib.import_module(module)
            for name in holders:
                holder = getattr(holder, name)
        before: T = new if self.how == "added" else getattr(holder, attribute)
        setattr(holder, attribute, new)
        return before


def for_device(patches: Iterable[Patch], device: str) -> list[Patch]:
    """Return those that apply on a device."""
    return [patch for patch in patches if patch.device in (None, device)]


def require_as_written(patches: Iterable[Patch]) -> None:
    """Raise BackendFailed naming every target that is not the code that its change was written for."""
    wrong = [patch for patch in patches if patch.state != "as written"]
    if wrong:
        raise BackendFailed(
            "changes inside other projects do not fit the installed versions, and numbers could be wrong: "
            + "; ".join(map(_describe, wrong))
            + ". Install the versions that pyproject.toml names; or read what changed there, adapt the change and"
            " record the new hash (`tinker-server doctor` lists all of them)"
        )


def _describe(patch: Patch) -> str:
    source = source_of(patch.target)
    found = "nothing" if source is None else f"sha256 {hash_of(source)[:12]}"
    expected = " or ".join(f"sha256 {known[:12]}" for known in patch.hashes) or "nothing"
    return f"{patch.name}: {patch.target} is {patch.state} (expected {expected}, found {found}, {_versions(patch)})"


def _versions(patch: Patch) -> str:
    package = patch.target.partition(":")[0].partition(".")[0]
    return ", ".join(f"{name} {version(name)}" for name in sorted(set(packages_distributions().get(package, ()))))


def hash_of(source: str) -> str:
    """Return the hash that a patch records."""
    return hashlib.sha256(source.encode()).hexdigest()


@cache
def source_of(target: str) -> str | None:
    """Return the source of a class, function or method as it is in its file; None where it is not there.

    That of a module's variable is every statement and function of the module that mentions it; that of a name which the
    module imports has the imported definition too. That of an operator is its schema.
    """
    module, _, path = target.partition(":")
    if module == OPERATORS:
        return _schema(path)
    parsed = _parse_module(module)
    if parsed is None:
        return None
    text, tree = parsed
    found = _definition(tree, path.split("."))
    if found is not None:
        return _text(text, found)
    if "." in path:
        return None
    mentions = list(_mentions(tree.body, path))
    imported = [
        definition
        for node in mentions
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        if (definition := source_of(f"{node.module}:{path}")) is not None
    ]
    return "\n".join([*(_text(text, node) for node in mentions), *imported]) if mentions else None


def _schema(path: str) -> str | None:
    import torch  # nothing else here needs it

    namespace, _, name = path.partition(".")
    overloads = getattr(getattr(torch.ops, namespace), name, None)
    return None if overloads is None else str(overloads.default._schema)


@cache
def _parse_module(module: str) -> tuple[str, ast.Module] | None:
    package, _, rest = module.partition(".")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    base = Path(spec.origin).parent.joinpath(*rest.split("."))
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if file.exists():
            text = file.read_text()
            return text, ast.parse(text)
    return None


def _definition(scope: ast.AST, path: list[str]) -> ast.AST | None:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == path[0]:
            return _definition(node, path[1:]) if len(path) > 1 else node
    return None


def _mentions(body: Iterable[ast.AST], name: str) -> Iterator[ast.AST]:
    """Find the functions, and the statements outside of them, that mention a name."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.If | ast.Try):
            yield from _mentions(ast.iter_child_nodes(node), name)
        elif any(_names(part) == name for part in ast.walk(node)):
            yield node


def _names(node: ast.AST) -> str | None:
    match node:
        case ast.Name(id=name):
            return name
        case ast.alias(name=name, asname=other):
            return other or name
    return None


def _text(text: str, node: ast.AST) -> str:
    """Return whole lines, from the first decorator on."""
    assert isinstance(node, ast.stmt | ast.expr)
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
