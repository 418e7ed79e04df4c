"""Steps of teach.py before RL begins."""

from pathlib import Path

import chz
from base import Served
from teach import TASKS, TINY_VL, Options, chosen, warm_state
from tinker_cookbook.tokenizer_utils import get_tokenizer


def test_a_run_that_is_resumed_takes_the_warm_start_that_it_noted(tmp_path: Path) -> None:
    (tmp_path / "warm").mkdir()
    (tmp_path / "warm" / "state.txt").write_text("tinker://run:train:0/weights/warm")
    nobody = chz.entrypoint(Options, argv=[f"log_path={tmp_path}", "base_url=http://127.0.0.1:9"])
    served = Served("tinker-server/tiny-vl", TINY_VL)
    assert warm_state(TASKS["maze"], nobody, served) == "tinker://run:train:0/weights/warm"
    assert get_tokenizer(served.name).encode("red")  # RL asks for it by the name of the served model


def test_the_command_line_goes_before_a_tasks_own_settings() -> None:
    task = TASKS["maze"]
    options = chz.entrypoint(Options, argv=["log_path=x", "rl_steps=3", "warm_until=0.0"])
    assert (chosen(options, task, "rl_steps"), chosen(options, task, "warm_until")) == (3, 0.0)
    assert chosen(options, task, "rl_rate") == task.rl_rate
