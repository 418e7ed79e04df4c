"""Plan the models' memory; if they do not fit, name the nearest settings and cards with which they would."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.asked_gpus import Contradiction
from tinker_server.backends.configure.gpus import CARDS_GIB, cards
from tinker_server.backends.configure.memory_plan import GIB, Machine, MemoryPlan
from tinker_server.backends.configure.model_size import ModelSize
from tinker_server.backends.configure.placement import CONTEXTS, LORA_RANKS, make_plan, whole_context_bytes
from tinker_server.backends.model_spec import Device
from tinker_server.backends.protocol import BackendFailed

_CONTEXT_STEP, _LEAST_CONTEXT = 1024, 1024
_MOST_CARDS = 8
_NEAR = 0.02
"""Part by which the memory of a card may differ from that of a known card."""
_COUNTS = {
    *("max_context_length", "max_lora_rank", "models_at_once", "context_parallel"),
    *("kv_cache_bytes", "gpu_memory_bytes"),
}
"""Settings that models' sizes do not depend on."""
_NOT_LEFT_OUT = {"models", "device", "scratch_dir", "cluster_token_file"}
"""Settings without which it would be another question, or that no plan depends on."""


@dataclass(frozen=True)
class Suggestion:
    """A change of settings, or other GPUs, with which the models fit."""

    flag: str
    """The command line's, or the names of settings to leave out."""
    settings: dict[str, Any]
    gpus: str | None = None


Resize = Callable[[BackendConfig], Sequence[ModelSize]]
"""Returns the models' sizes with other settings. Raises BackendFailed where these are not supported."""
_PRECISIONS = [Suggestion(f"--base-precision {name}", {"base_precision": name}) for name in ("mxfp4", "fp8")]
"""What the files have, then what may be made of them."""


def plan_or_suggest(
    sizes: Sequence[ModelSize], config: BackendConfig, machine: Machine, device: Device, resize: Resize | None = None
) -> MemoryPlan:
    """Return the plan. Raises BackendFailed with every figure and the nearest that fits, each as the flag to give;
    Contradiction as it is, which no other size mends. `resize`: without it, no other precision is suggested."""
    try:
        return make_plan(sizes, config, machine, device)
    except Contradiction:
        raise
    except BackendFailed as error:
        found = suggestions(sizes, config, machine, device, resize)
        less = "a smaller model" if len(sizes) == 1 else "fewer or smaller models"
        flags = (
            " or ".join(suggestion.flag for suggestion in found) or f"nothing nearer than {less}, or several changes"
        )
        raise BackendFailed(f"{error}; nearest that fits: {flags}") from None


def idle_gpus(plan: MemoryPlan, config: BackendConfig) -> str | None:
    """Return a sentence about idle GPUs; None if none is idle or the settings name GPUs."""
    idle = [str(gpu) for gpu in range(len(plan.totals)) if not plan.of(gpu)]
    if plan.device == "cpu" or not idle or config.names_gpus:
        return None
    return f"GPU{'s' if len(idle) > 1 else ''} {', '.join(idle)} will be idle"


