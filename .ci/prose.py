#!/usr/bin/env python3
"""Count what makes the product's prose and names hard to read, and hold each count under its ceiling.

Ceilings may only fall: a count far below its ceiling fails too, and names the new ceiling. `--list MEASURE` prints the
places that are counted.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("api_schemas", "backends", "migrations", "tinker_server")
SLACK = 0.03
"""Part of a ceiling by which a count may lie below it."""
SHORT_LINES = 6
IRREGULAR = {
    *("begun", "bound", "built", "drawn", "found", "given", "held", "kept", "known", "left", "made"),
    *("met", "said", "seen", "sent", "shown", "taken", "told", "written"),
}
NOT_PARTICIPLES = ("embed", "feed", "need", "seed", "shed", "speed")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A parsed file of the product."""

    name: str
    text: str
    tree: ast.Module

    @classmethod
    def read(cls, path: Path) -> "Source":
        """Read and parse a file."""
        text = path.read_text()
        return cls(str(path.relative_to(ROOT)), text, ast.parse(text))

    def functions(self) -> Iterator[tuple[str, Function]]:
        """Yield each function and method, with its place and name."""
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                yield f"{self.name}:{node.lineno} {node.name}", node

    def prose(self) -> Iterator[tuple[str, str]]:
        """Yield each docstring, also of an attribute, and each comment, with its place."""
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield f"{self.name}:{node.lineno}", node.value.value
        for number, line in enumerate(self.text.splitlines(), 1):
            if (comment := re.search(r"(?:^|\s)# (?!noqa|type:|fmt:)(.*)", line)) is not None:
                yield f"{self.name}:{number}", comment[1]


Sources = Sequence[Source]


def find_pronouns(sources: Sources) -> list[str]:
    """Return the place of each `one` and `ones` in prose."""
    prose = (part for source in sources for part in source.prose())
    return [place for place, text in prose for _ in re.findall(r"\bones?\b", text, re.IGNORECASE)]


def find_ones(sources: Sources) -> list[str]:
    """Return the place of each binding of a variable or parameter named `one`."""

    def binds(node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id == "one" and isinstance(node.ctx, ast.Store)
        return isinstance(node, ast.arg) and node.arg == "one"

    nodes = ((source.name, node) for source in sources for node in ast.walk(source.tree) if binds(node))
    return [f"{name}:{getattr(node, 'lineno', 0)}" for name, node in nodes]


def find_participles(sources: Sources) -> list[str]:
    """Return each function named by a past participle, properties apart."""

    def is_named_so(function: Function) -> bool:
        word = function.name.strip("_").split("_")[0]
        is_participle = word in IRREGULAR or (word.endswith("ed") and word not in NOT_PARTICIPLES)
        return is_participle and not any("property" in ast.unparse(mark) for mark in function.decorator_list)

    return [place for source in sources for place, function in source.functions() if is_named_so(function)]


def find_used_once(sources: Sources) -> list[str]:
    """Return each private function with a short body whose name occurs at one place beside its definition."""
    words = Counter(word for source in sources for word in re.findall(r"\w+", source.text))

    def is_used_once(function: Function) -> bool:
        is_private = function.name.startswith("_") and not function.name.startswith("__")
        num_lines = (function.end_lineno or 0) - function.body[0].lineno + 1
        return is_private and words[function.name] == 2 and num_lines <= SHORT_LINES

    return [place for source in sources for place, function in source.functions() if is_used_once(function)]


@dataclass(frozen=True)
class Measure:
    """A count and its ceiling."""

    name: str
    find: Callable[[Sources], list[str]]
    ceiling: float
    per_1000_words: bool = False

    def advise(self, value: float) -> str:
        """Return what to do about the count; empty if it fits."""
        if value > self.ceiling:
            return f"at most {self.ceiling:g}"
        if value < self.ceiling * (1 - SLACK):
            return f"lower its ceiling of {self.ceiling:g} to {value:.4g}"
        return ""


MEASURES = (
    Measure("one or ones per 1,000 words of prose", find_pronouns, 4.7, per_1000_words=True),
    Measure("variables named one", find_ones, 50),
    Measure("functions named by a participle", find_participles, 57),
    Measure("functions of at most 6 lines that are used once", find_used_once, 182),
)


def main(arguments: Sequence[str]) -> int:
    """Print each count and what to do about it, or the places of a measure. Return 1 if a count does not fit."""
    paths = (path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py")))
    sources = [Source.read(path) for path in paths if not path.stem.endswith("_pb2")]
    if arguments:
        [measure] = [measure for measure in MEASURES if arguments[-1] in measure.name]
        print("\n".join(measure.find(sources)))
        return 0
    num_words = sum(len(text.split()) for source in sources for _, text in source.prose())
    status = 0
    for measure in MEASURES:
        value = len(measure.find(sources)) * (1000 / num_words if measure.per_1000_words else 1)
        advice = measure.advise(value)
        print(f"{value:7.4g} {measure.name}{advice and ': ' + advice}")
        status |= bool(advice)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
