"""Right to the token: what a multi-turn episode with pictures sends to the trainer, against sequences written out.

The real tokenizer, image processor and renderers of the embedded model; the policy answers what it is told to.
"""

import asyncio
import random
from dataclasses import dataclass

import maze
import pytest
import squares
import tinker
from base import Group, Served, renderer_of
from squares import Squares
from teach import TINY_VL
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.message_env import EnvFromMessageEnv
from tinker_cookbook.rl.rollouts import do_group_rollout, do_single_rollout
from tinker_cookbook.rl.types import Trajectory, Transition
from tinker_cookbook.supervised.data import conversation_to_datum

IMAGE = "image"
"""Stands for one picture of 25 tokens."""
IM_START, IM_END, VISION_START, VISION_END = 2023, 2024, 2031, 2032
THINK, THINK_END = 2046, 2047
RED, BLUE = 1151, 1794


@dataclass
class Told(TokenCompleter):
    """Says what it is told, with log probabilities -0.1, -0.2, ... in the order of the whole episode."""

    answers: list[list[int]]
    stop_reason: tinker.StopReason = "stop"
    with_logprobs: bool = True
    num_said: int = 0
    turn: int = 0

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        """The next answer."""
        tokens = self.answers[self.turn]
        logprobs = [-0.1 * (self.num_said + number + 1) for number in range(len(tokens))]
        self.turn += 1
        self.num_said += len(tokens)
        return TokensWithLogprobs(tokens, logprobs if self.with_logprobs else None, self.stop_reason)


def episode(renderer_name: str, policy: Told) -> Trajectory:
    """Two squares, red and blue."""
    renderer = renderer_of(Served("tinker-server/tiny-vl", TINY_VL, renderer_name))
    return asyncio.run(
        do_single_rollout(policy, EnvFromMessageEnv(renderer, red_and_blue(), context_overflow_reward=0.0))
    )


def red_and_blue() -> Squares:
    draw = random.Random(0)
    return Squares(["red", "blue"], [squares.picture(colour, draw) for colour in ("red", "blue")])


def flat(model_input: tinker.ModelInput) -> list[int | str]:
    """Tokens, a picture as one IMAGE."""
    found: list[int | str] = []
    for chunk in model_input.chunks:
        found += chunk.tokens if isinstance(chunk, tinker.EncodedTextChunk) else [IMAGE]
    return found


def column(datum: tinker.Datum, name: str) -> list[float]:
    return [round(value, 4) for value in datum.loss_fn_inputs[name].tolist()]


FIRST = [2023, 872, 198, 2031, IMAGE, 2032, 1628, 1799, 374, 279, 1755, 30, 2024, 198, 2023, 1998, 198]
"""<|im_start|>user<newline><|vision_start|>[picture]<|vision_end|>What colour is the square?<|im_end|> and so on."""
SECOND = [198, 2023, 872, 198, 2031, IMAGE, 2032, 32, 303, 419, 825, 30, 2024, 198, 2023, 1998, 198]
"""The same with "And this one?", after the newline that ends the answer before it."""
FIRST_LENGTH, SECOND_LENGTH = 16 + 25, 16 + 25
THOUGHT = [THINK, 198, 562, 198, THINK_END, 271]
"""<think>ok</think> with newlines."""


def test_a_plain_episode_is_one_datum_in_which_answers_alone_have_weight() -> None:
    trajectory = episode("qwen3_vl_instruct", Told([[RED, IM_END], [BLUE, IM_END]]))
    (datum,) = trajectory_to_data(trajectory, 2.0)
    assert flat(datum.model_input) == [*FIRST, RED, IM_END, *SECOND, BLUE]
    seen = [0.0] * (FIRST_LENGTH - 1)
    between = [0.0] * SECOND_LENGTH
    assert column(datum, "mask") == [*seen, 1, 1, *between, 1, 1]
    assert column(datum, "advantages") == [*seen, 2, 2, *between, 2, 2]
    assert column(datum, "logprobs") == [*seen, -0.1, -0.2, *between, -0.3, -0.4]
    targets = column(datum, "target_tokens")
    assert targets[FIRST_LENGTH - 1 : FIRST_LENGTH + 1] == [RED, IM_END] and targets[-2:] == [BLUE, IM_END]
    assert targets[3 : 3 + 25] == [0] * 25, "a picture is no target"
    assert [transition.reward for transition in trajectory.transitions] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("renderer_name", "opened", "kept"),
    [
        ("qwen3_vl", [], []),
        ("qwen3_5", [THINK, 198], []),
        ("qwen3_5_disable_thinking", [THINK, 271, THINK_END, 271], []),
    ],
)
def test_a_thinking_episode_is_one_datum_a_turn_for_thoughts_are_forgotten(
    renderer_name: str, opened: list[int], kept: list[int]
) -> None:
    answers = [[*THOUGHT, RED, IM_END], [*THOUGHT, BLUE, IM_END]]
    first, second = trajectory_to_data(episode(renderer_name, Told(answers)), 1.0)
    assert flat(first.model_input) == [*FIRST, *opened, *THOUGHT, RED]
    assert flat(second.model_input) == [*FIRST, *kept, RED, IM_END, *SECOND, *opened, *THOUGHT, BLUE]
    for datum, logprobs in ((first, -0.1), (second, -0.9)):
        mask = column(datum, "mask")
        assert mask == [0.0] * (len(mask) - 8) + [1.0] * 8
        assert column(datum, "logprobs")[-8] == logprobs
        assert not any(column(datum, "logprobs")[:-8])


