"""Recipes of the cookbook as a user runs them: a process in the working folder, and what it wrote."""

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.acceptance.working_folder import MODELS
from tests.servers import KEY, Server

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".cookbook" / "bin" / "python"
TIMEOUT_S = 600
POLL_S = 0.2


@dataclass(frozen=True)
class Run:
    """A recipe that has ended well."""

    log_dir: Path
    wall_s: float
    output: str

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that belong to a step: RL appends one of token counts alone."""
        rows = read_jsonl(self.log_dir / "metrics.jsonl")
        return [row for row in rows if any(not name.startswith("tokens/") and name != "step" for name in row)]

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        """The lines of checkpoints.jsonl."""
        return read_jsonl(self.log_dir / "checkpoints.jsonl")

    def column(self, name: str) -> list[float]:
        """A metric, of the steps that have it."""
        return [row[name] for row in self.metrics if name in row]


@dataclass
class Cookbook:
    """The cookbook's environment, its working folder, and the server that it knows."""

    folder: Path
    server: Server
    spent_s: float = 0.0
    """By the recipes of the test that runs."""
    steps: int = 0
    """Those of the test that runs."""
    environment: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),  # tinker_server.cookbook
            "TINKER_API_KEY": KEY,
            "TINKER_BASE_URL": self.server.base_url,
            "TINKER_COOKBOOK_RUNS_DIR": str(self.folder / "runs"),
            "WANDB_MODE": "disabled",
        }

    def new_folder(self, name: str) -> Path:
        """Path for a run's files at which nothing is yet, also when a test is tried again."""
        return self.folder / "runs" / name / str(time.time_ns())

    def run(
        self, recipe: str, *arguments: str, log_dir: Path | None = None, said: str = "", through: tuple[str, ...] = ()
    ) -> Run:
        """`python -m tinker_cookbook.recipes.RECIPE ...` with an input; fails with the end of its output. `through`: a
        module that runs it."""
        command = [PYTHON, "-m", *through, f"tinker_cookbook.recipes.{recipe}", *arguments]
        output, wall_s = self.call(command, said)
        run = Run(log_dir or self.folder, wall_s, output)
        if log_dir is not None:
            self.steps += len(run.metrics)
        return run

    def train(self, recipe: str, *arguments: str) -> Run:
        """A recipe with a log_path, which it finds empty."""
        log_dir = self.new_folder(recipe)
        return self.run(recipe, f"log_path={log_dir}", *arguments, log_dir=log_dir)

    def call(self, command: list[Any], said: str = "") -> tuple[str, float]:
        """Return the output of a command in the working folder, and its seconds. Fails if the command does."""
        began = time.monotonic()
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            input=said,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        wall_s = time.monotonic() - began
        self.spent_s += wall_s
        assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}"
        return done.stdout, wall_s

    def killed(self, recipe: str, *arguments: str, log_dir: Path, after_step: int) -> None:
        """A recipe that is killed once metrics.jsonl has a line of `after_step`."""
        command = [str(PYTHON), "-m", f"tinker_cookbook.recipes.{recipe}", f"log_path={log_dir}", *map(str, arguments)]
        began = time.monotonic()
        with subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            while all(row["step"] < after_step for row in read_jsonl(log_dir / "metrics.jsonl")):
                assert process.poll() is None, f"{recipe} ended before step {after_step}"
                assert time.monotonic() - began < TIMEOUT_S, f"{recipe} did not reach step {after_step}"
                time.sleep(POLL_S)
            process.send_signal(signal.SIGKILL)
        self.spent_s += time.monotonic() - began


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Its whole lines; none where there is no file yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def served(folder: Path) -> dict[str, Path]:
    """Every name that recipes ask for, all of one directory."""
    return dict.fromkeys(MODELS, folder / "model")
