"""Choose every base model's GPUs, sizes and memory so that the plan fits, or refuse with every figure.

Trainer and engine map the same copy of a model on each GPU where both can have it whole, or if one copy is asked for
the same parts of it; else a model is in memory once in its trainer and once in each engine of its sampler, several
trainer ranks share its weights unless each has room for all, and so do the ranks of an engine. Parts of one copy are
also what is left where nothing else fits. On the CPU everything is in main memory. The operator's settings are kept.
Those that are absent are chosen in this order: the fewest GPUs on which a model of rank 32 fits with the default
context, trainer and engine on the same GPUs rather than apart; then ranks and engines on all GPUs, which the models
have evenly between them; then the largest rank; then the most slots and models at once that leave room for a usual KV
cache. On each GPU what is left over is divided evenly among its models: a trainer takes at most half of it, for
microbatches that recompute nothing, and the KV cache the rest.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch

from tinker_server.backends.config import BackendConfig, MemoryPart
from tinker_server.backends.configure.asked_gpus import (
    Contradiction,
    may_divide,
    require_gpus,
    require_ranks,
    set_ranks,
    usable_bytes,
)
from tinker_server.backends.configure.memory_plan import (
    GIB,
    Demand,
    Layout,
    Machine,
    MemoryPlan,
    gib,
    least_activation_bytes,
    plan_parts,
)
from tinker_server.backends.configure.model_size import ModelSize
from tinker_server.backends.configure.small_cards import engine_steps
from tinker_server.backends.model_spec import Device, Placement
from tinker_server.backends.processes.heap import free_main_bytes
from tinker_server.backends.protocol import BackendFailed

CONTEXTS = {"cpu": (8192,), "cuda": (32768, 28672, 24576, 20480, 16384, 12288, 8192)}
"""Contexts that are tried where none is set."""
_MORE_TOKENS = 256
"""Tokens of a KV cache beyond a context: a block that vLLM leaves empty, and a block for the token that it draws behind
a whole context. On a CPU a block has 128 tokens."""
MICROBATCH_TOKENS = {"cpu": 1024, "cuda": 16384}
LORA_RANKS = (128, 64, 32, 16, 8)
RECIPES_RANK = 32
"""The rank that must fit before a context is made shorter."""
SEVERAL_RANKS, MOST_MODELS = 256, 8
"""By default the rank is the largest above RECIPES_RANK of which SEVERAL_RANKS // rank models fit. MOST_MODELS: at most
so many models."""
MOST_SLOTS = 4
"""Slots of adapters, if there are not more models."""
USUAL_SEQUENCES, USUAL_TOKENS = 128, 2048
"""Sequences, and tokens of each, that the KV cache should hold before there are more models and slots. These can take
turns, and a trainer's further models take memory of the microbatches, but an engine never gets more cache."""


@dataclass(frozen=True)
class _Open:
    """Values of an attempt for the settings that are absent."""

    context: int
    lora_rank: int
    models_at_once: int = 1
    adapter_slots: int = 1
    offloads_inputs: bool = False


def this_machine() -> Machine:
    """Read this machine, without creating a CUDA context in this process."""
    gpus = [torch.cuda.get_device_properties(gpu) for gpu in range(torch.cuda.device_count())]
    names, sizes = [gpu.name for gpu in gpus], [gpu.total_memory for gpu in gpus]
    return Machine(free_main_bytes(), sizes, names)


