"""Teach a vision-language model by reinforcement, on the cookbook's own training loop.

    python teach.py squares log_path=runs/squares base_url=http://127.0.0.1:8000
    python teach.py maze log_path=runs/maze base_url=http://127.0.0.1:8000 seed=1
    python teach.py geometry records=figures/train.parquet log_path=runs/geometry base_url=http://127.0.0.1:8000

Two phases: some steps of supervised fine-tuning, then RL from what they saved. The log_path gets what the cookbook
writes (metrics.jsonl, checkpoints.jsonl) in the folders `warm` and `rl`, and what the warm start alone achieves.
"""

import asyncio
import math
import os
import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import chz
import geometry
import maze
import squares
import tinker
from base import VALIDATION_SEED, Episodes, Served, renderer_of
from tinker_cookbook import cli_utils
from tinker_cookbook.renderers import Message, Renderer, TrainOnWhat
from tinker_cookbook.rl import train
from tinker_cookbook.rl.message_env import MessageEnv
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.utils import ml_log

TINY_VL = Path(__file__).resolve().parents[2] / "tinker_server" / "tiny_vl"
AnyOptions = TypeVar("AnyOptions")
WARM_CHECKPOINT = "warm"
WINDOW = 10
"""Steps of the warm start whose loss says when it ends."""


@dataclass(frozen=True)
class Task:
    """An environment with its training settings."""

    env: Callable[[int], MessageEnv]
    warm_start: Callable[[int], list[Message]]
    """A conversation of a seed, to begin with."""
    max_tokens: int
    """Largest number of tokens of one answer."""
    warm_steps: int
    """At most: the rate falls to 0 over so many."""
    rl_steps: int
    warm_rate: float
    rl_rate: float
    warm_until: float = 0.0
    """The warm start ends where the mean loss of a token over WINDOW steps is below this, in nats."""
    batch_size: int = 8
    """Groups of a step."""
    group_size: int = 8


def no_env(_seed: int) -> MessageEnv:
    """Stand in for the environment of a task whose episodes come from a file."""
    raise AssertionError("records=FILE names the file of questions")


TASKS = {
    "squares": Task(squares.squares, squares.warm_start, 4, warm_steps=20, rl_steps=50, warm_rate=3e-3, rl_rate=5e-4),
    "maze": Task(
        maze.maze_env,
        maze.warm_start,
        12,
        warm_steps=300,
        warm_until=0.09,
        rl_steps=60,
        warm_rate=3e-3,
        rl_rate=3e-4,
        batch_size=16,
    ),
    "geometry": Task(no_env, geometry.warm_start, 48, warm_steps=300, rl_steps=40, warm_rate=3e-3, rl_rate=5e-4),
}


@chz.chz
class Asked:
    """The served model and the questions, which every command takes."""

    base_url: str | None = None
    model_name: str = "tinker-server/tiny-vl"
    model_dir: str = str(TINY_VL)
    """Files of the model, for its tokenizer and image processor."""
    renderer_name: str = "qwen3_vl_instruct"
    records: str | None = None
    """File of questions, for geometry; validation rows are in validation.* beside it."""

    @property
    def served(self) -> Served:
        """The model with its files here."""
        return Served(self.model_name, Path(self.model_dir), self.renderer_name)


@chz.chz
class Options(Asked):
    """The command line."""

    log_path: str
    lora_rank: int = 32
    seed: int = 0
    warm_batch_size: int = 32
    """Conversations of a step of the warm start."""
    validation_groups: int = 128
    """Episodes of validation, each of its own seed."""
    eval_every: int = 20
    warm_steps: int | None = None
    """This and those below: as in the task, unless given."""
    warm_rate: float | None = None
    warm_until: float | None = None
    rl_steps: int | None = None
    rl_rate: float | None = None
    batch_size: int | None = None
    group_size: int | None = None
    loss_fn: str = "importance_sampling"
    behavior_if_log_dir_exists: cli_utils.LogdirBehavior = "raise"


def chosen(options: Options, task: Task, name: str) -> Any:
    """Return a setting from the command line, or else from the task."""
    given = getattr(options, name)
    return getattr(task, name) if given is None else given


@chz.chz
class Data(RLDatasetBuilder):
    """Training episodes of the run's seed, and validation episodes that are always the same."""

    options: Options
    task_name: str
    served: Any

    async def __call__(self) -> tuple[Episodes, Episodes]:
        """Return both."""
        task, options = TASKS[self.task_name], self.options
        training = Episodes(
            self.served,
            task.env if options.records is None else geometry.geometry_task(Path(options.records)),
            options.seed,
            chosen(options, task, "batch_size"),
            chosen(options, task, "group_size"),
            task.max_tokens,
            num_batches=chosen(options, task, "rl_steps"),
        )
        return training, held_out(task, self.served, options.records, options.validation_groups)


