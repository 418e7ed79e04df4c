"""Saved adapters in the engine's slots: many at a time, each compared with what the trainer scored with it."""

from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from backends.formats.load_check import LoadCheck
from backends.formats.stacked_adapters import AdapterFile, other_files
from backends.inputs.rendering import Renderer
from backends.protocol import ADAPTER_CONFIG_FILE, ADAPTER_FILE, LOAD_CHECK_FILE, BackendFailed, InvalidInput
from backends.sampler.engine.engine import MAX_ADAPTERS
from backends.sampler.engine.sequences import check_scores
from backends.sampler.engine.versions import Version, link_each

_MAX_NAMES = 5
"""Names in one error."""


class AdapterLoader:
    """`Loader` of LoRA adapters; the base model needs no slot."""

    max_versions = MAX_ADAPTERS
    base: Version | None = None
    pinned: Version | None = None

    def __init__(self, engine: AsyncLLM, renderer: Renderer, dtype: str) -> None:
        """The engine computes in `dtype`."""
        self._engine = engine
        self._renderer = renderer
        self._dtype = dtype
        self._loaded: set[Version] = set()

    def link(self, source: Path, directory: Path) -> LoadCheck | None:
        """Link an adapter's files; without a load check they are checked for values that are not finite."""
        directory.mkdir()
        if (source / LOAD_CHECK_FILE).exists():
            raise InvalidInput(
                "the sampler weights are a whole model, and this server samples from adapters; start it with the"
                " setting backend.full to sample from whole models"
            )
        link_each(source, directory, [ADAPTER_FILE, ADAPTER_CONFIG_FILE])
        try:
            with safe_open(directory / ADAPTER_FILE, framework="pt") as file:
                link_each(source, directory, other_files(file.metadata()))
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

    async def load(self, version: Version) -> None:
        """Load an adapter into a slot, and check how the engine scores with it."""
        request = self.request(version)
        try:
            load = (request.lora_name, request.lora_int_id, request.lora_path)
            ignored, *_ = await self._engine.collective_rpc("load_adapter", args=load)
        except EngineDeadError:
            raise
        except Exception as error:  # whatever vLLM meets in the files; the engine lives
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise BackendFailed(f"the sampler cannot load these weights: {reason}") from error
        if ignored:
            others = f" and {len(ignored) - _MAX_NAMES} others" if len(ignored) > _MAX_NAMES else ""
            raise BackendFailed(
                "the sampler cannot load these weights: the engine has no place for"
                f" {', '.join(ignored[:_MAX_NAMES])}{others}"
            )
        if (load_check := version.load_check) is not None:
            await check_scores(self._engine, load_check, request, self._renderer, self._dtype)
        self._loaded.add(version)

    async def unload(self, version: Version) -> None:
        """Have the engine forget an adapter; a dead engine has forgotten them all."""
        self._loaded.discard(version)
        with suppress(EngineDeadError):
            await self._engine.remove_lora(version.number)


def _check_finite(file: AdapterFile) -> None:
    """Raise InvalidInput naming the first tensor with NaN or infinity in it."""
    for name in file.keys():  # noqa: SIM118 - the file is no mapping
        if not file.get_tensor(name).isfinite().all():
            raise InvalidInput(
                f"the sampler weights cannot be used: {name} holds values that are not finite; the training"
                " run has diverged, sample from a checkpoint before that"
            )
