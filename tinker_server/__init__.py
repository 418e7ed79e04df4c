"""The HTTP server that tinker SDK clients talk to."""

from importlib.util import find_spec
from pathlib import Path


def _require_neighbours() -> None:
    """Raise ImportError if a package of the server is another project's of the same name.

    They are top-level packages, so one that is earlier on the path would be taken in their place.
    """
    root = Path(__file__).resolve().parents[1]
    for name in ("api_schemas", "backends", "migrations"):
        spec = find_spec(name)
        found = None if spec is None or spec.origin is None else Path(spec.origin).resolve().parent
        if found != root / name:
            raise ImportError(
                f"the package {name} is taken from {found}, and the server needs {root / name}: install it into an"
                " environment of its own, and check PYTHONPATH and the working directory"
            )


_require_neighbours()