def held_out(task: Task, served: Served, records: str | None, num_episodes: int) -> Episodes:
    """Return the validation episodes, the same in every run: each of a seed of its own, from the file beside `records`
    if there is one."""
    env = task.env
    if records is not None:
        env = geometry.geometry_task(Path(records).with_name(f"validation{Path(records).suffix}"))
    return Episodes(served, env, VALIDATION_SEED, num_episodes, 1, task.max_tokens, num_batches=1)


def one_turn(messages: list[Message], renderer: Renderer, draw: random.Random) -> tinker.Datum:
    """A conversation up to one of its answers, which alone has weight: what is sampled, whatever a renderer does to
    the answers before it."""
    turn = draw.randrange(len(messages) // 2)
    shown = messages[: 2 * turn + 2]
    datum: tinker.Datum = conversation_to_datum(shown, renderer, None, TrainOnWhat.LAST_ASSISTANT_MESSAGE)
    return datum


def warm_up(task: Task, options: Options, served: Served) -> str:
    """Supervised steps on conversations of fresh seeds; the path of the state that they end in."""
    renderer = renderer_of(served)
    logger = ml_log.setup_logging(log_dir=f"{options.log_path}/warm", config=options)
    service = tinker.ServiceClient(base_url=options.base_url)
    client = service.create_lora_training_client(options.model_name, rank=options.lora_rank, seed=options.seed).result()
    draw = random.Random(f"warm-{options.seed}")
    steps, until = chosen(options, task, "warm_steps"), chosen(options, task, "warm_until")
    losses: deque[float] = deque([math.inf] * WINDOW, WINDOW)
    for step in range(steps):
        if fmean(losses) < until:
            break
        seeds = [draw.randrange(2**31) for _ in range(options.warm_batch_size)]
        batch = [one_turn(task.warm_start(seed), renderer, draw) for seed in seeds]
        rate = chosen(options, task, "warm_rate") * (1 - step / steps)
        forward_backward = client.forward_backward(batch, "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=rate)).result()
        weights = sum(sum(datum.loss_fn_inputs["weights"].tolist()) for datum in batch)
        losses.append(forward_backward.result().metrics["loss:sum"] / weights)
        logger.log_metrics({"train_nll": losses[-1]}, step=step)
    path: str = client.save_state(WARM_CHECKPOINT, ttl_seconds=7 * 24 * 3600).result().path
    logger.close()
    return path


def warm_state(task: Task, options: Options, served: Served) -> str:
    """Path of the state that RL begins with: what a run that is resumed has noted, or else a new warm start's."""
    renderer_of(served)  # from now on the cookbook finds the tokenizer by its name
    note = Path(options.log_path) / "warm" / "state.txt"
    if not note.exists():
        note.write_text(warm_up(task, options, served))
    return note.read_text()


def main(task_name: str, options: Options) -> None:
    """Warm up, then train."""
    cli_utils.check_log_dir(options.log_path, options.behavior_if_log_dir_exists)
    task = TASKS[task_name]
    served = options.served
    config = train.Config(
        log_path=f"{options.log_path}/rl",
        model_name=options.model_name,
        renderer_name=options.renderer_name,
        recipe_name=f"vision_rl_{task_name}",
        load_checkpoint_path=warm_state(task, options, served),
        dataset_builder=Data(options=options, task_name=task_name, served=served),
        learning_rate=chosen(options, task, "rl_rate"),
        lora_rank=options.lora_rank,
        max_tokens=task.max_tokens,
        loss_fn=options.loss_fn,
        eval_every=options.eval_every,
        save_every=0,
        base_url=options.base_url,
        num_groups_to_log=0,
    )
    asyncio.run(train.main(config))


def from_command_line(options: type[AnyOptions], usage: str) -> tuple[str, AnyOptions]:
    """Return the task and the options that the command line names, or end with the usage."""
    os.environ.setdefault("TINKER_API_KEY", "tml-local")
    if len(sys.argv) < 2 or sys.argv[1] not in TASKS:
        sys.exit(f"usage: python {Path(sys.argv[0]).name} {'|'.join(TASKS)} {usage} [NAME=VALUE ...]")
    return sys.argv[1], chz.entrypoint(options, argv=sys.argv[2:])


if __name__ == "__main__":
    main(*from_command_line(Options, "log_path=DIR [base_url=URL]"))
