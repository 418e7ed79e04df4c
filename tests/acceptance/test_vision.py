"""The image classifier: training from its defaults, resuming, evaluating."""

import json
import re
from dataclasses import dataclass

import pytest

from tests.acceptance.recipes import Cookbook

MODEL = ("dataset=caltech101", "model_name=Qwen/Qwen3-VL-30B-A3B-Instruct", "renderer_name=qwen3_vl_instruct")


@dataclass(frozen=True)
class Training:
    """Epochs, of ten steps each with ten classes, and what must have been learned in them."""

    num_epochs: int
    largest_part_of_nll: float
    least_accuracy: float


@pytest.mark.parametrize(
    "training",
    [
        pytest.param(Training(1, 0.6, 0.4), id="one epoch", marks=pytest.mark.quick),
        pytest.param(Training(4, 0.2, 0.9), id="four epochs"),
    ],
)
def test_vlm_classifier(cookbook: Cookbook, shows, pytestconfig: pytest.Config, training: Training) -> None:
    whole = pytestconfig.getoption("caltech101") is not None
    directory = cookbook.new_folder("vlm")
    every = ("eval_every=9", "save_every=10", "n_eval=128")
    sizes = ("batch_size=30", "learning_rate=3e-3", f"num_epochs={training.num_epochs}", *every)
    where = (f"experiment_dir={directory}", "behavior_if_log_dir_exists=delete")
    cookbook.run("vlm_classifier.train", *where, *MODEL, *sizes)
    (log_dir,) = (path.parent for path in directory.rglob("metrics.jsonl"))
    run = cookbook.run(
        "vlm_classifier.train", *where[:1], "behavior_if_log_dir_exists=resume", *MODEL, *sizes, log_dir=log_dir
    )
    nll, accuracy = run.column("test/nll"), run.column("test/accuracy") or run.column("accuracy")
    assert nll[-1] < training.largest_part_of_nll * nll[0]
    path = run.checkpoints[-1]["sampler_path"]
    said = cookbook.run("vlm_classifier.eval", "dataset=caltech101", f"model_path={path}", "n_eval=200").output
    found = float(re.findall(r"accuracy\D*([01]\.\d+)", said)[-1])
    assert whole or found >= training.least_accuracy
    shows(
        f"vlm_classifier.train and .eval, {101 if whole else 10} classes, epochs: {training.num_epochs}",
        f"test NLL {nll[0]:.2f} -> {nll[-1]:.2f}, accuracy {accuracy[0]:.2f} -> {accuracy[-1]:.2f}, of 200 {found:.3f}",
    )


def test_a_sweep_of_examples_per_class_is_evaluated(cookbook: Cookbook, shows) -> None:
    directory = cookbook.new_folder("vlm-sweep")
    results = directory.with_suffix(".json")
    sizes = ("examples_per_class=[8,16]", "num_repeats=1", "learning_rate=3e-3", "num_parallel=2")
    cookbook.run("vlm_classifier.sweep", f"experiment_dir={directory}", *MODEL[1:], *sizes)
    where = (f"experiment_dir={directory}", f"output_file={results}", "n_eval=60", "max_parallel_evals=2")
    cookbook.run("vlm_classifier.eval_sweep", *where, *MODEL[1:])
    found = {one["examples_per_class"]: one["accuracy"] for one in json.loads(results.read_text()).values()}
    assert set(found) == {8, 16} and max(found.values()) > 0.3, "ten classes, of which chance finds one"
    shows(
        "vlm_classifier.sweep and .eval_sweep", f"accuracy {found[8]:.2f} of 8, {found[16]:.2f} of 16 photographs each"
    )
