"""Whole episodes of geometry: the picture first, then turns that are right only by what the tool has said.

The real tokenizer, image processor, renderer and rollout; the policy reads the feedback in its own prompt.
"""

import asyncio
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tinker
from base import Group, Served, renderer_of
from geometry import LARGEST, MAX_TURNS, TOOL, geometry_task
from prepare import rows, write
from teach import TINY_VL
from test_tokens import IMAGE, column, flat
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import Trajectory

SERVED = Served("tinker-server/tiny-vl", TINY_VL)
POSSIBLE = sorted({columns * rows for columns in range(1, LARGEST + 1) for rows in range(1, LARGEST + 1)})
_FEEDBACK = re.compile(r"the answer \d+ is too (small|large)|(score 1\.0)")


@dataclass
class Asking(TokenCompleter):
    """Sees nothing: it asks for `guesses` in turn, then boxes the likeliest answer that the tool's words leave."""

    guesses: list[int]
    hears: bool = True
    prompts: list[tinker.ModelInput] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        """The next turn, as tokens that end it."""
        turn = len(self.prompts)
        self.prompts.append(model_input)
        tokenizer = renderer_of(SERVED).tokenizer
        words = tokenizer.decode([token for token in flat(model_input) if token != IMAGE])
        said = call(self.guesses[turn]) if turn < len(self.guesses) else f"\\boxed{{{self._left(words)}}}"
        tokens = tokenizer.encode(f"{said}<|im_end|>", add_special_tokens=False)
        self.answers.append(tokens)
        return TokensWithLogprobs(tokens, [-0.5] * len(tokens), "stop")

    def _left(self, words: str) -> int:
        """The middle one of the answers that are left."""
        left = POSSIBLE
        heard = _FEEDBACK.findall(words) if self.hears else []
        for asked, (order, right) in zip(self.guesses, heard, strict=False):
            if right:
                return asked
            left = [one for one in left if (one > asked if order == "small" else one < asked)]
        return left[len(left) // 2]


def call(answer: int) -> str:
    arguments = json.dumps({"answer": str(answer)})
    return f'\n<tool_call>\n{{"name": "{TOOL}", "arguments": {arguments}}}\n</tool_call>'


def episode(folder: Path, truth: int, policy: Asking) -> tuple[Trajectory, float]:
    """Play the question whose answer is `truth`, and return it with its whole reward."""
    row = next(one for one in rows(200, 0) if one["reward_spec"]["ground_truth"] == str(truth))
    write(folder / "train.jsonl", [row])
    group = Group(SERVED, geometry_task(folder / "train.jsonl"), seed=0, size=1, max_tokens=48)
    played = asyncio.run(do_group_rollout(group, policy))
    return played.trajectories_G[0], played.get_total_rewards()[0]


@pytest.mark.parametrize("truth", POSSIBLE)
def test_two_questions_to_the_tool_find_the_answer_that_a_guess_does_not(tmp_path: Path, truth: int) -> None:
    """Asked 3 and 6, the tool leaves 1 or 2, 4, or 9 of the six answers, or has named the right one."""
    policy = Asking([3, 6])
    trajectory, reward = episode(tmp_path, truth, policy)
    assert len(trajectory.transitions) == MAX_TURNS
    assert [one.reward for one in trajectory.transitions] == [0.0, 0.0, reward]
    assert reward == float(truth != 1), "1 and 2 are left, and 2 is boxed"
    _, deaf = episode(tmp_path, truth, Asking([3, 6], hears=False))
    assert deaf == float(truth == 4), "without its words the middle of all six"


def test_each_prompt_goes_on_from_the_last_turn_and_the_picture_is_shown_once(tmp_path: Path) -> None:
    policy = Asking([3, 6])
    trajectory, reward = episode(tmp_path, 9, policy)
    prompts = [flat(one) for one in policy.prompts]
    for number in range(MAX_TURNS - 1):
        before = [*prompts[number], *policy.answers[number]]
        assert prompts[number + 1][: len(before)] == before
        said = renderer_of(SERVED).tokenizer.decode(prompts[number + 1][len(before) :])
        assert f"the answer {(3, 6)[number]} is too small" in said
    (datum,) = trajectory_to_data(trajectory, 2.0)
    assert flat(datum.model_input).count(IMAGE) == 1 and flat(datum.model_input)[4] == IMAGE
    sampled = sum(map(len, policy.answers))
    assert sum(column(datum, "mask")) == sampled, "neither the question nor what the tool says is learned"
    assert sum(column(datum, "advantages")) == 2.0 * sampled
    assert reward == 1.0