def suggestions(
    sizes: Sequence[ModelSize], config: BackendConfig, machine: Machine, device: Device, resize: Resize | None = None
) -> list[Suggestion]:
    """Return each single change that is enough, the smallest of its kind; and the settings to leave out where nothing
    else mends them."""

    def fits(suggestion: Suggestion) -> bool:
        changed = config.model_copy(update=suggestion.settings)
        on = machine if suggestion.gpus is None else _of_cards(machine, suggestion.gpus)
        try:
            changed_sizes = sizes if resize is None or suggestion.settings.keys() <= _COUNTS else resize(changed)
            make_plan(changed_sizes, changed, on, device)
        except BackendFailed:
            return False
        return True

    found: list[Suggestion] = [copy for copy in _copies(config, device) if fits(copy)]
    if resize is not None and device == "cuda" and config.base_precision is None:
        found += islice(filter(fits, _PRECISIONS), 1)
    found += islice(filter(fits, _slices(sizes, config, machine)), 1)
    for less_and_less in (_contexts(sizes, config, device), _ranks(config), _models(config), _caches(config, machine)):
        nearest = bisect_left(less_and_less, True, key=fits)
        found += less_and_less[nearest : nearest + 1]
    found += islice(filter(fits, _larger_caches(sizes, config, device)), 1)
    found += _removals(config, found, fits)
    if device == "cuda":
        larger = _larger_cards(machine)
        if config.gpu_memory_bytes is not None:
            sizes_gib = range(config.gpu_memory_bytes // GIB + 1, min(machine.gpu_bytes) // GIB + 1)
            larger = (Suggestion(f"--gpu-memory {gib}", {"gpu_memory_bytes": gib * GIB}) for gib in sizes_gib)
        for tries in (_more_cards(machine), larger):
            found += list(islice(filter(fits, tries), 1))
    return found


def _copies(config: BackendConfig, device: Device) -> list[Suggestion]:
    """Suggest a shared copy of the base, which takes nothing from anybody, or a divided one in fp8. On the CPU the plan
    counts the same for both."""
    can_share = device == "cuda" and config.base_copies != 1
    return [Suggestion("--base-copies 1", {"base_copies": 1})] if can_share else []


def _slices(sizes: Sequence[ModelSize], config: BackendConfig, machine: Machine) -> Iterator[Suggestion]:
    """Suggest more ranks for the tokens of a microbatch, on the GPUs that are there."""
    for count in range(config.context_parallel + 1, len(machine.gpu_bytes) + 1):
        if all(count in size.context_parallels for size in sizes):
            yield Suggestion(f"--context-parallel {count}", {"context_parallel": count})


def _contexts(sizes: Sequence[ModelSize], config: BackendConfig, device: Device) -> list[Suggestion]:
    most = config.max_context_length or CONTEXTS[device][-1]
    longest = min(most, max(size.longest_context for size in sizes))
    contexts = range((longest - 1) // _CONTEXT_STEP * _CONTEXT_STEP, _LEAST_CONTEXT - 1, -_CONTEXT_STEP)
    return [Suggestion(f"--max-context {context}", {"max_context_length": context}) for context in contexts]


def _ranks(config: BackendConfig) -> list[Suggestion]:
    smaller = [rank for rank in LORA_RANKS if config.max_lora_rank and rank < config.max_lora_rank]
    return [Suggestion(f"--max-lora-rank {rank}", {"max_lora_rank": rank}) for rank in smaller]


def _models(config: BackendConfig) -> list[Suggestion]:
    counts = range((config.models_at_once or 1) - 1, 0, -1)
    return [Suggestion(f"--models-at-once {count}", {"models_at_once": count}) for count in counts]


def _caches(config: BackendConfig, machine: Machine) -> list[Suggestion]:
    """Suggest smaller caches, in whole GiB, none larger than a memory."""
    most = min(config.kv_cache_bytes or 0, max(machine.main_bytes, *machine.gpu_bytes, 0))
    caches = [size_gib for size_gib in range(most // GIB, 0, -1) if size_gib * GIB != config.kv_cache_bytes]
    return [Suggestion(f"--kv-cache {size_gib}", {"kv_cache_bytes": size_gib * GIB}) for size_gib in caches]


def _larger_caches(sizes: Sequence[ModelSize], config: BackendConfig, device: Device) -> Iterator[Suggestion]:
    """Suggest caches that just hold a context, with engines of few ranks and of many, in thousandths of a GiB."""
    context = config.max_context_length or CONTEXTS[device][-1]
    numbers = {config.tensor_parallel or 1}.union(*(size.tensor_parallels for size in sizes))
    least = {max(whole_context_bytes(size, context, ranks) for size in sizes) for ranks in numbers}
    for num_bytes in sorted(least):
        if config.kv_cache_bytes is not None and num_bytes > config.kv_cache_bytes:
            size_gib = math.ceil(num_bytes / GIB * 1000) / 1000
            yield Suggestion(f"--kv-cache {size_gib:g}", {"kv_cache_bytes": int(size_gib * GIB)})


def _removals(
    config: BackendConfig, found: Sequence[Suggestion], fits: Callable[[Suggestion], bool]
) -> list[Suggestion]:
    """Suggest to leave out each setting that no suggestion changes; if nothing is enough, the fewest together."""
    fields = BackendConfig.model_fields.items()
    defaults = {name: field.default for name, field in fields if getattr(config, name) != field.default}
    given = [name for name in defaults if name not in _NOT_LEFT_OUT]

    def without(names: Sequence[str]) -> Suggestion:
        settings = ", ".join(f"backend.{name}" for name in names)
        return Suggestion(f"{settings} left out", {name: defaults[name] for name in names})

    changed = {name for suggestion in found for name in suggestion.settings}
    singles = [single for name in given if name not in changed and fits(single := without([name]))]
    if found or singles or not fits(without(given)):
        return singles
    for name in list(given):
        fewer = [other for other in given if other != name]
        given = fewer if fits(without(fewer)) else given
    return [without(given)]


def _more_cards(machine: Machine) -> Iterator[Suggestion]:
    name = _name(machine)
    for count in range(len(machine.gpu_bytes) + 1, _MOST_CARDS + 1):
        if name is not None:
            yield Suggestion(f"{count} GPUs (--gpu {name}:{count})", {}, f"{name}:{count}")


def _larger_cards(machine: Machine) -> Iterator[Suggestion]:
    count = len(machine.gpu_bytes)
    for name, size_gib in sorted(CARDS_GIB.items(), key=lambda card: card[1]):
        if count and size_gib * GIB > 1.05 * min(machine.gpu_bytes):
            yield Suggestion(f"another card (--gpu {name}:{count})", {}, f"{name}:{count}")


def _name(machine: Machine) -> str | None:
    """Return the known card that the machine's GPUs are, by memory, then by their name."""
    if not machine.gpu_bytes:
        return None
    own = next(iter(machine.gpu_names), "").replace(" ", "")
    apart = {name: abs(size_gib * GIB / machine.gpu_bytes[0] - 1) for name, size_gib in CARDS_GIB.items()}
    near = [name for name, part in apart.items() if part < _NEAR]
    return min(near, key=lambda name: (name.partition("-")[0] not in own, apart[name]), default=None)


def _of_cards(machine: Machine, text: str) -> Machine:
    names, sizes = zip(*cards(text), strict=True)
    return replace(machine, gpu_bytes=sizes, gpu_names=names)
