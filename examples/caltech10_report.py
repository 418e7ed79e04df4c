"""Output of the demo: a table on the screen, metrics as JSON lines, curves as a picture."""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot as plt

CHANCE = 0.1  # ten classes, equally many photographs of each


@dataclass(frozen=True)
class Step:
    step: int
    loss: float
    """Mean negative log-probability of an answer token, before this step's update."""
    learning_rate: float
    time_s: float
    """Since training began."""


@dataclass(frozen=True)
class Evaluation:
    step: int
    """Updates made before it."""
    correct: dict[str, int]
    """By class."""
    asked: dict[str, int]
    time_s: float
    """Seconds that it took."""

    @property
    def accuracy(self) -> float:
        return sum(self.correct.values()) / sum(self.asked.values())

    @property
    def count(self) -> int:
        return sum(self.asked.values())


def evaluation_of(step: int, truth: list[str], answers: list[str], time_s: float) -> Evaluation:
    correct: dict[str, int] = defaultdict(int)
    asked: dict[str, int] = defaultdict(int)
    for label, answer in zip(truth, answers, strict=True):
        asked[label] += 1
        correct[label] += answer == label
    return Evaluation(step, dict(correct), dict(asked), time_s)


@dataclass
class Report:
    """Collects a run and writes `caltech10.jsonl` as it goes, `caltech10.png` at the end."""

    directory: Path
    steps: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.metrics_path.write_text("")

    @property
    def metrics_path(self) -> Path:
        return self.directory / "caltech10.jsonl"

    @property
    def picture_path(self) -> Path:
        return self.directory / "caltech10.png"

    def add_step(self, step: Step) -> None:
        self.steps.append(step)
        self._write({"kind": "step"} | asdict(step))

    def add_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)
        summary = {"kind": "evaluation", "accuracy": evaluation.accuracy, "photographs": evaluation.count}
        self._write(summary | asdict(evaluation))

    def _write(self, row: dict[str, object]) -> None:
        with self.metrics_path.open("a") as out:
            out.write(json.dumps(row) + "\n")

    def draw(self, title: str) -> None:
        figure, (loss_axes, accuracy_axes) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
        figure.suptitle(title)
        loss_axes.plot([s.step for s in self.steps], [s.loss for s in self.steps])
        loss_axes.set(xlabel="step", ylabel="loss per answer token (nats)", yscale="log")

        points = [(e.step, e.accuracy) for e in self.evaluations]
        accuracy_axes.plot([step for step, _ in points], [accuracy for _, accuracy in points], marker="o")
        for point in points:
            label = f"{point[1]:.2f}"
            accuracy_axes.annotate(label, point, xytext=(0, 7), textcoords="offset points", ha="center")
        accuracy_axes.axhline(CHANCE, linestyle="--", color="gray", label="chance")
        accuracy_axes.set(
            xlabel="step", ylabel=f"accuracy on {self.evaluations[0].count} held-out photographs", ylim=(0, 1)
        )
        accuracy_axes.legend(loc="lower right")
        figure.savefig(self.picture_path, dpi=130)
        plt.close(figure)


def print_comparison(console: Console, before: Evaluation, after: Evaluation) -> None:
    table = Table(title="Held-out photographs answered correctly")
    table.add_column("class")
    for heading in ("asked", "before", "after"):
        table.add_column(heading, justify="right")
    for label, asked in after.asked.items():
        table.add_row(label, str(asked), str(before.correct[label]), str(after.correct[label]))
    table.add_section()
    table.add_row("accuracy", str(after.count), f"{before.accuracy:.2f}", f"{after.accuracy:.2f}", style="bold")
    console.print(table)
    if after.accuracy <= CHANCE:
        console.print(f"[red]The model did not learn: {after.accuracy:.2f} is no better than chance ({CHANCE}).")


def print_times(console: Console, times_s: dict[str, float]) -> None:
    table = Table(title="Wall time", show_header=False)
    table.add_column("part")
    table.add_column("seconds", justify="right")
    for part, time_s in times_s.items():
        table.add_row(part, f"{time_s:.1f} s")
    table.add_section()
    table.add_row("in all", f"{sum(times_s.values()):.1f} s", style="bold")
    console.print(table)