def make_plan(sizes: Sequence[ModelSize], config: BackendConfig, machine: Machine, device: Device) -> MemoryPlan:
    """Return the plan of all models, with what is left over given out. Raises BackendFailed with every figure of the
    fullest GPU if they do not fit."""

    def search(copies: Literal[1, 2], *, divides: bool) -> _Search:
        return _Search(sizes, config.model_copy(update={"base_copies": copies}), machine, device, divides=divides)

    searches = [search(copies, divides=config.base_copies == 1) for copies in _base_copies(sizes, config, device)]
    bases = [*_bases(config, device)]
    # What costs time in every microbatch comes last.
    offloading = [replace(wish, offloads_inputs=True) for wish in bases] if device == "cuda" else []
    wishes = [*bases, *offloading]
    # The last wish asks for the least: if it does not fit, none does. The searches that fail are the longest.
    fit, tried = _first_fit(searches, wishes[-1])
    if fit is None and len(searches) > 1 and config.base_precision is None:
        # Gathering a base layer by layer takes time, and in fp8 no GPU has seen it.
        searches = [search(1, divides=True)]
        fit, more = _first_fit(searches, wishes[-1])
        tried += more
    for wish in wishes if fit else ():
        fit, _ = _first_fit(searches, wish)
        if fit is not None:
            found, plan = fit
            return found.give_out(found.enlarge(found.widen(plan), wish))
    if not tried:
        raise Contradiction(
            f"the trainer of one divided copy (setting backend.base_copies) has {config.tensor_parallel} ranks, as the"
            f" engine has (setting backend.tensor_parallel): groups of {config.context_parallel} (setting"
            " backend.context_parallel) do not divide them"
        )
    least = min(tried, key=lambda plan: plan.missing_bytes)
    if least.missing_bytes <= 0 and (reason := searches[0].short_cache(least)) is not None:
        raise BackendFailed(reason)
    gpu = max(range(len(least.totals)), key=lambda gpu: least.of(gpu) - least.totals[gpu])
    where = "memory" if device == "cpu" else f"memory on GPU {gpu}"
    for_whom = ", ".join(
        f"{name}: contexts of {demand.context}, {demand.models_at_once} x rank {demand.lora_rank}"
        for name, demand in least.demands.items()
    )
    there = "free" if device == "cpu" else "there"
    if config.gpu_memory_bytes is not None:
        there = "usable (--gpu-memory)"
    elif device == "cuda" and least.totals[gpu] < machine.gpu_bytes[gpu]:
        there = "usable, as on the smallest GPU of its models"
    raise BackendFailed(
        f"too little {where}: {gib(least.totals[gpu])} are {there},"
        f" {gib(least.of(gpu))} are needed: {least.describe(gpu)}; that is for {for_whom}"
    )


def whole_context_bytes(size: ModelSize, context: int, tensor_parallel: int) -> int:
    """Return the bytes of the smallest KV cache with which vLLM serves such a context, or the model's longest, in all
    ranks of an engine together."""
    return size.context_bytes(min(context, size.longest_context) + _MORE_TOKENS, tensor_parallel)


def placement(plan: MemoryPlan, model: str) -> Placement:
    """Return the GPUs of a model and its parts of their memory; on the CPU only the number of its engines."""
    layout = plan.layouts[model]
    if plan.device == "cpu":
        return Placement(engines=((),) * len(layout.engines))
    contexts = {
        (part.gpu, part.process): part.size_bytes
        for part in plan.parts
        if (part.model, part.name) == (model, "context")
    }

    def trainer(gpu: int) -> int:
        return plan.of(gpu, model, "trainer") - contexts[gpu, "trainer"]

    def engine(gpu: int) -> int:  # vLLM counts weights that it maps, too
        held = plan.of(gpu, model, "holder")
        held -= contexts.get((gpu, "holder"), 0)
        return plan.of(gpu, model, "engine") - contexts[gpu, "engine"] + held

    engine_gpus = {gpu for engine_gpus in layout.engines for gpu in engine_gpus}
    return Placement(
        layout.trainer,
        min(trainer(gpu) / plan.wholes[gpu] for gpu in layout.trainer),
        min(engine(gpu) / plan.wholes[gpu] for gpu in engine_gpus),
        min(trainer(gpu) for gpu in layout.trainer),
        layout.engines,
        min(plan.totals[gpu] / plan.wholes[gpu] for gpu in (*layout.trainer, *engine_gpus)),
    )


def _base_copies(sizes: Sequence[ModelSize], config: BackendConfig, device: Device) -> tuple[Literal[1, 2], ...]:
    """Return the copies of a base on a GPU to try, the best first."""
    if config.base_copies is not None:
        return (config.base_copies,)
    return (1, 2) if device == "cuda" and any(size.can_be_shared for size in sizes) else (2,)


