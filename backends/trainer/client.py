"""Drives the trainer processes of one base model: 1..N of them, restarted together when one dies or hangs.

The only place where the async server meets sync torch. Every command goes to all ranks; rank 0's answer
counts. The ranks agree on what they refuse (`parallel.agreed`): after anything else they are ended, and
their models with them.
"""

import asyncio
import logging
from pathlib import Path
from typing import TypeVar

from api_schemas.training import AdamParams, ForwardBackwardOutput, OptimStepResponse, Trainable
from backends.children import Child, ChildBroke, ChildDied, Command
from backends.launcher import launch_trainer
from backends.protocol import EncodedBatch, ModelLost
from backends.trainer import commands
from backends.trainer.commands import TrainerConfig

log = logging.getLogger(__name__)
R = TypeVar("R")
PATIENCE_S = 60
"""How much longer than a piece of work may take (`time_limits`) a rank may be silent."""
_START_PATIENCE_S = 600
"""A new process imports torch and transformers first: more than a minute on a busy machine."""
_LAST_GRACE_S = 1
"""For ranks that have failed, to end by themselves."""


class TrainerClient:
    """`protocol.Trainer` over child processes, one operation at a time."""

    def __init__(self, config: TrainerConfig, *, num_ranks: int, patience_s: float = PATIENCE_S) -> None:
        self._config = config
        self._num_ranks = num_ranks
        self._patience_s = patience_s
        self._ranks: list[Child] = []
        self._models: set[str] = set()
        self._one_command = asyncio.Lock()
        """Ranks run commands in the same order, time limits count from a command's own beginning, and none meets
        ranks that are being started. Whose command is next is decided in the server."""

    async def start(self) -> None:
        """Load the base on every rank. Raises BackendFailed."""
        self._ranks = await launch_trainer(
            self._config.name, num_ranks=self._num_ranks, device=self._config.device, gpus=self._config.gpus
        )
        try:
            await self._on_all(commands.Start(self._config), _START_PATIENCE_S)
        except BaseException:
            await self._end(_LAST_GRACE_S)
            raise

    async def stop(self) -> None:
        """End every rank."""
        await self._end(10)

    async def create_model(self, model_id: str, lora: Trainable) -> None:
        """Starts the ranks where they have died."""
        await self._add(commands.CreateModel(model_id, lora))

    async def resume(self, model_id: str, lora: Trainable, directory: Path) -> None:
        """Starts the ranks where they have died."""
        await self._add(commands.Resume(model_id, lora, directory))

    async def suspend(self, model_id: str, directory: Path) -> None:
        """As the protocol says."""
        await self._run(model_id, commands.Suspend(model_id, directory))
        self._models.discard(model_id)

    async def delete_model(self, model_id: str) -> None:
        """As the protocol says."""
        async with self._one_command:
            if model_id in self._models and await self._alive():
                await self._command(commands.DeleteModel(model_id))
            self._models.discard(model_id)

    async def forward_backward(self, model_id: str, batch: EncodedBatch, *, backward: bool) -> ForwardBackwardOutput:
        """As the protocol says; the batch is decoded and checked on the ranks."""
        return await self._run(model_id, commands.ForwardBackward(model_id, batch, backward))

    async def mark_incomplete(self, model_id: str) -> None:
        """As the protocol says."""
        await self._run(model_id, commands.MarkIncomplete(model_id))

    async def optim_step(self, model_id: str, adam: AdamParams) -> OptimStepResponse:
        """As the protocol says."""
        return await self._run(model_id, commands.OptimStep(model_id, adam))

    async def save_state(self, model_id: str, directory: Path) -> None:
        """As the protocol says."""
        await self._run(model_id, commands.SaveState(model_id, directory))

    async def load_state(self, model_id: str, directory: Path, *, with_optimizer: bool) -> None:
        """As the protocol says."""
        await self._run(model_id, commands.LoadState(model_id, directory, with_optimizer))

    async def save_sampler_weights(self, model_id: str, directory: Path, *, for_elsewhere: bool) -> None:
        """As the protocol says."""
        await self._run(model_id, commands.SaveSamplerWeights(model_id, directory, for_elsewhere))

    async def _add(self, command: commands.CreateModel | commands.Resume) -> None:
        async with self._one_command:
            if not await self._alive():
                log.warning("starting the trainer of %s again", self._config.name)
                await self.start()
            await self._command(command)
            self._models.add(command.model_id)

    async def _run(self, model_id: str, command: Command[R]) -> R:
        async with self._one_command:
            if not await self._alive() or model_id not in self._models:
                raise ModelLost(
                    f"{model_id} is no longer loaded: create it again, from a checkpoint to go on where it was"
                )
            return await self._command(command)

    async def _alive(self) -> bool:
        """Whether every rank runs. Where one has died since the last command, the others are ended too."""
        if any(rank.died.is_set() for rank in self._ranks):
            log.error("the trainer of %s has died; its models must be loaded again", self._config.name)
            await self._end(_LAST_GRACE_S)
        return bool(self._ranks)

    async def _end(self, grace_s: float) -> None:
        ranks, self._ranks = self._ranks, []
        self._models.clear()
        await asyncio.gather(*(rank.stop(grace_s) for rank in ranks))

    async def _command(self, command: Command[R]) -> R:
        """Run on all ranks, to the end even if the caller stops waiting: half a command on one rank is
        worse than a result nobody reads."""
        task = asyncio.ensure_future(self._on_all_or_end(command))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise

    async def _on_all_or_end(self, command: Command[R]) -> R:
        try:
            return await self._on_all(command, self._patience_s)
        except (ChildDied, ChildBroke) as error:
            if self._num_ranks > 1 or isinstance(error, ChildDied):
                log.error("the trainer of %s ends (%s); its models must be loaded again", self._config.name, error)
                await self._end(_LAST_GRACE_S)
            raise

    async def _on_all(self, command: Command[R], patience_s: float) -> R:
        """Rank 0's answer, once every rank has one. Raises what the ranks agree on; ChildDied or ChildBroke as
        soon as one of them will not answer, or has failed by itself."""
        calls = [asyncio.ensure_future(rank.call(command, patience_s)) for rank in self._ranks]
        try:
            waiting = set(calls)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for call in done:
                    if isinstance(error := call.exception(), (ChildDied, ChildBroke)):
                        raise error
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        errors = [call.exception() for call in calls]
        if len({type(error) for error in errors}) > 1:
            raise ChildBroke(f"the ranks do not agree: {errors}")
        return calls[0].result()
