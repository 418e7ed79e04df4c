"""Whether an adapter that names its base can be of the base that it is uploaded for.

Bases of the same architecture have the same shapes, so an adapter of another base loads and gives wrong numbers. A name
of the hub says which base it is; a path on somebody's machine need not.
"""

import json
import re
import reprlib
from collections.abc import Iterable
from pathlib import Path

from tinker_server.backends.protocol import ADAPTER_CONFIG_FILE
from tinker_server.errors import BadRequest

_FIELD = "base_model_name_or_path"
_OF_HUB = re.compile(r"(?P<owner>\w[\w.-]*)/(?P<name>\w[\w.-]*)")
_WORD = r"\w[\w.]*(?:-[\w.]+)*"
"""A part of a name of the hub, in which no two hyphens follow each other: so a text is matched in a single way, and a
hostile text takes no longer than another."""
_IN_CACHE = re.compile(rf".*/models--(?P<owner>{_WORD})--(?P<name>{_WORD})(/.*)?")


def require_same_base(directory: Path, names: Iterable[str]) -> None:
    """Compare the base that the config in a directory names with the base of these names, directories and hub ids.

    Names are the same if their last parts are: copies of a model have other owners. Raises BadRequest.
    """
    try:
        config = json.loads((directory / ADAPTER_CONFIG_FILE).read_text())
    except (ValueError, RecursionError):
        raise BadRequest(f"{ADAPTER_CONFIG_FILE} is no JSON") from None
    named = config.get(_FIELD) if isinstance(config, dict) else None
    if not named:
        return
    if not isinstance(named, str):
        raise BadRequest(f"{ADAPTER_CONFIG_FILE}: {_FIELD} {reprlib.repr(named)} is no text")
    own = list(names)
    claimed = _model(named)
    if claimed is None or not any(map(_model, own)) or claimed in map(_last, own):
        return
    raise BadRequest(
        f"{ADAPTER_CONFIG_FILE}: {_FIELD} {named[:200]!r} is another model than {own[0]!r}, for which the adapter was"
        f" uploaded: if their weights are the same, write {own[0]!r} there, or leave it out"
    )


def _model(text: str) -> str | None:
    """Return the model that a name of the hub stands for, also in a path of the hub's cache; None for other texts."""
    found = _OF_HUB.fullmatch(text) or _IN_CACHE.fullmatch(text)
    return None if found is None else found["name"].lower()


def _last(text: str) -> str:
    return _model(text) or text.rstrip("/").rpartition("/")[2].lower()
