"""Steps of teach.py before RL begins."""

import asyncio
from pathlib import Path

import chz
import pytest
from base import Episodes, Served
from prepare import write
from records import make_row
from teach import TASKS, TINY_VL, Data, Options, chosen, warm_state
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


def data(task_name: str, **values: object) -> tuple[Episodes, Episodes]:
    options = chz.entrypoint(Options, argv=["log_path=x", *(f"{name}={value}" for name, value in values.items())])
    served = Served("tinker-server/tiny-vl", TINY_VL)
    return asyncio.run(Data(options=options, task_name=task_name, served=served)())


def seeds(episodes: Episodes) -> list[int]:
    return [group.seed for index in range(len(episodes)) for group in episodes.get_batch(index)]


@pytest.mark.parametrize("task_name", ["squares", "maze"])
def test_held_out_episodes_are_the_same_in_every_run_and_in_no_training(task_name: str) -> None:
    (training, held_out), (other_training, other_held_out) = (data(task_name, seed=seed) for seed in (0, 1))
    assert seeds(held_out) == seeds(other_held_out)
    assert len(set(seeds(held_out))) == 128, "each is another episode"
    found, others = set(seeds(training)), set(seeds(other_training))
    assert len(found) == len(training) * TASKS[task_name].batch_size
    assert found.isdisjoint(others) and found.isdisjoint(seeds(held_out))


def test_a_run_that_is_resumed_has_the_batches_that_it_would_have_had() -> None:
    first, again = data("maze", seed=3)[0], data("maze", seed=3)[0]
    assert [group.seed for group in first.get_batch(7)] == [group.seed for group in again.get_batch(7)]


def test_a_group_plays_one_episode_several_times() -> None:
    group = data("maze")[0].get_batch(0)[0]
    envs = asyncio.run(group.make_envs())
    places = [env.message_env.place for env in envs]
    assert len(places) == 8 and len({(one.walls, one.player, one.goal) for one in places}) == 1


def test_held_out_questions_come_from_the_file_beside_that_of_training(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [make_row(None, "training", "geometry3k", "1")])
    write(tmp_path / "validation.jsonl", [make_row(None, "held out", "geometry3k", "1")])
    asked = []
    for episodes in data("geometry", records=tmp_path / "train.jsonl"):
        (env, *_) = asyncio.run(episodes.get_batch(0)[0].make_envs())
        asked.append(env.message_env.record.messages[0]["content"][0]["text"])
    assert asked == ["training", "held out"]
