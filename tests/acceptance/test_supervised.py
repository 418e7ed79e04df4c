"""Supervised recipes: chat, loops, resuming after a killed client, prompt distillation."""

import json

import httpx
import pytest

from tests.acceptance.recipes import Cookbook, Run

DELETE = "behavior_if_log_dir_exists=delete"


def assert_saved(run: Run) -> None:
    """Its last checkpoint holds the state and what to sample from."""
    last = run.checkpoints[-1]
    assert last["name"] == "final"
    assert last["state_path"].startswith("tinker://") and last["sampler_path"].startswith("tinker://")


@pytest.mark.quick
def test_sl_loop(cookbook: Cookbook, shows) -> None:
    run = cookbook.train("sl_loop", "batch_size=16", "max_steps=4", "learning_rate=3e-3", "save_every=2")
    nll = run.column("train_mean_nll")
    assert len(nll) == 4 and nll[-1] < 0.9 * nll[0]
    assert [row["name"] for row in run.checkpoints] == ["000002", "final"]
    shows("sl_loop", f"train NLL {nll[0]:.2f} -> {nll[-1]:.2f}")


@pytest.mark.quick
def test_the_metrics_of_an_unmodified_recipe_appear_on_the_page_of_its_run(cookbook: Cookbook, shows) -> None:
    log_dir = cookbook.new_folder("reported")
    sizes = (f"log_path={log_dir}", "batch_size=16", "max_steps=3", "save_every=2")
    run = cookbook.run("sl_loop", *sizes, log_dir=log_dir, through=("tinker_server.cookbook",))
    run_id = run.checkpoints[-1]["state_path"].split("/")[2]
    url = f"{cookbook.server.base_url}/runs/{run_id}/metrics.json"
    found = httpx.get(url, params={"shown": ["train_mean_nll", "progress"]}).json()
    logged = {name for row in run.metrics for name, value in row.items() if isinstance(value, int | float)} - {"step"}
    assert set(found["names"]) == logged and found["last_step"] == 2
    for name in ("train_mean_nll", "progress"):
        assert found["metrics"][name]["step"] == [0, 1, 2]
        assert found["metrics"][name]["value"] == run.column(name), name
    shows("sl_loop with tinker_server.cookbook", f"{len(logged)} metrics of 3 steps on the page")


def test_sl_basic(cookbook: Cookbook, shows) -> None:
    run = cookbook.train("sl_basic", "max_steps=2", "learning_rate=3e-3", "eval_every=1")
    nll, test_nll = run.column("train_mean_nll"), run.column("test/nll")
    assert nll[-1] < nll[0] and test_nll[-1] < test_nll[0]
    assert_saved(run)
    shows("sl_basic", f"test NLL {test_nll[0]:.2f} -> {test_nll[-1]:.2f}")


def test_chat_sl_goes_on_after_its_client_was_killed(cookbook: Cookbook, shows) -> None:
    common = ("batch_size=16", "save_every=2", "rolling_save_every=1", "rolling_ttl_seconds=3600", "eval_every=0")
    log_dir = cookbook.new_folder("chat_sl")
    cookbook.killed("chat_sl.train", DELETE, *common, "max_steps=5", log_dir=log_dir, after_step=2)
    resume = ("behavior_if_log_dir_exists=resume", f"log_path={log_dir}", *common, "max_steps=5")
    run = cookbook.run("chat_sl.train", *resume, log_dir=log_dir)
    assert "Resuming" in run.output or "resum" in run.output.lower()
    assert [row["step"] for row in run.metrics] == list(range(5))
    assert_saved(run)
    nll = run.column("train_mean_nll")
    shows("chat_sl.train, killed and resumed, rolling checkpoints", f"train NLL {nll[0]:.2f} -> {nll[-1]:.2f}")


def test_a_sweep_of_chat_sl_recommends_the_better_rate(cookbook: Cookbook, shows) -> None:
    sweep_dir = cookbook.new_folder("sweep")
    base = ("recipe=sft", "base.batch_size=16", "base.eval_every=0", "base.max_length=512")
    axes = ("learning_rates=[1e-6,3e-3]", "lora_ranks=[8]", "training_budget_examples=48", "max_parallel=2")
    cookbook.run("chat_sl.sweep", f"sweep_dir={sweep_dir}", *base, *axes)
    found = json.loads((sweep_dir / "recommendations.json").read_text())["recommendations"]["rank_8"]
    assert found["learning_rate"] == 3e-3
    shows("chat_sl.sweep, two runs side by side", f"train NLL {found['train_mean_nll']:.2f} at the better rate")


def test_decisions(cookbook: Cookbook, shows) -> None:
    said = cookbook.run("decisions.demo", "model_name=Qwen/Qwen3.5-4B", said="How do I pay?\n\n").output
    shares = json.loads(said[said.index("{") : said.rindex("}") + 1])
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3) and len(shares) == 4
    sizes = ("model_name=Qwen/Qwen3.5-4B", "data_path=markets.csv", "batch_size=16", "epochs=4", "learning_rate=3e-3")
    run = cookbook.train("decisions.forecasting", DELETE, *sizes)
    loss, reward = run.column("train/loss"), run.column("test/brier_reward")
    assert loss[-1] < loss[0]
    assert_saved(run)
    shows("decisions.demo and .forecasting", f"Brier loss {loss[0]:.2f} -> {loss[-1]:.2f}, {reward[-1]:.2f} held out")


def test_prompt_distillation(cookbook: Cookbook, shows) -> None:
    data = cookbook.folder / "languages.jsonl"
    made = cookbook.run("prompt_distillation.create_data", f"output_file={data}")
    assert data.exists() and "24/24" in made.output, made.output[-2000:]
    # The small model follows no instructions, so that the distilled answers are put in its place.
    rows = (cookbook.folder / "HuggingFaceH4" / "no_robots" / "data" / "train.jsonl").read_text()
    data.write_text(rows)
    arguments = (f"file_path={data}", "batch_size=16", "max_steps=2", "eval_every=0", "learning_rate=3e-3")
    run = cookbook.train("prompt_distillation.train", DELETE, *arguments)
    nll = run.column("train_mean_nll")
    assert nll[-1] < nll[0]
    assert_saved(run)
    shows("prompt_distillation.create_data and .train", f"24 prompts sampled; train NLL {nll[0]:.2f} -> {nll[-1]:.2f}")
