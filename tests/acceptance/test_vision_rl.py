"""Two turns with a picture each on the cookbook's own loop, against a running server."""

import json
from typing import Any

import pytest

from tests.acceptance.recipes import PYTHON, ROOT, Cookbook, Run, read_jsonl

EXAMPLES = ROOT / "examples" / "vision_rl"
MODEL = ("model_name=Qwen/Qwen3-VL-30B-A3B-Instruct", f"model_dir={ROOT / 'tinker_server' / 'tiny_vl'}")


@pytest.mark.quick
def test_two_turns_of_squares_are_learned_and_measured_again(cookbook: Cookbook, shows) -> None:
    log_dir = cookbook.new_folder("squares")
    sizes = ("warm_steps=48", "rl_steps=4", "rl_rate=1e-4", "validation_groups=64", "eval_every=4")
    output, wall_s = cookbook.call([PYTHON, EXAMPLES / "teach.py", "squares", f"log_path={log_dir}", *MODEL, *sizes])
    warm = [row["train_nll"] for row in read_jsonl(log_dir / "warm" / "metrics.jsonl")]
    assert warm[-1] < 0.2 * warm[0]
    run = Run(log_dir / "rl", wall_s, output)
    cookbook.steps += len(run.metrics)
    played = [played_turns(run, step) for step in range(4)]
    assert all(len(turns) >= 1.9 * 64 for turns in played), "hardly an answer is too long"
    for reward, turns in zip(run.column("env/all/reward/total"), played, strict=True):
        assert reward == pytest.approx(sum(turn["reward"] for turn in turns) / 64)
    assert max(run.column("optim/kl_sample_train_v1")) < 1e-5, "both turns were sampled by what was trained"
    validation = run.column("test/env/all/reward/total")
    path = run.checkpoints[-1]["sampler_path"]
    said, _ = cookbook.call(
        [PYTHON, EXAMPLES / "evaluate_policy.py", "squares", f"weights={path}", "episodes=256", *MODEL],
    )
    found = json.loads(said.splitlines()[-1])
    assert found["episodes"] == 256 and found["turns"] > 1.9
    if "stop/max_tokens" not in found:  # a turn without an end has no other metric
        assert found["reward"] == pytest.approx((found["right_1"] + found["right_2"]) / 2)
    assert found["reward"] > 0.25 + 3 * found["standard_error"], "better than one of four colours by chance"
    shows(
        "examples/vision_rl squares, two turns",
        f"validation reward {validation[0]:.2f} after the warm start, {found['reward']:.2f} +- "
        f"{found['standard_error']:.2f} after 4 steps of RL",
    )


def played_turns(run: Run, step: int) -> list[dict[str, Any]]:
    """The turns of a step's 64 episodes, each rewarded for its own square. An answer without an end ends an episode."""
    episodes = read_jsonl(run.log_dir / f"iteration_{step:06d}" / "train_rollout_summaries.jsonl")
    assert len(episodes) == 64
    for episode in episodes:
        for n, turn in enumerate(episode["steps"], start=1):
            if "stop/max_tokens" in turn["metrics"]:
                assert (turn["reward"], turn["episode_done"]) == (0.0, True)
            else:
                assert turn["reward"] == turn["metrics"][f"right_{n}"] / 2 and turn["episode_done"] == (n == 2)
    return [turn for episode in episodes for turn in episode["steps"]]


def test_geometry_is_played_over_several_turns_with_what_the_tool_says_between_them(cookbook: Cookbook, shows) -> None:
    log_dir = cookbook.new_folder("asking")
    sizes = ("warm_steps=60", "rl_steps=2", "batch_size=4", "group_size=4", "validation_groups=30", "eval_every=2")
    files = (f"log_path={log_dir}", f"records={log_dir.with_suffix('.asked') / 'train.parquet'}")
    said, wall_s = cookbook.call([PYTHON, ROOT / "tests" / "acceptance" / "asking.py", *files, *MODEL, *sizes])
    run = Run(log_dir / "rl", wall_s, said)
    cookbook.steps += len(run.metrics)
    turns = run.column("env/all/turns_per_episode")
    assert len(turns) == 2 and min(turns) > 1.2, "the tool is asked"
    assert max(run.column("optim/kl_sample_train_v1")) < 1e-5, "the turns behind its words were sampled by what trains"
    reward = run.column("test/env/all/reward/total")[-1]
    shows("examples/vision_rl geometry, the tool asked", f"{turns[-1]:.1f} turns an episode, reward {reward:.2f}")
