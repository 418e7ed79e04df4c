"""Settings from the environment and from a TOML file. A name that no setting has is refused with the nearest right one.

`command_line` merges them: flags override the environment, which overrides the file.
"""

import difflib
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_settings import SettingsError

from tinker_server.errors import StartFailed
from tinker_server.settings import Settings

PREFIX = "TINKER_SERVER_"
_OF_A_SERVICE = f"{PREFIX}SERVICE_HOST"
_GONE = {
    "backend.gpu_memory_fraction": "memory is planned from max_context_length, max_lora_rank, models_at_once and"
    " kv_cache_bytes",
}
"""What is there in place of a former setting."""
_NEAR = 0.65
"""Likeness, of at most 1, from which a name is suggested."""
_SHOWN_CHARS = 100
"""Characters of a wrong value that its refusal repeats."""


def setting_names(model: type[BaseModel] = Settings, before: str = "") -> Iterator[str]:
    """Yield the name of each setting, such as `port` and `backend.device`."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from setting_names(field.annotation, f"{before}{name}.")
        else:
            yield before + name


def variable_of(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.upper().replace(".", "__")


def from_environment() -> dict[str, Any]:
    """Return what the environment sets, nested as Settings is. Raises StartFailed."""
    given = {name.upper(): value for name, value in os.environ.items() if name.upper().startswith(PREFIX)}
    if _OF_A_SERVICE in given:
        raise StartFailed(
            f"{_OF_A_SERVICE} and {PREFIX}PORT={given.get(f'{PREFIX}PORT', '')} come from Kubernetes, for a Service of"
            " the name tinker-server: set `enableServiceLinks: false` in the pod's specification"
        )
    known = [variable_of(name) for name in setting_names()]
    for name in given:
        if name not in known:
            raise StartFailed(f'the environment: unknown setting "{name}" ({_advice(name, known)})')
    ray = os.environ.get("RAY_ADDRESS")  # Ray's own name for it, which KubeRay sets
    by_ray = {"backend": {"cluster_ray_address": ray}} if ray else {}
    try:
        return merge(by_ray, Settings().model_dump(exclude_unset=True))
    except ValidationError as error:
        raise StartFailed(describe_error(error, lambda name: f"environment variable {variable_of(name)}")) from None
    except SettingsError as error:  # a list or a table that is not JSON
        raise StartFailed(f"the environment: {error}; write a list as JSON, such as '[\"a.example\"]'") from None


def from_file(path: Path) -> dict[str, Any]:
    """Return what a TOML file sets, nested as Settings is. Raises StartFailed."""
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise StartFailed(f"the settings file {path} cannot be read: {error}") from None
    known = list(setting_names())
    for name in _leaves(found, {name.rpartition(".")[0] for name in known} - {""}):
        if name not in known:
            raise StartFailed(f'{path}: unknown setting "{name}" ({_advice(name, known)})')
    return found


def merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, with the `upper` value where both have a value; tables are merged."""
    both = {**lower, **upper}
    for name in lower.keys() & upper.keys():
        if isinstance(lower[name], Mapping) and isinstance(upper[name], Mapping):
            both[name] = merge(lower[name], upper[name])
    return both


def describe_error(error: ValidationError, written: Callable[[str], str]) -> str:
    """Return a line about the first wrong setting. `written` returns what its author calls the setting."""
    problem = error.errors()[0]
    parts = [str(part) for part in problem["loc"]]
    name = next(found for num in (1, 2) if (found := ".".join(parts[:num])) in setting_names())
    inside = "".join(f"[{part}]" for part in parts[1 + name.count(".") :])
    return f"{written(name)}{inside}: {problem['msg']}; it is {repr(problem['input'])[:_SHOWN_CHARS]}"


def _leaves(table: Mapping[str, object], tables: set[str], before: str = "") -> Iterator[str]:
    """Yield the names that a file sets. `tables`: names of tables that have settings in them."""
    for name, value in table.items():
        if before + name in tables and isinstance(value, Mapping):
            yield from _leaves(value, tables, f"{before}{name}.")
        else:
            yield before + name


def _advice(name: str, known: list[str]) -> str:
    """Say what to write in place of an unknown name."""
    for gone, instead in _GONE.items():
        if name in (gone, variable_of(gone)):
            return instead

    def likeness(other: str) -> float:
        """Compare whole names, and last parts alone: `ranks` is near `backend.ranks`."""
        ours, theirs = (variable.removeprefix(PREFIX).replace("__", ".").lower() for variable in (name, other))
        parts = ours.rpartition(".")[2], theirs.rpartition(".")[2]
        return max(difflib.SequenceMatcher(None, *both).ratio() for both in ((ours, theirs), parts))

    near = max(known, key=likeness)
    return f'did you mean "{near}"?' if likeness(near) > _NEAR else "docs/settings.md has them all"
