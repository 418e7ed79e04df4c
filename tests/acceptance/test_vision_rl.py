"""Two turns with a picture each on the cookbook's own loop, against a running server."""

import json

import pytest

from tests.acceptance.recipes import PYTHON, ROOT, Cookbook, Run, read_jsonl

EXAMPLES = ROOT / "examples" / "vision_rl"
MODEL = ("model_name=Qwen/Qwen3-VL-30B-A3B-Instruct", f"model_dir={ROOT / 'tinker_server' / 'tiny_vl'}")


@pytest.mark.quick
def test_two_turns_of_squares_are_learned_and_measured_again(cookbook: Cookbook, shows) -> None:
    log_dir = cookbook.folder / "runs" / "squares"
    sizes = ("warm_steps=32", "rl_steps=4", "validation_groups=64", "eval_every=4")
    output, wall_s = cookbook.call([PYTHON, EXAMPLES / "teach.py", "squares", f"log_path={log_dir}", *MODEL, *sizes])
    warm = [row["train_nll"] for row in read_jsonl(log_dir / "warm" / "metrics.jsonl")]
    assert warm[-1] < 0.7 * warm[0]
    run = Run(log_dir / "rl", wall_s, output)
    cookbook.steps += len(run.metrics)
    rewards = run.column("env/all/reward/total")
    assert len(rewards) == 4
    for reward, first, second in zip(
        rewards, run.column("env/all/right_1"), run.column("env/all/right_2"), strict=True
    ):
        assert reward == pytest.approx((first + second) / 2), "each turn is rewarded for its own square"
    assert run.column("env/all/turns_per_episode") == [2.0] * 4
    assert max(run.column("optim/kl_sample_train_v1")) < 1e-5, "both turns were sampled by what was trained"
    validation = run.column("test/env/all/reward/total")
    path = run.checkpoints[-1]["sampler_path"]
    said, _ = cookbook.call(
        [PYTHON, EXAMPLES / "evaluate_policy.py", "squares", f"weights={path}", "episodes=256", *MODEL],
    )
    found = json.loads(said.splitlines()[-1])
    assert (found["episodes"], found["turns"]) == (256, 2.0)
    assert found["reward"] == pytest.approx((found["right_1"] + found["right_2"]) / 2)
    assert found["reward"] > 0.25 + 3 * found["standard_error"], "better than one of four colours by chance"
    shows(
        "examples/vision_rl squares, two turns",
        f"validation reward {validation[0]:.2f} after the warm start, {found['reward']:.2f} +- "
        f"{found['standard_error']:.2f} after 4 steps of RL",
    )


def test_geometry_is_played_over_several_turns_with_what_the_tool_says_between_them(cookbook: Cookbook, shows) -> None:
    log_dir = cookbook.folder / "runs" / "asking"
    sizes = ("warm_steps=60", "rl_steps=2", "batch_size=4", "group_size=4", "validation_groups=30", "eval_every=2")
    files = (f"log_path={log_dir}", f"records={log_dir.with_name('asked') / 'train.parquet'}")
    said, wall_s = cookbook.call([PYTHON, ROOT / "tests" / "acceptance" / "asking.py", *files, *MODEL, *sizes])
    run = Run(log_dir / "rl", wall_s, said)
    cookbook.steps += len(run.metrics)
    turns = run.column("env/all/turns_per_episode")
    assert len(turns) == 2 and min(turns) > 1.2, "the tool is asked"
    assert max(run.column("optim/kl_sample_train_v1")) < 1e-5, "the turns behind its words were sampled by what trains"
    reward = run.column("test/env/all/reward/total")[-1]
    shows("examples/vision_rl geometry, the tool asked", f"{turns[-1]:.1f} turns an episode, reward {reward:.2f}")
