"""Measure the reward of saved weights on the validation episodes of a task, without training.

    python evaluate_policy.py squares weights=tinker://RUN/sampler_weights/NAME base_url=http://127.0.0.1:8000
    python evaluate_policy.py maze base_url=http://127.0.0.1:8000            (the base model)

Prints one line of JSON: episodes, mean reward, its standard error, turns of an episode, and the means of the task's own
metrics. The episodes are those that `teach.py` validates on.
"""

import asyncio
import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev

import chz
import tinker
from base import Served
from teach import TASKS, TINY_VL, held_out
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.rl.rollouts import do_group_rollout


@chz.chz
class Options:
    """The command line."""

    weights: str | None = None
    """A path of sampler weights; without one the base model is measured."""
    base_url: str | None = None
    model_name: str = "tinker-server/tiny-vl"
    model_dir: str = str(TINY_VL)
    renderer_name: str = "qwen3_vl_instruct"
    records: str | None = None
    """File of questions, for geometry; validation rows are in validation.* beside it."""
    episodes: int = 128
    temperature: float = 1.0


async def evaluate(task_name: str, options: Options) -> dict[str, float]:
    """Play the episodes side by side."""
    task = TASKS[task_name]
    served = Served(options.model_name, Path(options.model_dir), options.renderer_name)
    service = tinker.ServiceClient(base_url=options.base_url)
    base_model = options.model_name if options.weights is None else None
    client = await service.create_sampling_client(options.weights, base_model)
    policy = TinkerTokenCompleter(client, task.max_tokens, options.temperature)
    groups = held_out(task, served, options.records, options.episodes).get_batch(0)
    played = await asyncio.gather(*(do_group_rollout(group, policy) for group in groups))
    rewards = [reward for group in played for reward in group.get_total_rewards()]
    found: dict[str, list[float]] = defaultdict(list)
    for episode in (one for group in played for one in group.trajectories_G):
        found["turns"].append(len(episode.transitions))
        for transition in episode.transitions:
            for name, value in transition.metrics.items():
                found[name].append(float(value))
    return {
        "episodes": len(rewards),
        "reward": fmean(rewards),
        "standard_error": stdev(rewards) / len(rewards) ** 0.5 if len(rewards) > 1 else 0.0,
        **{name: fmean(values) for name, values in sorted(found.items())},
    }


if __name__ == "__main__":
    os.environ.setdefault("TINKER_API_KEY", "tml-local")
    if len(sys.argv) < 2 or sys.argv[1] not in TASKS:
        sys.exit(f"usage: python evaluate_policy.py {'|'.join(TASKS)} [weights=PATH] [base_url=URL] [NAME=VALUE ...]")
    print(json.dumps(asyncio.run(evaluate(sys.argv[1], chz.entrypoint(Options, argv=sys.argv[2:])))))
