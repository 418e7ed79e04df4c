"""What is sampled from beside the base model: adapters in the engine's slots, or whole models one at a time."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from vllm.lora.request import LoRARequest


class EngineWeights(Protocol):
    """Saved weights by the directory they were saved in; None: the base model."""

    def slot(self, weights: Path | None) -> Path | None:
        """What takes turns at the engine; None needs no slot."""

    def hold(self, weights: Path | None) -> AbstractAsyncContextManager[Any]:
        """Inside, what it gives can be loaded, even where the directory is deleted meanwhile.

        Raises InvalidInput where the directory is gone or cannot be sampled from, BackendFailed where its files
        cannot be read.
        """

    def model_id(self, held: Any) -> str:
        """The model whose weights they are; empty where nothing says so."""

    async def load(self, held: Any) -> LoRARequest | None:
        """Have it ready for a row that has its slot, and the engine's name for it where that needs one. Raises
        BackendFailed where the engine cannot load it, or does not score with it as the trainer did."""
