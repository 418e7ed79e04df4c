"""Shared parts of the three environments: a renderer for the served model, groups of episodes, datasets of groups.

It depends on the cookbook's interfaces, on no task and no server. A task is a function from a seed to a MessageEnv.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tinker_cookbook import tokenizer_utils
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.rl.message_env import EnvFromMessageEnv, MessageEnv
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset
from transformers import AutoImageProcessor, AutoTokenizer

VALIDATION_SEED = 1_000_003
"""Validation episodes are the same in every run; training episodes are drawn from the run's own seed."""
MAX_CONTEXT = 4096
BAD_ANSWER_REWARD = 0.0
"""Reward of an episode that ends in an answer that is cut off or cannot be parsed."""


@dataclass(frozen=True)
class Served:
    """The trained model: its public name, its files on this machine, and the name of its renderer."""

    name: str
    directory: Path
    renderer_name: str = "qwen3_vl_instruct"


@cache
def renderer_of(served: Served) -> Renderer:
    """Make a renderer with the model's own tokenizer and image processor, and register the tokenizer by name."""
    tokenizer_utils.register_tokenizer(served.name, lambda: AutoTokenizer.from_pretrained(served.directory))
    processor = AutoImageProcessor.from_pretrained(served.directory)
    return get_renderer(served.renderer_name, tokenizer_utils.get_tokenizer(served.name), image_processor=processor)


@dataclass(frozen=True)
class Group(EnvGroupBuilder):
    """Episodes that begin alike, so that their rewards can be compared."""

    served: Served
    task: Callable[[int], MessageEnv]
    seed: int
    size: int
    max_tokens: int

    async def make_envs(self) -> Sequence[Env]:
        """`size` episodes from the same seed."""
        renderer = renderer_of(self.served)
        return [
            EnvFromMessageEnv(
                renderer,
                self.task(self.seed),
                failed_parse_reward=BAD_ANSWER_REWARD,
                context_overflow_reward=BAD_ANSWER_REWARD,
                max_trajectory_tokens=MAX_CONTEXT,
                max_generation_tokens=self.max_tokens,
            )
            for _ in range(self.size)
        ]

    def logging_tags(self) -> list[str]:
        """None: there is one task a run."""
        return []


@dataclass(frozen=True)
class Episodes(RLDataset):
    """Batches of groups; batch i is drawn from (seed, i) alone, so that a run that is resumed goes on as it was."""

    served: Served
    task: Callable[[int], MessageEnv]
    seed: int
    batch_size: int
    group_size: int
    max_tokens: int
    num_batches: int

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """The groups of one step."""
        draw = random.Random(f"{self.seed}-{index}")
        seeds = [draw.randrange(2**31) for _ in range(self.batch_size)]
        return [Group(self.served, self.task, seed, self.group_size, self.max_tokens) for seed in seeds]

    def __len__(self) -> int:
        return self.num_batches
