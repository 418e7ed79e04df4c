"""Measure the reward of saved weights on the validation episodes of a task, without training.

    python evaluate_policy.py squares weights=tinker://RUN/sampler_weights/NAME base_url=http://127.0.0.1:8000
    python evaluate_policy.py maze base_url=http://127.0.0.1:8000            (the base model)

Prints one line of JSON: episodes, mean reward, its standard error, turns of an episode, and the means of the task's own
metrics. The episodes are those that `teach.py` validates on.
"""

import asyncio
import json
from collections import defaultdict
from statistics import fmean, stdev

import chz
import tinker
from teach import TASKS, Asked, from_command_line, held_out
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.rl.rollouts import do_group_rollout


@chz.chz
class Options(Asked):
    """The command line."""

    weights: str | None = None
    """A path of sampler weights; without one the base model is measured."""
    episodes: int = 128
    temperature: float = 1.0


async def evaluate(task_name: str, options: Options) -> dict[str, float]:
    """Play the episodes side by side."""
    task = TASKS[task_name]
    service = tinker.ServiceClient(base_url=options.base_url)
    base_model = options.model_name if options.weights is None else None
    client = await service.create_sampling_client(options.weights, base_model)
    policy = TinkerTokenCompleter(client, task.max_tokens, options.temperature)
    groups = held_out(task, options.served, options.records, options.episodes).get_batch(0)
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
    print(json.dumps(asyncio.run(evaluate(*from_command_line(Options, "[weights=PATH] [base_url=URL]")))))
