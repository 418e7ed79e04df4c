"""`tinker-server doctor`: reports what this machine can serve, without loading a model."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from rich.table import Table
from sqlalchemy import URL

from tinker_server.backends.config import BackendConfig, Examination, ExaminedModel, ExaminedPatch
from tinker_server.backends.configure.torchvision_check import require_torchvision
from tinker_server.backends.protocol import NO_RUNS, OwnLayout
from tinker_server.commands.tables import show
from tinker_server.models.admission import MAX_IMAGE_BYTES
from tinker_server.store.own_layout import bases_of_own_layout
from tinker_server.store.reading import UNREADABLE, open_for_reading

GIB = 1 << 30


async def read_own_layout(database_url: str | URL) -> OwnLayout:
    """Return the models that a server on this database would need slots of the layout `own` for. Prints why it does
    not know if it cannot be read."""
    try:
        async with open_for_reading(database_url) as session:
            return NO_RUNS if session is None else await bases_of_own_layout(session)
    except UNREADABLE as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        print(f"planned as without runs and weights: the database cannot be read: {reason}", file=sys.stderr)
        return NO_RUNS


def diagnose(
    config: BackendConfig, gpus: str | None, own: OwnLayout = NO_RUNS, *, as_json: bool, shows_changes: bool
) -> None:
    """Run the command: print what `examine` finds. Raises BackendFailed if a model cannot be served."""
    require_torchvision()
    from tinker_server.backends.configure.create import examine as examine_backend  # slow to import: brings torch

    found = examine_backend(config, gpus, own)
    if as_json:
        print(json.dumps(asdict(found), default=str))
        if found.problem is not None:
            raise found.problem
    else:
        report(found, shows_changes=shows_changes)


def report(found: Examination, print_line: Callable[[str], None] = print, *, shows_changes: bool = False) -> None:
    """Print versions, memory, each model's needs and its place, and the verdict. Raises BackendFailed if a model cannot
    be served."""
    for line in versions(found):
        print_line(line)
    if found.gpu_limit_bytes is not None:
        print_line(f"{found.gpu_limit_bytes / GIB:.1f} GiB of each GPU may be used (--gpu-memory)")
    if found.models:
        show(models(found))
    for line in (*places(found), *joining(found), *image_prompts(found)):
        print_line(line)
    if found.parts:
        show(parts(found))
    if found.idle is not None:
        print_line(found.idle)
    if shows_changes:
        show(patches(found.patches))
    elif differing := [patch for patch in found.patches if patch.state != "as written"]:
        show(patches(differing))
    else:
        print_line(f"{len(found.patches)} changes inside vLLM, transformers and torch fit (--changes lists them)")
    if found.problem is not None:
        print_line(f"not all of it can be served{would_do(found)}")
        raise found.problem
    verdict = f"all of it can be served{would_do(found)}"
    print_line(verdict if found.models else "no --model was given: nothing else was checked")


def would_do(found: Examination) -> str:
    """Return the end of the verdict: the cards with which the models would fit; empty if no known card does."""
    fits = (", or ".join(f"{count} x {card}" for count, card in fit.cards) for fit in found.fitting)
    texts = [f"{fit} (--max-context {at.context})" for at, fit in zip(found.fitting, fits, strict=True)]
    return f"; these cards do, and larger ones: {'; '.join(texts)}" if texts else ""


def versions(found: Examination) -> Iterator[str]:
    """Yield lines with the installed versions, the device and its memory."""
    yield ", ".join(f"{name} {version}" for name, version in found.versions.items())
    yield f"computes on {found.device}; {found.main_bytes / GIB:.1f} GiB of main memory are free"
    for number, (name, size_bytes) in enumerate(found.gpus):
        yield f"GPU {number}: {name}, {size_bytes / GIB:.1f} GiB"


def models(found: Examination) -> Table:
    """Make a table with a row per model; names that share a source are loaded once."""
    table = Table("model", "kind", "images", "precision", "one copy", "KV cache", "context", "largest rank", "slots")
    for model in found.models:
        spec = model.spec
        table.add_row(
            spec.name,
            spec.arch,
            "yes" if spec.takes_images else "no",
            _precision(model),
            f"{spec.weight_bytes / GIB:.2f} GiB",
            f"{model.kv_cache_bytes / GIB:.2f} GiB",
            str(spec.max_context_length),
            str(spec.max_lora_rank),
            str(spec.adapter_slots),
        )
    return table


def _precision(model: ExaminedModel) -> str:
    spec = model.spec
    if spec.base_precision is None:
        return spec.dtype
    return f"{spec.dtype}, {spec.base_precision}{' made at load' if spec.makes_fp8 else ''}"


def places(found: Examination) -> Iterator[str]:
    """Yield a line for each model on GPUs: which GPUs its trainer and each engine get, and how much of them."""
    for spec in (model.spec for model in found.models):
        placement = spec.placement
        if not placement.gpus:
            continue
        ranks = ", ".join(map(str, placement.gpus))
        share = ""
        if len(placement.gpus) > 1:
            share = ", the whole base" if spec.mesh.shard == 1 else ", a shard of the base"
        if spec.mesh.context > 1:
            share += f", {spec.mesh.context} for the tokens of each microbatch"
        engines = "; ".join(f"GPU {', '.join(map(str, gpus))}" for gpus in placement.engines)
        sizes = [found.gpus[gpu][1] for engine in placement.engines for gpu in engine]
        yield (
            f"{spec.name}: trainer on GPU {ranks}, {placement.trainer_bytes / GIB:.1f} GiB"
            f"{' each' if len(placement.gpus) > 1 else ''}{share};"
            f" {len(placement.engines)} engine{'s' if len(placement.engines) > 1 else ''} on {engines},"
            f" {placement.sampler_fraction * min(sizes) / GIB:.1f} GiB{' of each' if len(sizes) > 1 else ''}"
        )
        if spec.offloads_inputs:
            yield f"{spec.name}: inputs of layers that recompute wait in main memory, since memory of the GPU is short"


def joining(found: Examination) -> Iterator[str]:
    """Yield lines on other machines, if these may join: what they need and get. Which there are is not known."""
    if found.cluster and "ray" not in found.versions:
        yield "a cluster needs the extra cluster: Ray is not installed here"
    if found.cluster and found.parts:
        yield (
            "this is the plan of the serving machine, whatever other machines join: Ray is not asked which there are,"
            " and no base is divided over machines"
        )
        if found.device == "cuda":
            yield (
                "a machine that joins gets engines of the same size on all of its GPUs, none of which may be smaller"
                " than here, and ranks of the trainers on the GPUs of the same numbers if its engines leave room there"
            )


def image_prompts(found: Examination) -> Iterator[str]:
    """Yield a line on the main memory that image prompts in flight may take, where a model takes images."""
    if any(model.spec.takes_images for model in found.models):
        yield (
            f"image prompts in flight take up to {MAX_IMAGE_BYTES / GIB:.1f} GiB of main memory for each owner, beside"
            " the features of their images"
        )


def parts(found: Examination) -> Table:
    """Make the table of the memory plan: a row for each part of a process, a column for each kind of GPU; GPUs with
    equal parts share one."""
    on_gpu: dict[int, dict[tuple[str, str, str], int]] = {}
    for part in found.parts:
        on_gpu.setdefault(part.gpu, {})[part.model, part.process, part.name] = part.size_bytes
    columns: dict[tuple[tuple[tuple[str, str, str], int], ...], list[int]] = {}
    for gpu, of_gpu in sorted(on_gpu.items()):
        columns.setdefault(tuple(of_gpu.items()), []).append(gpu)
    names = (
        ["main memory"] if found.device == "cpu" else [f"GPU {', '.join(map(str, gpus))}" for gpus in columns.values()]
    )
    table = Table("model", "process", "part", *names)
    for key in dict.fromkeys(key for column in columns for key, _ in column):
        sizes = [dict(column).get(key) for column in columns]
        table.add_row(*key, *("" if size is None else f"{size / GIB:.2f} GiB" for size in sizes))
    totals = [sum(size for _, size in column) for column in columns]
    table.add_row("", "", "together", *(f"{total / GIB:.2f} GiB" for total in totals))
    return table


def patches(found: Sequence[ExaminedPatch]) -> Table:
    """Return a row per patch. State `changed`: the installed code differs from the patched version."""
    table = Table("change", "inside", "state", "why")
    for patch in found:
        table.add_row(patch.name, patch.target, patch.state, patch.why)
    return table
