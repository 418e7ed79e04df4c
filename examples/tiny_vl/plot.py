"""Draw train.csv: losses, probe accuracy and images a second over time.

python plot.py train.csv train.png
"""

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CURVES = (
    ("token", "loss on the teacher's tokens"),
    ("unseen", "loss on photographs held out"),
    ("caption", "caption loss"),
    ("answer", "loss on the teacher's features, at a name"),
    ("probe", "linear probe, 101 classes"),
    ("images_per_s", "images a second"),
)


def main(source: Path, target: Path) -> None:
    rows = list(csv.DictReader(source.open()))
    start = max((float(row["seconds"]) for row in rows if row["stage"] == "distil"), default=0.0)
    figure, axes = plt.subplots(1, len(CURVES), figsize=(21, 3.6), layout="constrained")
    for axis, (column, title) in zip(axes, CURVES, strict=True):
        for stage, offset in (("distil", 0.0), ("caption", start)):
            points = [
                (float(r["seconds"]) + offset, float(r[column])) for r in rows if r["stage"] == stage and r[column]
            ]
            if points:
                axis.plot(*zip(*points, strict=True), marker="." if column in ("probe", "unseen") else "", label=stage)
        axis.set(title=title, xlabel="seconds")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(target, dpi=100)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
