"""Drives the trainer processes of one base model: 1..N of them, restarted together when one dies.

The only place where the async server meets sync torch. Every command goes to all ranks; rank 0's answer
counts. Input is checked here first, so that what reaches the ranks can fail on pixels at most.
"""

import asyncio
import logging
from pathlib import Path
from typing import TypeVar

from api_schemas.training import (
    AdamParams,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    OptimStepResponse,
    Trainable,
)
from backends.children import Child, Command
from backends.launcher import launch_trainer
from backends.protocol import BackendFailed, InvalidInput, ModelLost
from backends.rendering import Renderer
from backends.trainer import commands
from backends.trainer.checks import check_forward_backward
from backends.trainer.commands import TrainerConfig

log = logging.getLogger(__name__)
R = TypeVar("R")
INLINE_DATUMS = 16
"""Up to so many, checking takes well under a millisecond, and a thread would only add latency."""


class TrainerClient:
    """`protocol.Trainer` over child processes, one operation at a time."""

    def __init__(self, config: TrainerConfig, renderer: Renderer, *, num_ranks: int, max_context_length: int) -> None:
        self._config = config
        self._renderer = renderer
        self._num_ranks = num_ranks
        self._max_context_length = max_context_length
        self._ranks: list[Child] = []
        self._models: set[str] = set()
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Load the base on every rank. Raises BackendFailed."""
        self._ranks = await launch_trainer(
            self._config.name, num_ranks=self._num_ranks, device=self._config.device, gpus=self._config.gpus
        )
        try:
            await self._on_all(commands.Start(self._config))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End every rank."""
        ranks, self._ranks = self._ranks, []
        self._models.clear()
        await asyncio.gather(*(rank.stop() for rank in ranks))

    async def create_model(self, model_id: str, lora: Trainable) -> None:
        await self._add(commands.CreateModel(model_id, lora))

    async def resume(self, model_id: str, lora: Trainable, directory: Path) -> None:
        await self._add(commands.Resume(model_id, lora, directory))

    async def _add(self, command: commands.CreateModel | commands.Resume) -> None:
        async with self._turn:
            if not self._ranks:
                log.warning("starting the trainer of %s again", self._config.name)
                await self.start()
            await self._command(command)
            self._models.add(command.model_id)

    async def suspend(self, model_id: str, directory: Path) -> None:
        await self._run(model_id, commands.Suspend(model_id, directory))
        self._models.discard(model_id)

    async def delete_model(self, model_id: str) -> None:
        async with self._turn:
            if model_id in self._models:
                self._models.discard(model_id)
                await self._command(commands.DeleteModel(model_id))

    async def forward_backward(
        self, model_id: str, loss_input: ForwardBackwardInput, *, backward: bool
    ) -> ForwardBackwardOutput:
        self._require(model_id)
        try:
            if len(loss_input.data) <= INLINE_DATUMS:
                check_forward_backward(self._renderer, loss_input, self._max_context_length)
            else:
                await asyncio.to_thread(check_forward_backward, self._renderer, loss_input, self._max_context_length)
        except InvalidInput:
            if backward:
                await self._run(model_id, commands.MarkIncomplete(model_id))
            raise
        return await self._run(model_id, commands.ForwardBackward(model_id, loss_input, backward))

    async def mark_incomplete(self, model_id: str) -> None:
        await self._run(model_id, commands.MarkIncomplete(model_id))

    async def optim_step(self, model_id: str, adam: AdamParams) -> OptimStepResponse:
        return await self._run(model_id, commands.OptimStep(model_id, adam))

    async def save_state(self, model_id: str, directory: Path) -> None:
        await self._run(model_id, commands.SaveState(model_id, directory))

    async def load_state(self, model_id: str, directory: Path, *, with_optimizer: bool) -> None:
        await self._run(model_id, commands.LoadState(model_id, directory, with_optimizer))

    async def save_sampler_weights(self, model_id: str, directory: Path) -> None:
        await self._run(model_id, commands.SaveSamplerWeights(model_id, directory))

    def _require(self, model_id: str) -> None:
        if model_id not in self._models:
            raise ModelLost(f"{model_id} is no longer loaded: create it again, from a checkpoint to go on where it was")

    async def _run(self, model_id: str, command: Command[R]) -> R:
        async with self._turn:
            self._require(model_id)
            return await self._command(command)

    async def _command(self, command: Command[R]) -> R:
        """Run on all ranks, to the end even if the caller stops waiting: half a command on one rank is
        worse than a result nobody reads."""
        task = asyncio.ensure_future(self._on_all(command))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise
        except BackendFailed:
            if self._num_ranks > 1 or any(rank.died.is_set() for rank in self._ranks):
                log.error("the trainer of %s failed and ends; its models must be loaded again", self._config.name)
                await self.stop()
            raise

    async def _on_all(self, command: Command[R]) -> R:
        """Rank 0's answer. An error on any rank is everyone's; the ranks have agreed on InvalidInput."""
        calls = [asyncio.ensure_future(rank.call(command)) for rank in self._ranks]
        try:
            return (await asyncio.gather(*calls))[0]
        finally:
            for call in calls:
                call.cancel()
