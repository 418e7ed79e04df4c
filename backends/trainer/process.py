"""Run one trainer rank as a child process: `python -m tinker_server.backends.trainer.process FD`."""

import logging
from pathlib import Path
from typing import assert_never

import torch

from tinker_server.backends.processes.progress import Progress
from tinker_server.backends.processes.rpc import KeepWaiting, OnPart, serve
from tinker_server.backends.trainer import commands
from tinker_server.backends.trainer.distributed import files_s, join_world
from tinker_server.backends.trainer.rank import TrainerRank


class Process:
    """Holds the rank from its first command, `Start`, on."""

    def __init__(self, keep_waiting: KeepWaiting) -> None:
        self._keep_waiting = keep_waiting
        self._rank: TrainerRank | None = None

    def handle(self, command: commands.Start | commands.ModelCommand, emit: OnPart) -> object:
        """Run a command, and return an answer of the type that it names."""
        if isinstance(command, commands.Start):
            spec = command.spec
            self._keep_waiting(files_s(sum(file.stat().st_size for file in Path(spec.directory).iterdir())))
            world = join_world(
                spec.device,
                spec.placement.trainer_fraction,
                getattr(torch, spec.across_dtype),
                spec.mesh.context,
            )
            self._rank = TrainerRank(spec, world, self._keep_waiting, Progress(emit))
            return self._rank.base.score_base()
        assert self._rank is not None, "the first command is Start"
        return run(self._rank, command)


def run(rank: TrainerRank, command: commands.ModelCommand) -> object:
    """Run a command on a rank."""
    match command:
        case commands.CreateModel(model_id, lora, snapshot):
            return rank.create_model(model_id, lora, snapshot)
        case commands.DeleteModel(model_id):
            rank.delete_model(model_id)
        case commands.ComputeMicrobatch(new, order):
            return rank.compute_microbatch(new, order)
        case commands.CancelRequests(numbers):
            rank.cancel_requests(numbers)
        case commands.MarkIncomplete(model_id):
            rank.mark_incomplete(model_id)
        case commands.OptimStep(model_id, adam):
            return rank.optim_step(model_id, adam)
        case commands.Save(model_id, directory, "state"):
            rank.save_state(model_id, directory)
        case commands.Save(model_id, directory, form):
            rank.save_sampler_weights(model_id, directory, for_elsewhere=form == "export")
        case commands.LoadState(model_id, directory, with_optimizer):
            return rank.load_state(model_id, directory, with_optimizer)
        case commands.Snapshot(model_id, directory):
            rank.snapshot(model_id, directory)
        case commands.AwaitSnapshot(directory):
            return rank.base.snapshots.written(directory)
        case _:
            assert_never(command)
    return None


def main() -> None:
    """Run this process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    serve(lambda keep_waiting: Process(keep_waiting).handle)


if __name__ == "__main__":
    main()
