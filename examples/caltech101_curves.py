"""Curves of the cookbook's image classifier: python caltech101_curves.py OUT TASK/NAME=LOG_DIR [...]

Writes OUT.csv (run, step, train and test NLL, accuracy, learning rate) and OUT.png, where a TASK has a row of its own.
LOG_DIR holds the recipe's metrics.jsonl. Runs in the cookbook's environment.
"""

import sys
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

sys.path.insert(0, str(Path(__file__).with_name("vision_rl")))
from curves import read, write_table

COLUMNS = {
    "train_nll": "train_mean_nll",
    "test_nll": "test/nll",
    "accuracy": "accuracy",
    "learning_rate": "learning_rate",
}


def points(rows: list[dict[str, Any]], column: str) -> tuple[list[int], list[float]]:
    """Steps and values, of the steps that have one."""
    having = [row for row in rows if column in row]
    return [row["step"] for row in having], [row[column] for row in having]


def draw(axes: Any, task: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    """One task into its two axes: NLL on the left, accuracy on the right."""
    nll, accuracy = axes
    for number, (name, rows) in enumerate(runs.items()):
        nll.plot(*points(rows, "train_nll"), color=f"C{number}", alpha=0.4, label=f"{name}, train")
        if any("test_nll" in row for row in rows):
            nll.plot(*points(rows, "test_nll"), "o-", color=f"C{number}", markersize=4, label=f"{name}, test")
        accuracy.plot(*points(rows, "accuracy"), "o-", color=f"C{number}", markersize=4, label=name)
    nll.set(title=task, xlabel="step", ylabel="nats per answer token", yscale="log")
    accuracy.set(title=task, xlabel="step", ylabel="accuracy on test photographs", ylim=(-0.02, 1.02))
    for one in axes:
        one.grid(alpha=0.3)
        one.legend(fontsize=8)


def main(out: str, log_dirs: dict[str, Path]) -> None:
    """The table and the picture."""
    tasks: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for run, directory in log_dirs.items():
        task, _, name = run.partition("/")
        tasks.setdefault(task, {})[name] = read(run, directory / "metrics.jsonl", COLUMNS)
    write_table(out, [row for runs in tasks.values() for rows in runs.values() for row in rows], COLUMNS)
    figure, axes = plt.subplots(len(tasks), 2, figsize=(10, 3.6 * len(tasks)), layout="constrained", squeeze=False)
    for pair, (task, runs) in zip(axes, tasks.items(), strict=True):
        draw(pair, task, runs)
    figure.savefig(f"{out}.png", dpi=100)


if __name__ == "__main__":
    main(sys.argv[1], {name: Path(directory) for name, _, directory in (one.partition("=") for one in sys.argv[2:])})
