"""Steps of teach.py before RL begins."""

import asyncio
import random
from collections import Counter
from pathlib import Path

import chz
import evaluate_policy
import numpy as np
import pytest
import tinker
from base import Episodes, Served, renderer_of
from prepare import write
from records import make_row
from teach import TASKS, TINY_VL, Data, Options, chosen, one_turn, warm_state
from test_tokens import IM_END, RED, column
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


@pytest.mark.parametrize("task_name", TASKS)
def test_a_datum_of_the_warm_start_weighs_its_last_answer_alone(task_name: str) -> None:
    """Each answer of a conversation is the last one of some datum."""
    renderer = renderer_of(Served("tinker-server/tiny-vl", TINY_VL))
    messages = next(
        found for found in map(TASKS[task_name].warm_start, range(100)) if len(found) > 3 or task_name == "squares"
    )
    draw, seen = random.Random(0), Counter[int]()
    for _ in range(30):
        datum = one_turn(messages, renderer, draw)
        weights, targets = (column(datum, name) for name in ("weights", "target_tokens"))
        learned = [int(target) for target, weight in zip(targets, weights, strict=True) if weight]
        assert len(targets) - 1 == weights.index(max(weights)) + len(learned) - 1, "the last tokens, and no others"
        words = renderer.tokenizer.decode(learned)
        fitting = [turn for turn in range(1, len(messages), 2) if said(messages[turn]) in words]
        assert words.count("<|im_end|>") == 1 and fitting
        seen.update(fitting)
    assert set(seen) == set(range(1, len(messages), 2))


def said(message: dict[str, object]) -> str:
    """Words that stand in an answer alone: its text, or the arguments of its call."""
    calls = message.get("tool_calls")
    return calls[0].function.arguments if isinstance(calls, list) else str(message["content"])


class AlwaysRed:
    """A server whose model answers "red" to every prompt."""

    def __init__(self, base_url: str | None) -> None:
        self.base_url = base_url

    async def create_sampling_client(self, *_: object) -> "AlwaysRed":
        return self

    async def sample(self, **_: object) -> tinker.SampleResponse:
        tokens, logprobs = np.array([RED, IM_END]), np.array([-0.1, -0.1])
        answer = tinker.SampledSequence("stop", "one", tokens_np=tokens, logprobs_np=logprobs)
        return tinker.SampleResponse(sequences=[answer])


def test_a_policy_is_measured_on_the_episodes_that_a_run_validates_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reward is that of the colours which these show."""
    monkeypatch.setattr(tinker, "ServiceClient", AlwaysRed)
    options = chz.entrypoint(evaluate_policy.Options, argv=["weights=tinker://run/sampler_weights/w"])
    found = asyncio.run(evaluate_policy.evaluate("squares", options))
    (_, held_out) = data("squares", seed=4)
    shown = [TASKS["squares"].env(seed).colours for seed in seeds(held_out)]
    assert found["episodes"] == len(shown) == 128 and found["turns"] == 2
    right = [sum(colours[turn] == "red" for colours in shown) / 128 for turn in range(2)]
    assert [found["right_1"], found["right_2"]] == pytest.approx(right)
    assert found["reward"] == pytest.approx(sum(right) / 2)
