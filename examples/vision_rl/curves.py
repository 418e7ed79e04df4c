"""Curves of one task over its runs: python curves.py OUT NAME=RUN_DIR [NAME=RUN_DIR ...]

Writes OUT.csv (run, step, reward, validation reward, turns of an episode, KL from sampler to trainer, seconds) and
OUT.png, with the turns too if they change.
"""

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLUMNS = {
    "reward": "env/all/reward/total",
    "validation": "test/env/all/reward/total",
    "turns": "env/all/turns_per_episode",
    "kl_sample_train": "optim/kl_sample_train_v1",
    "step_s": "time/total",
}
LEAST_CHANGE = 0.5
"""Turns of an episode are drawn if their mean changes by more than this."""


def read(run: str, metrics: Path, columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """Read a row per step with metrics from metrics.jsonl; `columns` maps the table's names to the file's."""
    rows = []
    for line in metrics.read_text().splitlines():
        found = json.loads(line)
        values = {name: found[key] for name, key in columns.items() if key in found}
        if values:
            rows.append({"run": run, "step": found["step"], **values})
    return rows


def write_table(out: str, rows: Sequence[Mapping[str, object]], columns: Mapping[str, str]) -> None:
    """Write OUT.csv; a value that a step did not measure stays empty."""
    with Path(f"{out}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["run", "step", *columns])
        writer.writeheader()
        writer.writerows(rows)


def main(out: str, runs: dict[str, Path]) -> None:
    """The table and the picture."""
    rows = [row for run, directory in runs.items() for row in read(run, directory / "rl" / "metrics.jsonl", COLUMNS)]
    write_table(out, rows, COLUMNS)
    figure, axes = plt.subplots(figsize=(7, 4))
    all_turns = [row["turns"] for row in rows if "turns" in row]
    has_turns = max(all_turns, default=0) - min(all_turns, default=0) > LEAST_CHANGE
    if has_turns:
        of_turns = axes.twinx()
        of_turns.set(ylabel="turns of an episode (dotted)")
    for number, run in enumerate(runs):
        for name, style in (("reward", "-"), ("validation", "o")):
            points = [(row["step"], row[name]) for row in rows if row["run"] == run and name in row]
            if not points:
                continue
            label = f"{run}, training" if name == "reward" else f"{run}, validation"
            axes.plot(*zip(*points, strict=True), style, color=f"C{number}", label=label, alpha=0.8)
        if has_turns:
            turns = [(row["step"], row["turns"]) for row in rows if row["run"] == run and "turns" in row]
            of_turns.plot(*zip(*turns, strict=True), ":", color=f"C{number}", alpha=0.8)
            of_turns.set_ylim(0)
    axes.set(xlabel="step", ylabel="mean reward of an episode", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right" if has_turns else "best")
    figure.tight_layout()
    figure.savefig(f"{out}.png", dpi=110)


if __name__ == "__main__":
    main(sys.argv[1], {name: Path(directory) for name, _, directory in (one.partition("=") for one in sys.argv[2:])})
