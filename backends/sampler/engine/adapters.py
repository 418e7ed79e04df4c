"""Saved adapters in the engine's slots: many at a time, each compared with what the trainer scored with it."""

import asyncio
import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from tinker_server.api_schemas.divided_linears import from_header
from tinker_server.backends.families.lora_names import OUT_OF_LATENTS
from tinker_server.backends.formats.load_check import LoadCheck
from tinker_server.backends.formats.stacked_adapters import AdapterFile, other_files
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.names import join_names
from tinker_server.backends.protocol import ADAPTER_CONFIG_FILE, ADAPTER_FILE, WHOLE_MODEL, BackendFailed, InvalidInput
from tinker_server.backends.sampler.engine.sequences import check_scores
from tinker_server.backends.sampler.engine.vllm_patches.lora import OWN_EXPERTS

_WHOLE_MODEL_FILE = "canary.json"
"""In a directory of an older server, beside a whole model."""


class Version:
    """A version's files, and how many use it."""

    def __init__(self, weights: Path, linked: Path, number: int, linking: "asyncio.Future[LoadCheck | None]") -> None:
        """`linked` is the directory of the links, and `linking` ends when they are there."""
        self.weights, self.linked, self.number = weights, linked, number
        self.linking = linking
        self.filling: asyncio.Task[None] | None = None
        self.loading: asyncio.Task[None] | None = None
        self.users = 0

    @property
    def load_check(self) -> LoadCheck | None:
        """The trainer's scores with it, if its files have them."""
        return self.linking.result()


class AdapterLoader:
    """Loads adapters into the engine's slots; the base model needs none."""

    def __init__(self, engine: AsyncLLM, renderer: Renderer, dtype: str) -> None:
        """The engine computes in `dtype`."""
        self._engine = engine
        self._renderer = renderer
        self._dtype = dtype
        self._loaded: set[Version] = set()

    def link(self, source: Path, directory: Path) -> LoadCheck | None:
        """Link an adapter's files; without a load check they are checked for values that are not finite."""
        directory.mkdir()
        if (source / _WHOLE_MODEL_FILE).exists():
            raise InvalidInput(f"the sampler weights {WHOLE_MODEL}")
        link_each(source, directory, [ADAPTER_FILE, ADAPTER_CONFIG_FILE])
        try:
            with safe_open(directory / ADAPTER_FILE, framework="pt") as file:
                link_each(source, directory, other_files(file.metadata()))
                if from_header(file.metadata()):
                    _take_out_patterns(directory / ADAPTER_CONFIG_FILE)
                load_check = LoadCheck.from_metadata(file.metadata())
                if load_check is None:  # else the trainer has checked it
                    _check_finite(file)
                return load_check
        except SafetensorError as error:
            raise BackendFailed(f"the sampler cannot load these weights: {error}") from None

    def request(self, version: Version) -> LoRARequest:
        """Return the engine's name for an adapter."""
        return LoRARequest(f"adapter-{version.number}", version.number, str(version.linked))

    def has(self, version: Version) -> bool:
        """Return whether the engine has loaded an adapter."""
        return version in self._loaded

    async def fill(self, version: Version) -> None:
        """Read an adapter into a slot."""
        request = self.request(version)
        try:
            load = (request.lora_name, request.lora_int_id, request.lora_path)
            ignored, *_ = await self._engine.collective_rpc("load_adapter", args=load)
        except EngineDeadError:
            raise
        except Exception as error:  # whatever vLLM meets in the files; the engine lives
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            if OWN_EXPERTS in reason:
                refusal = reason[reason.index(OWN_EXPERTS) :]
                raise InvalidInput(f"the sampler cannot load these weights: {refusal}") from None
            raise BackendFailed(f"the sampler cannot load these weights: {reason}") from error
        if any(name.endswith(OUT_OF_LATENTS) for name in ignored):
            raise InvalidInput(
                "the sampler cannot load these weights: they have adapters of linears out of latents (LoRA layout own),"
                " and the engine keeps latents (setting backend.lora_layout service; own takes both)"
            )
        if ignored:
            raise BackendFailed(
                f"the sampler cannot load these weights: the engine has no place for {join_names(ignored)}"
            )

    async def check(self, version: Version) -> None:
        """Check how the engine scores with an adapter; it is loaded then."""
        if (load_check := version.load_check) is not None:
            await check_scores(self._engine, load_check, self.request(version), self._renderer, self._dtype)
        self._loaded.add(version)

    async def unload(self, version: Version) -> None:
        """Have the engine forget an adapter; a dead engine has forgotten them all."""
        self._loaded.discard(version)
        with suppress(EngineDeadError):
            await self._engine.remove_lora(version.number)


def link_each(source: Path, directory: Path, names: Iterable[str]) -> None:
    """Link files, or copy them where the file systems differ. Raises InvalidInput where one is gone."""
    for name in names:
        try:
            os.link(source / name, directory / name)
        except FileNotFoundError:
            raise InvalidInput("the sampler weights no longer exist") from None
        except OSError:
            shutil.copyfile(source / name, directory / name)


def _take_out_patterns(config_file: Path) -> None:
    """Rewrite a linked config without the ranks of divided linears, whose parts are read apart: the engine would refuse
    some as higher than its own."""
    config = json.loads(config_file.read_text()) | {"rank_pattern": {}, "alpha_pattern": {}}
    config_file.unlink()
    config_file.write_text(json.dumps(config))


def _check_finite(file: AdapterFile) -> None:
    """Raise InvalidInput naming the first tensor with NaN or infinity in it."""
    for name in file.keys():  # noqa: SIM118 - the file is no mapping
        if not file.get_tensor(name).isfinite().all():
            raise InvalidInput(
                f"the sampler weights cannot be used: {name} holds values that are not finite; the training"
                " run has diverged, sample from a checkpoint before that"
            )
