"""The config of a saved adapter, as PEFT writes it: what is read of it, and what else may be set.

A field that changes what the adapter computes gives wrong numbers, without an error, where it is not read. So the
fields that do not are listed, and every other field is refused if it is set.
"""

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinker_server.api_schemas.adapter_names import NOT_FOR_PEFT
from tinker_server.backends.protocol import ADAPTER_CONFIG_FILE, InvalidInput

READ = frozenset({"r", "lora_alpha", "rank_pattern", "alpha_pattern"})
HARMLESS = frozenset(
    {
        # Where it is from. The base of an upload is compared by the server, which knows the base's other names.
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        # Which modules it has: the names of its tensors say it.
        "target_modules",
        "exclude_modules",
        # How it is trained and initialised; `init_lora_weights` names the initialisation.
        "inference_mode",
        "lora_dropout",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "runtime_config",
        # Without effect while another field, which is refused, is not set.
        "megatron_core",
        "qalora_group_size",
    }
)
"""Fields that may have any value."""
ONLY: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA", NOT_FOR_PEFT),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", "mica"),  # these leave the base as it was
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_rslora": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "lora_bias": (False,),
    "ensure_weight_tying": (False,),
    "modules_to_save": ([],),
    "target_parameters": ([],),
    "layers_to_transform": ([],),
    "layers_pattern": ([], ""),
    "layer_replication": ([],),
    "trainable_token_indices": (),
    "alora_invocation_tokens": (),
    "megatron_config": (),
    "arrow_config": (),
    "kasa_config": (),
    "monteclora_config": (),
    "use_bdlora": (),
    "velora_config": (),
}
"""Fields that may have only these values, or `None`: others ask for more than the plain product of A and B."""
_REMEDIES = {
    "init_lora_weights": "it changes the base; convert the adapter first (PeftModel.save_pretrained,"
    " path_initial_model_for_weight_conversion)",
    "layers_to_transform": "leave it out, since the tensors say which layers they are of",
    "layers_pattern": "leave it out, since the tensors say which layers they are of",
    "peft_type": "only LORA is",
}


_MOST_PATTERNS = 64
_PLAIN_PATTERN = re.compile(r"[\w.]{1,200}")
"""Another regular expression could take hours."""


@dataclass(frozen=True)
class SavedConfig:
    """What a config says about an adapter that is a plain product of A and B."""

    rank: int
    alpha: float
    ranks: Mapping[str, float] = field(default_factory=dict)
    """Ranks of some modules, by PEFT's patterns of their names."""
    alphas: Mapping[str, float] = field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, by its name in the base."""
        return int(_first_match(self.ranks, module, self.rank))

    def alpha_of(self, module: str) -> float:
        """Return the alpha of a module."""
        return _first_match(self.alphas, module, self.alpha)


def _first_match(patterns: Mapping[str, float], module: str, otherwise: float) -> float:
    """Return the value of the first pattern that ends the module's name at a dot, as PEFT finds it."""
    found = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
    return next(found, otherwise)


def read_config(directory: Path) -> SavedConfig:
    """Read the config in a directory. Raises InvalidInput that names the field."""
    try:
        config = json.loads((directory / ADAPTER_CONFIG_FILE).read_text())
    except (OSError, ValueError, RecursionError):
        raise InvalidInput(f"the checkpoint has no readable {ADAPTER_CONFIG_FILE}") from None
    if not isinstance(config, dict):
        raise InvalidInput(f"{ADAPTER_CONFIG_FILE} is no JSON object")
    for name, value in config.items():
        _require_known(name, value)
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    ranks, alphas = (_read_patterns(config, name) for name in ("rank_pattern", "alpha_pattern"))
    for name, value in {"r": rank, **{f"rank_pattern of {module}": own for module, own in ranks.items()}}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidInput(f"{ADAPTER_CONFIG_FILE}: {name} {reprlib.repr(value)} is not an integer from 1")
    for name, value in {"lora_alpha": alpha, **{f"alpha_pattern of {key}": own for key, own in alphas.items()}}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise InvalidInput(f"{ADAPTER_CONFIG_FILE}: {name} {reprlib.repr(value)} is not a number above 0")
    return SavedConfig(rank, float(alpha), ranks, alphas)


def _read_patterns(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the values of some modules. Raises InvalidInput."""
    found = config.get(name) or {}
    if not isinstance(found, dict) or len(found) > _MOST_PATTERNS:
        raise InvalidInput(f"{ADAPTER_CONFIG_FILE}: {name} is no object of at most {_MOST_PATTERNS} modules")
    for module in found:
        if not _PLAIN_PATTERN.fullmatch(module):
            raise InvalidInput(
                f"{ADAPTER_CONFIG_FILE}: {name} {reprlib.repr(module)} is not supported: only a name of letters,"
                " digits, _ and . is"
            )
    return found


def _require_known(field: str, value: object) -> None:
    if value is None or field in READ or field in HARMLESS:
        return
    allowed = ONLY.get(field)
    if allowed is None:
        if value is not False and value not in ("", [], {}):
            raise InvalidInput(
                f"{ADAPTER_CONFIG_FILE}: {reprlib.repr(field)} {reprlib.repr(value)} is not known here; leave it out if"
                " the adapter is the plain product of A and B"
            )
    elif value not in allowed:
        remedy = _REMEDIES.get(field, f"only {' or '.join(map(str, allowed)) or 'null'} is")
        raise InvalidInput(f"{ADAPTER_CONFIG_FILE}: {field} {reprlib.repr(value)} is not supported: {remedy}")
