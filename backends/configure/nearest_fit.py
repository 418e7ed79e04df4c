"""Plan the models' memory; if they do not fit, name the nearest settings and cards with which they would."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.asked_gpus import Contradiction
from tinker_server.backends.configure.gpus import CARDS_GIB, cards
from tinker_server.backends.configure.memory_plan import GIB, Machine, MemoryPlan
from tinker_server.backends.configure.model_size import ModelSize
from tinker_server.backends.configure.placement import CONTEXTS, LORA_RANKS, make_plan
from tinker_server.backends.model_spec import Device
from tinker_server.backends.protocol import BackendFailed

_CONTEXT_STEP, _LEAST_CONTEXT = 1024, 1024
_MOST_CARDS = 8
_NEAR = 0.02
"""Part by which the memory of a card may differ from that of a known card."""


@dataclass(frozen=True)
class Suggestion:
    """A change of settings, or other GPUs, with which the models fit."""

    flag: str
    """The command line's."""
    settings: dict[str, int | str]
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
        flags = " or ".join(suggestion.flag for suggestion in found) or "nothing nearer than a smaller model"
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
    """Return each single change that is enough, the smallest of its kind."""

    def fits(suggestion: Suggestion) -> bool:
        changed = config.model_copy(update=suggestion.settings)
        on = machine if suggestion.gpus is None else _of_cards(machine, suggestion.gpus)
        try:
            changed_sizes = resize(changed) if resize and "base_precision" in suggestion.settings else sizes
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
    is_apart = config.base_copies == 2 or (config.base_copies is None and config.base_precision == "fp8")
    can_share = device == "cuda" and is_apart
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
