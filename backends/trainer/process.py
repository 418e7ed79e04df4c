"""One trainer rank as a child process: `python -m backends.trainer.process FD`."""

import logging
from typing import assert_never

import torch

from backends.children import serve
from backends.trainer import commands
from backends.trainer.parallel import join_world
from backends.trainer.rank import TrainerRank


class Process:
    """Holds the rank from its first command, `Start`, on."""

    def __init__(self) -> None:
        self._rank: TrainerRank | None = None

    def handle(self, command: commands.Start | commands.ModelCommand) -> object:
        """Run one command; its answer is of the type that the command names."""
        if isinstance(command, commands.Start):
            world = join_world(command.config.device)
            if world.device.type == "cuda":
                # The rest is the sampler's, also while it is away to start again.
                torch.cuda.set_per_process_memory_fraction(command.config.gpu_memory_fraction)
            self._rank = TrainerRank(command.config, world)
            return None
        assert self._rank is not None, "the first command is Start"
        return run(self._rank, command)


def run(rank: TrainerRank, command: commands.ModelCommand) -> object:
    """What each command does on a rank."""
    match command:
        case commands.CreateModel(model_id, lora):
            rank.create_model(model_id, lora)
        case commands.DeleteModel(model_id):
            rank.delete_model(model_id)
        case commands.ForwardBackward(model_id, loss_input, backward):
            return rank.forward_backward(model_id, loss_input, backward)
        case commands.MarkIncomplete(model_id):
            rank.mark_incomplete(model_id)
        case commands.OptimStep(model_id, adam):
            return rank.optim_step(model_id, adam)
        case commands.SaveState(model_id, directory):
            rank.save_state(model_id, directory)
        case commands.LoadState(model_id, directory, with_optimizer):
            rank.load_state(model_id, directory, with_optimizer)
        case commands.SaveSamplerWeights(model_id, directory):
            rank.save_sampler_weights(model_id, directory)
        case commands.Suspend(model_id, directory):
            rank.suspend(model_id, directory)
        case commands.Resume(model_id, lora, directory):
            rank.resume(model_id, lora, directory)
        case _:
            assert_never(command)
    return None


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    serve(Process().handle)