def _bases(config: BackendConfig, device: Device) -> Iterator[_Open]:
    """Yield the minimum demands to try, the best first."""
    contexts = (config.max_context_length,) if config.max_context_length else CONTEXTS[device]
    ranks = (config.max_lora_rank,) if config.max_lora_rank else LORA_RANKS[LORA_RANKS.index(RECIPES_RANK) :]
    for rank in ranks:
        for context in contexts:
            yield _Open(context, rank, config.models_at_once or 1)


class _Search:
    """Lays models out on a machine, and counts them."""

    def __init__(
        self,
        sizes: Sequence[ModelSize],
        config: BackendConfig,
        machine: Machine,
        device: Device,
        *,
        divides: bool,
    ) -> None:
        self._sizes, self._config, self._device = sizes, config, device
        self._may_divide = divides and may_divide(config)
        usable = usable_bytes(config, () if device == "cpu" else machine.gpu_bytes)
        self._totals = (machine.main_bytes,) if device == "cpu" else usable
        self._largest_gpu = max(machine.gpu_bytes, default=0)
        gpus = range(len(self._totals))
        self._trainer_gpus = config.trainer_gpus or tuple(gpus)
        self._sampler_gpus = config.sampler_gpus
        if device == "cuda":
            require_gpus(config, len(gpus))
        require_ranks(config)
        for_engines = (self._sampler_gpus if device == "cuda" else None) or gpus
        self._steps = engine_steps(config, device, [self._totals[gpu] for gpu in for_engines])

    def laid_out(self, wish: _Open) -> Iterator[MemoryPlan]:
        """Yield plans with this demand, those that use fewer GPUs first, with the engines that are asked for, or one
        and those that fit beside it. Each split is tried with the base replicated and no recomputation, then sharded,
        then replicated with recomputation. A plan may not fit."""
        demands = {size.name: self._demand(size, wish) for size in self._sizes}
        for ranks, tensor_parallel, is_apart in self._numbers_of_ranks():
            kinds = [True, False, True]
            if self._is_whole(ranks, tensor_parallel) or self._divides(tensor_parallel):
                kinds = [not self._divides(tensor_parallel)]
            for at, replicates in enumerate(kinds):
                most = self._layouts(ranks, tensor_parallel, replicates=replicates, is_apart=is_apart)
                plan = self._with_engines(demands, most)
                if at == 0 and len(kinds) > 1 and not self._is_comfortable(plan):
                    continue
                yield plan

    def widen(self, plan: MemoryPlan) -> MemoryPlan:
        """Return the plan with as many ranks as there are GPUs for each model, where the settings leave that open; half
        of them if trainer and engines are apart. More ranks need no more of a GPU than fewer."""
        config = self._config
        layout = next(iter(plan.layouts.values()))
        # Each rank more of a divided copy would gather more of it.
        is_divided = self._divides(len(layout.engines[0]))
        if self._device == "cpu" or config.names_gpus or config.base_precision is not None or is_divided:
            return plan
        tensor_parallel, is_apart = len(layout.engines[0]), not {*layout.trainer} & {*layout.engines[0]}
        most, step = len(self._totals) // len(self._sizes) // (2 if is_apart else 1), config.context_parallel
        for ranks in range(most - most % step, len(layout.trainer), -step):
            layouts = self._layouts(ranks, tensor_parallel, replicates=layout.replicates, is_apart=is_apart)
            wider = self._with_engines(plan.demands, layouts)
            if wider.missing_bytes <= 0:
                return wider
        return plan

    def enlarge(self, plan: MemoryPlan, wish: _Open) -> MemoryPlan:
        """Return the plan with the largest rank that fits on the same GPUs; then with the most slots and models that
        leave room for a usual KV cache."""
        config = self._config
        ranks = () if config.max_lora_rank else tuple(rank for rank in LORA_RANKS if rank > wish.lora_rank)
        for rank in ranks:
            several = config.models_at_once or SEVERAL_RANKS // rank
            larger = self._recount(plan, replace(wish, lora_rank=rank, models_at_once=several))
            if larger.missing_bytes <= 0:
                plan, wish = larger, replace(wish, lora_rank=rank, models_at_once=several)
                break
        slots = () if config.adapter_slots else range(wish.models_at_once + 1, MOST_SLOTS + 1)
        plan, wish = self._grow(plan, wish, [replace(wish, adapter_slots=count) for count in slots])
        models = () if config.models_at_once else range(wish.models_at_once + 1, MOST_MODELS + 1)
        return self._grow(plan, wish, [replace(wish, models_at_once=count) for count in models])[0]

    def _grow(self, plan: MemoryPlan, wish: _Open, larger: Sequence[_Open]) -> tuple[MemoryPlan, _Open]:
        """Return the last plan, with its demand, before a larger demand leaves too little."""
        for more in larger:
            counted = self._recount(plan, more)
            if not self._leaves_cache(counted):
                break
            plan, wish = counted, more
        return plan, wish

    def _leaves_cache(self, plan: MemoryPlan) -> bool:
        """Return whether a plan fits, and each engine has room for a usual KV cache besides."""
        more = dict.fromkeys(range(len(plan.totals)), 0)
        for size in self._sizes if self._device == "cuda" else ():
            demand = plan.demands[size.name]
            for engine in plan.layouts[size.name].engines if demand.kv_cache_bytes is None else ():
                usual = size.context_bytes(min(USUAL_TOKENS, demand.context), len(engine))
                usual *= min(USUAL_SEQUENCES, demand.max_sequences)
                least = size.kv_cache_bytes(demand.context, len(engine), self._device)
                for gpu in engine:
                    more[gpu] += max(0, usual - least) // len(engine)
        return all(plan.of(gpu) + cache <= plan.totals[gpu] for gpu, cache in more.items())

    def short_cache(self, plan: MemoryPlan) -> str | None:
        """Return the reason why an engine's KV cache, of the size that is set, cannot hold a whole context, or None."""
        if (asked := self._config.kv_cache_bytes) is None:
            return None
        for size in self._sizes:
            context, ranks = plan.demands[size.name].context, len(plan.layouts[size.name].engines[0])
            if asked < (least := whole_context_bytes(size, context, ranks)):
                least_gib = math.ceil(least / GIB * 1000) / 1000
                return (
                    f"{size.name}: a KV cache of {asked / GIB:.4g} GiB (--kv-cache, setting backend.kv_cache_bytes) is"
                    f" less than what a context of {context} tokens takes: {least_gib:.3f} GiB ({least} bytes)"
                )
        return None

    def give_out(self, plan: MemoryPlan) -> MemoryPlan:
        """Return the plan with what is left over on each GPU as memory for microbatches and KV cache."""
        if self._device == "cpu":
            return plan
        more: list[MemoryPart] = []
        for gpu, total in enumerate(plan.totals):
            here = [size for size in self._sizes if plan.of(gpu, size.name)]
            for size in here:
                rest = (total - plan.of(gpu)) // len(here)
                trains, samples = (bool(plan.of(gpu, size.name, kind)) for kind in ("trainer", "engine"))
                fixed = not samples or self._config.kv_cache_bytes is not None
                for_trainer = rest if fixed else min(rest // 2, self._useful_bytes(size, plan.demands[size.name]))
                for_trainer = for_trainer if trains else 0
                if for_trainer:
                    more.append(MemoryPart(size.name, gpu, "trainer", "more for microbatches", for_trainer))
                if not fixed and rest > for_trainer:
                    more.append(MemoryPart(size.name, gpu, "engine", "more KV cache", rest - for_trainer))
        return replace(plan, parts=(*plan.parts, *more))

    def _demand(self, size: ModelSize, wish: _Open) -> Demand:
        config = self._config
        return Demand(
            context=min(size.longest_context, wish.context),
            lora_rank=wish.lora_rank,
            models_at_once=wish.models_at_once,
            adapter_slots=config.adapter_slots or max(wish.adapter_slots, wish.models_at_once),
            microbatch_tokens=config.max_tokens_per_microbatch or MICROBATCH_TOKENS[self._device],
            max_sequences=self._steps.sequences,
            kv_cache_bytes=config.kv_cache_bytes,
            context_parallel=config.context_parallel,
            engine_tokens=self._steps.tokens,
            offloads_inputs=wish.offloads_inputs,
        )

    def _useful_bytes(self, size: ModelSize, demand: Demand) -> int:
        """Return what a trainer can use beyond its least: for microbatches that recompute nothing."""
        wanted = size.activation_bytes(demand.microbatch_tokens, recomputes=False)
        return max(0, wanted - least_activation_bytes(size, demand))

    def _is_comfortable(self, plan: MemoryPlan) -> bool:
        """Return whether microbatches need no recomputation."""
        wanted = {gpu: 0 for gpu in range(len(plan.totals))}
        for size in self._sizes:
            for gpu in plan.layouts[size.name].trainer:
                wanted[gpu] += self._useful_bytes(size, plan.demands[size.name])
        return all(plan.of(gpu) + more <= plan.totals[gpu] for gpu, more in wanted.items())

    def _numbers_of_ranks(self) -> Iterator[tuple[int, int, bool]]:
        """Yield ranks of the trainer and of an engine, and whether the first engine is on other GPUs than the trainer,
        few GPUs first."""
        config = self._config
        if self._device == "cpu":
            parallel_ranks = config.tensor_parallel or 1
            fewest = parallel_ranks if self._divides(parallel_ranks) else config.context_parallel
            num_ranks = config.ranks or fewest
            if num_ranks % config.context_parallel == 0:
                yield num_ranks, parallel_ranks, False
            return
        fixed = set_ranks(config)
        step = config.context_parallel
        most = step if config.base_precision == "mxfp4" else len(self._trainer_gpus)
        ranks = (fixed,) if fixed else range(step, most + 1, step)
        num_sampling = len(self._sampler_gpus or self._totals) // (config.engines or 1)
        common = set.intersection(*(set(size.tensor_parallels) for size in self._sizes))
        parallel = [size for size in sorted(common) if size <= max(1, num_sampling)]
        parallel = [config.tensor_parallel] if config.tensor_parallel else parallel
        apart = (False,) if config.sampler_gpus or config.trainer_gpus else (False, True)
        tries = [(r, t, is_apart) for r in ranks for t in parallel for is_apart in apart]
        if config.base_copies == 1:  # whole, or divided alike
            alike = self._may_divide
            tries = [(r, t, is_apart) for r, t, is_apart in tries if t == 1 or (r == t and alike and not is_apart)]
        fitting = [split for split in tries if _num_used(*split) <= len(self._totals)]
        yield from sorted(fitting, key=lambda split: (_num_used(*split), split[2], -split[0], split[1]))

    def _is_whole(self, ranks: int, tensor_parallel: int) -> bool:
        """Return whether each of so many ranks has the whole base in any case: an only rank, and a rank that maps
        it."""
        return ranks == 1 or (self._config.base_copies == 1 and tensor_parallel == 1)

    def _divides(self, tensor_parallel: int) -> bool:
        """Return whether the ranks of a trainer map what so many ranks of an engine have of the base."""
        return self._config.base_copies == 1 and tensor_parallel > 1

    def _layouts(self, ranks: int, tensor_parallel: int, *, replicates: bool, is_apart: bool) -> dict[str, Layout]:
        """Lay out each model's trainer, and as many engines as it may have at most."""
        if self._device == "cpu":
            engines = ((0,) * tensor_parallel,) * (self._config.engines or 1)
            # On the CPU ranks divide the base, unless they map it: memory is one.
            is_whole = self._is_whole(ranks, tensor_parallel)
            return {size.name: Layout((0,) * ranks, engines, is_whole) for size in self._sizes}
        # A divided copy's trainer is where its engine is.
        own_gpus = (self._divides(tensor_parallel) and self._sampler_gpus) or self._trainer_gpus
        trainers = _spread(self._sizes, sorted(own_gpus, key=lambda gpu: -self._totals[gpu]), ranks)
        load = [
            sum(size.base_bytes for size in self._sizes if gpu in trainers[size.name])
            for gpu in range(len(self._totals))
        ]
        layouts = {}
        for size in self._sizes:
            own = trainers[size.name]
            if self._divides(tensor_parallel):
                layouts[size.name] = Layout(own, (own,), replicates)
                continue
            allowed = self._sampler_gpus or range(len(self._totals))
            order = sorted(allowed, key=lambda gpu: ((gpu in own) == is_apart, load[gpu], -self._totals[gpu], gpu))
            groups = range(0, len(order) - tensor_parallel + 1, tensor_parallel)
            engines = tuple(tuple(sorted(order[at : at + tensor_parallel])) for at in groups)
            for gpu in engines[0]:
                load[gpu] += size.base_bytes // tensor_parallel
            layouts[size.name] = Layout(own, engines, replicates)
        return layouts

    def _with_engines(self, demands: Mapping[str, Demand], most: Mapping[str, Layout]) -> MemoryPlan:
        """Keep the engines that are asked for, or one and all others that fit on the GPUs where they may be: those that
        are named; or those of the model's trainer, and unless its GPUs are named those without a trainer."""
        asked = self._config.engines or 1
        layouts = {name: replace(layout, engines=layout.engines[:asked]) for name, layout in most.items()}
        plan = self._count(demands, layouts)
        if self._config.engines is not None or self._device == "cpu" or plan.missing_bytes > 0:
            return plan
        free: set[int] = set()
        if not self._config.trainer_gpus:
            free = set(self._trainer_gpus).difference(*(layout.trainer for layout in most.values()))
        for name, fullest in most.items():
            for engine in fullest.engines[1:]:
                if not set(engine) <= set(self._sampler_gpus or {*fullest.trainer, *free}):
                    continue
                fuller = replace(layouts[name], engines=(*layouts[name].engines, engine))
                larger = self._count(demands, {**layouts, name: fuller})
                if larger.missing_bytes <= 0:
                    layouts[name], plan = fuller, larger
        return plan

    def _recount(self, plan: MemoryPlan, wish: _Open) -> MemoryPlan:
        return self._count({size.name: self._demand(size, wish) for size in self._sizes}, plan.layouts)

    def _count(self, demands: Mapping[str, Demand], layouts: Mapping[str, Layout]) -> MemoryPlan:
        parts = plan_parts(self._sizes, demands, layouts, self._device, self._config.base_copies or 2)
        totals = _usable(self._totals, layouts.values())
        wholes = totals if self._config.gpu_memory_bytes is None else (self._largest_gpu,) * len(totals)
        return MemoryPlan(self._device, totals, demands, dict(layouts), parts, wholes)


def _first_fit(searches: Sequence[_Search], wish: _Open) -> tuple[tuple[_Search, MemoryPlan] | None, list[MemoryPlan]]:
    """Return the first plan with this demand that fits, with its search, or None; and the plans before it."""
    tried: list[MemoryPlan] = []
    for search in searches:
        for plan in search.laid_out(wish):
            if plan.missing_bytes <= 0 and search.short_cache(plan) is None:
                return (search, plan), tried
            tried.append(plan)
    return None, tried


def _usable(totals: Sequence[int], layouts: Collection[Layout]) -> tuple[int, ...]:
    """Return the bytes of each GPU that plans can use: a model's ranks, and its engines, get the same fraction of each
    of their GPUs, so that larger GPUs count as the smallest of them."""
    usable = list(totals)
    for _ in layouts:  # models that share a GPU pass a smaller share on to each other
        for layout in layouts:
            gpus = {*layout.trainer, *chain.from_iterable(layout.engines)}
            smallest = min(usable[gpu] for gpu in gpus)
            for gpu in gpus:
                usable[gpu] = smallest
    return tuple(usable)


def _num_used(ranks: int, tensor_parallel: int, is_apart: bool) -> int:
    """Return the GPUs of a trainer and an engine."""
    return ranks + tensor_parallel if is_apart else max(ranks, tensor_parallel)


def _spread(sizes: Sequence[ModelSize], gpus: Sequence[int], num_ranks: int) -> dict[str, tuple[int, ...]]:
    """Choose each model's GPUs, the largest model first: those with the fewest bytes of weights on them, of equal ones
    the first."""
    taken = dict.fromkeys(gpus, 0)
    chosen = {}
    for size in sorted(sizes, key=lambda size: -size.base_bytes):
        own = sorted(sorted(gpus, key=taken.__getitem__)[:num_ranks])
        for gpu in own:
            taken[gpu] += size.base_bytes
        chosen[size.name] = tuple(own)
    return chosen
