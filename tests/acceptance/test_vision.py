"""The image classifier: training from its defaults, resuming, evaluating."""

import re

import pytest

from tests.acceptance.recipes import Cookbook

MODEL = ("dataset=caltech101", "model_name=Qwen/Qwen3-VL-30B-A3B-Instruct", "renderer_name=qwen3_vl_instruct")
LEAST_ACCURACY = 0.9


def test_vlm_classifier(cookbook: Cookbook, shows, pytestconfig: pytest.Config) -> None:
    whole = pytestconfig.getoption("caltech101") is not None
    directory = cookbook.folder / "runs" / "vlm"
    sizes = ("batch_size=30", "num_epochs=4", "learning_rate=3e-3", "eval_every=10", "save_every=10", "n_eval=128")
    where = (f"experiment_dir={directory}", "behavior_if_log_dir_exists=delete")
    cookbook.run("vlm_classifier.train", *where, *MODEL, *sizes)
    (log_dir,) = (path.parent for path in directory.rglob("metrics.jsonl"))
    run = cookbook.run(
        "vlm_classifier.train", *where[:1], "behavior_if_log_dir_exists=resume", *MODEL, *sizes, log_dir=log_dir
    )
    nll, accuracy = run.column("test/nll"), run.column("test/accuracy") or run.column("accuracy")
    assert nll[-1] < 0.2 * nll[0]
    path = run.checkpoints[-1]["sampler_path"]
    said = cookbook.run("vlm_classifier.eval", "dataset=caltech101", f"model_path={path}", "n_eval=200").output
    found = float(re.findall(r"accuracy\D*([01]\.\d+)", said)[-1])
    assert whole or found >= LEAST_ACCURACY
    shows(
        f"vlm_classifier.train and .eval, {101 if whole else 10} classes",
        f"test NLL {nll[0]:.2f} -> {nll[-1]:.2f}, accuracy {accuracy[0]:.2f} -> {accuracy[-1]:.2f}, of 200 {found:.3f}",
    )
