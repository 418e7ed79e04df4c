"""Names of experts' matrices in files that have each alone, and of the stacks that transformers makes of them."""

import re

_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<matrix>gate|up|down)_proj\.weight")
STACKS = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


def expert_matrix(name: str) -> tuple[str, int, str] | None:
    """Return the module of experts, the expert's number and gate, up or down; None for another tensor."""
    found = _EXPERT.fullmatch(name)
    return None if found is None else (found["experts"], int(found["number"]), found["matrix"])


def stack_name(name: str) -> str:
    """Return the name of the stack that has an expert's matrix; any other name as it is."""
    found = expert_matrix(name)
    return name if found is None else f"{found[0]}.{STACKS[found[2]]}"


def expert_matrices(module: str, sizes: tuple[int, int, int]) -> dict[str, tuple[int, int]]:
    """Return the names and shapes of the matrices of a module of experts. `sizes`: experts, hidden width, inner
    width."""
    count, hidden, inner = sizes
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {f"{module}.{number}.{matrix}_proj.weight": shapes[matrix] for number in range(count) for matrix in shapes}
