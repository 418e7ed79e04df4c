"""Reinforcement learning recipes, at the losses that they choose themselves."""

import json

import pytest

from tests.acceptance.recipes import Cookbook, Run

DELETE = "behavior_if_log_dir_exists=delete"
LARGEST_KL = 1e-3
"""nats a token, between what sampled and what trains, in float32."""


def agreement(run: Run) -> float:
    """The largest distance between sampler and trainer at the steps where nothing is off-policy by design."""
    kl = run.column("optim/kl_sample_train_v1")
    assert kl, "no kl_sample_train_v1 was logged"
    return abs(kl[0])


MATH = (DELETE, "model_name=Qwen/Qwen3.5-4B", "groups_per_batch=4", "group_size=4", "max_tokens=5", "max_steps=3")
MODES = {
    "sync, stable_reinforce": (),
    "async": ("max_steps_off_policy=2",),
    "stream": ("stream_minibatch_config.groups_per_batch=4", "stream_minibatch_config.num_minibatches=2"),
    "importance_sampling, KL after the step": ("loss_fn=importance_sampling", "compute_post_kl=True"),
    "ppo": ("loss_fn=ppo", "num_substeps=2"),
    "cispo": ("loss_fn=cispo",),
}


@pytest.mark.parametrize("mode", MODES)
def test_math_rl(cookbook: Cookbook, shows, mode: str) -> None:
    run = cookbook.train("math_rl.train", *MATH, *MODES[mode])
    assert len(run.column("optim/kl_sample_train_v1")) == 3
    assert agreement(run) < LARGEST_KL
    assert run.checkpoints[-1]["name"] == "final"
    shows(f"math_rl.train, {mode}", f"KL sampler to trainer {agreement(run):.1e}")


@pytest.mark.parametrize("loss_fn", ["stable_reinforce", "gspo"])
def test_rl_loop(cookbook: Cookbook, shows, loss_fn: str) -> None:
    run = cookbook.train(
        "rl_loop", "batch_size=4", "group_size=4", "max_tokens=16", "max_steps=2", f"loss_fn={loss_fn}"
    )
    assert len(run.column("reward/total")) == 2
    assert run.checkpoints[-1]["name"] == "final"
    shows(f"rl_loop, {loss_fn}", f"reward {run.column('reward/total')[-1]:.2f} (the model cannot count)")


def test_rl_basic_trains_near_the_samplers_policy(cookbook: Cookbook, shows) -> None:
    run = cookbook.train("rl_basic", "max_tokens=16", "max_steps=1")
    assert agreement(run) < LARGEST_KL
    shows("rl_basic", f"KL sampler to trainer {agreement(run):.1e}")


def test_rubric_trains_near_the_samplers_policy(cookbook: Cookbook, shows) -> None:
    cookbook.run("rubric.generate_data")
    run = cookbook.train("rubric.train", DELETE, "groups_per_batch=4", "max_steps=2", "eval_every=0")
    assert agreement(run) < LARGEST_KL
    shows("rubric.generate_data and .train", f"KL sampler to trainer {agreement(run):.1e}")


def test_prometheus_trains_near_the_samplers_policy(cookbook: Cookbook, shows) -> None:
    run = cookbook.train("rubric.prometheus_experimental", DELETE, "groups_per_batch=4", "max_steps=2", "eval_every=0")
    assert agreement(run) < LARGEST_KL
    shows("rubric.prometheus_experimental", f"KL sampler to trainer {agreement(run):.1e}")


def test_rl_numerics_check(cookbook: Cookbook, shows) -> None:
    task = ("task.num_pages_min=2", "task.num_pages_max=3", "task.page_chars=400")
    sizes = ("group_size=2", "groups_per_batch=2", "max_tokens=32", "max_steps=2")
    run = cookbook.train("rl_numerics_check.train", DELETE, "model_name=Qwen/Qwen3.6-35B-A3B", *sizes, *task)
    assert agreement(run) < LARGEST_KL
    turns = run.column("env/all/turns_per_episode")[0]
    shows("rl_numerics_check.train", f"KL sampler to trainer {agreement(run):.1e}, {turns:.1f} turns")


GAMES = {
    "guess_number": ("batch_size=4", "group_size=2", "eval_every=0"),
    "twenty_questions": ("batch_size=2", "group_size=2", "num_epochs=1", "eval_every=0"),
    "text_arena": ("batch_size=8", "num_train_datapoints=64", "num_test_datapoints=4"),
}


@pytest.mark.parametrize("game", GAMES)
def test_multiplayer(cookbook: Cookbook, shows, game: str) -> None:
    run = cookbook.train(f"multiplayer_rl.{game}.train", DELETE, *GAMES[game], "max_steps=1")
    assert agreement(run) < LARGEST_KL
    turns = run.column("env/all/turns_per_episode")[0]
    shows(f"multiplayer_rl.{game}.train", f"KL sampler to trainer {agreement(run):.1e}, {turns:.1f} turns")


def test_forecasting_trains_near_the_samplers_policy(cookbook: Cookbook, shows) -> None:
    model = ("model_name=Qwen/Qwen3.5-4B", "renderer_name=qwen3_5_disable_thinking", "data_path=markets.csv")
    sizes = ("groups_per_batch=4", "group_size=2", "validation_group_size=1", "max_tokens=16", "max_steps=2")
    run = cookbook.train("forecasting.train", DELETE, *model, *sizes)
    assert agreement(run) < LARGEST_KL
    shows("forecasting.train", f"KL sampler to trainer {agreement(run):.1e}")


def test_true_thinking_score_finds_no_error_in_any_problem(cookbook: Cookbook, shows) -> None:
    cookbook.run("true_thinking_score.run_small_experiment")
    found = json.loads((cookbook.folder / "runs" / "tts-experiment" / "tts_results.json").read_text())
    assert len(found["problems"]) == 3 and not any("error" in problem for problem in found["problems"])
    shows("true_thinking_score.run_small_experiment", f"{found['aggregate']['n_steps']} steps scored")