def rows(*turns: tuple[list[int], list[int]]) -> list[tinker.Datum]:
    """The datums of an episode of (observation, answer)."""
    transitions = [
        Transition(
            ob=tinker.ModelInput.from_ints(observation),
            ac=TokensWithLogprobs(answer, [-1.0] * len(answer)),
            reward=0.0,
            episode_done=number == len(turns) - 1,
        )
        for number, (observation, answer) in enumerate(turns)
    ]
    trajectory = Trajectory(transitions=transitions, final_ob=tinker.ModelInput.empty())
    datums: list[tinker.Datum] = trajectory_to_data(trajectory, 1.0)
    return datums


HI, STOP, EOS, HELLO, QUESTION = 11, 12, IM_END, 13, 10


@pytest.mark.parametrize("included", [True, False])
def test_after_a_stop_string_comes_the_end_of_the_turn_which_has_no_weight(included: bool) -> None:
    said = [HI, STOP] if included else [HI]
    (datum,) = rows(([QUESTION], said), ([QUESTION, HI, STOP, EOS, HELLO], [BLUE]))
    assert flat(datum.model_input) == [QUESTION, HI, STOP, EOS, HELLO]
    assert column(datum, "target_tokens") == [HI, STOP, EOS, HELLO, BLUE]
    assert column(datum, "mask") == [1, float(included), 0, 0, 1]
    assert column(datum, "logprobs") == [-1, -float(included), 0, 0, -1]


def test_a_turn_that_does_not_go_on_from_the_last_begins_a_datum() -> None:
    found = rows(([QUESTION], [HI, STOP]), ([QUESTION, HELLO, STOP, EOS], [BLUE]))
    assert [flat(datum.model_input) for datum in found] == [[QUESTION, HI], [QUESTION, HELLO, STOP, EOS]]


def test_samples_without_log_probabilities_are_an_error() -> None:
    trajectory = episode("qwen3_vl_instruct", Told([[RED, IM_END], [BLUE, IM_END]], with_logprobs=False))
    with pytest.raises(ValueError, match="Logprobs are not available"):
        trajectory_to_data(trajectory, 1.0)


def test_an_answer_that_is_cut_off_ends_the_episode() -> None:
    trajectory = episode("qwen3_vl_instruct", Told([[RED, RED, RED]], stop_reason="length"))
    (transition,) = trajectory.transitions
    assert transition.episode_done and transition.reward == 0.0
    assert transition.metrics["stop/max_tokens"] == 1.0
    (datum,) = trajectory_to_data(trajectory, 1.0)
    assert flat(datum.model_input) == [*FIRST, RED, RED]


@pytest.mark.parametrize(("answer", "stop_reason"), [([RED, RED, RED], "length"), ([RED, RED], "stop")])
def test_an_answer_that_is_cut_off_or_has_no_end_is_worth_nothing(
    answer: list[int], stop_reason: tinker.StopReason
) -> None:
    """In the group that a run plays."""
    group = Group(Served("tinker-server/tiny-vl", TINY_VL), lambda _: red_and_blue(), seed=0, size=1, max_tokens=3)
    played = asyncio.run(do_group_rollout(group, Told([answer], stop_reason)))
    (trajectory,) = played.trajectories_G
    assert [(one.reward, one.episode_done) for one in trajectory.transitions] == [(0.0, True)]
    assert played.get_total_rewards() == [0.0]


@pytest.mark.parametrize("task", [squares.warm_start, maze.warm_start])
def test_the_warm_start_is_rendered_as_what_is_sampled(task: object) -> None:
    renderer = renderer_of(Served("tinker-server/tiny-vl", TINY_VL))
    messages = task(3)  # type: ignore[operator]
    for turn in range(len(messages) // 2):
        last, whole = TrainOnWhat.LAST_ASSISTANT_MESSAGE, "none"  # whole weights: each 1
        datum = conversation_to_datum(messages[: 2 * turn + 2], renderer, None, last, whole)
        sampled_from = renderer.build_generation_prompt(messages[: 2 * turn + 1])
        answer = renderer.tokenizer.encode(messages[2 * turn + 1]["content"], add_special_tokens=False)
        assert flat(datum.model_input) == [*flat(sampled_from), *answer]
        assert sum(column(datum, "weights")) == len(answer) + 1


def test_validation_episodes_are_always_the_same_and_training_episodes_are_not() -> None:
    assert maze.maze(5) == maze.maze(5) and maze.maze(5) != maze.maze(6)
    assert squares.squares(5).colours == squares.squares(5).colours
