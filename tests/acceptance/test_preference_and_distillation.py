"""Preference and distillation recipes, at their own ranks and losses."""

import json
import math
import time

import pytest

from tests.acceptance.recipes import Cookbook, Run

DELETE = "behavior_if_log_dir_exists=delete"


@pytest.mark.quick
def test_dpo_lowers_its_loss_from_that_of_equals(cookbook: Cookbook, shows) -> None:
    run = cookbook.train("preference.dpo.train", DELETE, "batch_size=16", "max_steps=4", "learning_rate=1e-3")
    loss = run.column("dpo_loss")
    assert loss[0] == pytest.approx(math.log(2), abs=1e-3), "policy and reference begin equal"
    assert loss[-1] < loss[0]
    shows("preference.dpo.train", f"DPO loss {loss[0]:.4f} (ln 2 = 0.6931) -> {loss[-1]:.4f}")


def test_shorter_begins_with_the_samplers_own_policy(cookbook: Cookbook, shows) -> None:
    sizes = ("batch_size=4", "group_size=4", "max_tokens=16", "max_steps=2", "eval_every=0")
    run = cookbook.train("preference.shorter.train", DELETE, *sizes)
    kl = run.column("optim/kl_sample_train_v1")
    assert abs(kl[0]) < 1e-3
    shows("preference.shorter.train", f"KL sampler to trainer {kl[0]:.1e}")


def test_rlhf_pipeline(cookbook: Cookbook, shows) -> None:
    name = str(time.time_ns())
    root = cookbook.folder / "runs" / f"rlhf-{name}"
    sizes = ("batch_size=8", "max_steps=2", "rl_max_tokens=8", "rl_group_size=2", "eval_every=0")
    run = cookbook.run("preference.rlhf.rlhf_pipeline", f"short_name={name}", *sizes)
    stages = {stage: Run(root / stage, 0, "") for stage in ("sft", "rm", "rl")}
    cookbook.steps = sum(len(stage.metrics) for stage in stages.values())
    assert all(stage.checkpoints[-1]["name"] == "final" for stage in stages.values()), run.output[-2000:]
    begun = json.loads((root / "rl" / "config.json").read_text())["load_checkpoint_path"]
    assert begun == stages["sft"].checkpoints[-1]["state_path"]
    kl = stages["rl"].column("optim/kl_sample_train_v1")
    assert abs(kl[0]) < 1e-3
    shows("preference.rlhf.rlhf_pipeline: SFT, reward model, RL", f"KL sampler to trainer {kl[0]:.1e}")


@pytest.mark.quick
def test_off_policy_reasoning(cookbook: Cookbook, shows) -> None:
    sizes = ("batch_size=16", "max_prompts=64", "buffer_size=64", "max_steps=3", "eval_every=0")
    run = cookbook.train("distillation.off_policy_reasoning", DELETE, *sizes)
    nll = run.column("train_mean_nll")
    assert nll[-1] < nll[0]
    shows("distillation.off_policy_reasoning, rank 128", f"train NLL {nll[0]:.2f} -> {nll[-1]:.2f}")


ON_POLICY = {
    "on_policy_distillation": ("groups_per_batch=4",),
    "on_policy_multi_teacher": ("deepmath_groups_per_batch=2", "tulu3_groups_per_batch=2"),
}


@pytest.mark.parametrize("recipe", ON_POLICY)
def test_on_policy_distillation(cookbook: Cookbook, shows, recipe: str) -> None:
    sizes = (*ON_POLICY[recipe], "group_size=2", "max_tokens=16", "max_steps=2", "eval_every=0")
    run = cookbook.train(f"distillation.{recipe}", DELETE, *sizes)
    kl, teacher = run.column("optim/kl_sample_train_v1"), run.column("teacher_kl")
    assert abs(kl[0]) < 1e-3
    shows(f"distillation.{recipe}, rank 128", f"KL sampler to trainer {kl[0]:.1e}, to teacher {teacher}")


@pytest.mark.parametrize("reverse", [False, True])
def test_sdft_takes_its_steps_and_saves_its_last(cookbook: Cookbook, shows, reverse: bool) -> None:
    sizes = ("groups_per_batch=4", "max_tokens=16", "max_steps=2", "eval_every=0", f"reverse={reverse}")
    run = cookbook.train("sdft.train", DELETE, *sizes)
    assert len(run.metrics) == 2 and run.checkpoints[-1]["name"] == "final"
    shows(f"sdft.train, {'reverse' if reverse else 'forward'} KL, top 20", "soft targets [N, 20]")


def test_continual_learning(cookbook: Cookbook, shows) -> None:
    """Two stages, each by SFT and by self-distillation with top-k targets; the second goes on from the first."""
    root = cookbook.new_folder("continual")
    model = ("model_name=Qwen/Qwen3.5-4B", "data_dir=self-distillation", f"log_root={root}", "lora_rank=8")
    sizes = ("batch_size=8", "max_tokens=64", "methods=sft,sdft_topk", "learning_rates=1e-3")
    cookbook.run("sdft.run_continual_learning", *model, *sizes)
    for method in ("sft", "sdft_topk"):
        first, second = (root / f"stage{stage}_{method}_lr1e-03" for stage in (1, 2))
        begun = json.loads((second / "config.json").read_text())["load_checkpoint_path"]
        assert begun == json.loads((first / "run_result.json").read_text())["checkpoint_path"]
        cookbook.steps += len(Run(first, 0, "").metrics) + len(Run(second, 0, "").metrics)
    nll = Run(root / "stage1_sft_lr1e-03", 0, "").column("train_mean_nll")
    assert nll[-1] < nll[0]
    shows("sdft.run_continual_learning, two methods and stages", f"train NLL {nll[0]:.2f} -> {nll[-1]:.2f}")
