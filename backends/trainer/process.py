"""One trainer rank as a child process: `python -m backends.trainer.process FD`."""

import logging

from backends.children import serve
from backends.trainer.parallel import join_world
from backends.trainer.rank import RankTrainer, TrainerConfig


def make(config: TrainerConfig) -> RankTrainer:
    """Join the other ranks and load the base."""
    return RankTrainer(config, join_world(config.device))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    serve(make)
