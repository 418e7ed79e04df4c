"""Each of these changes of the examples makes their training meaningless, and must fail the test that is named.

A change is made in a copy of this folder, where the one test runs in a fork, which need not import the cookbook again.
"""

import multiprocessing
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 120


@dataclass(frozen=True)
class Mutation:
    """A text of a file, its replacement, and the test that notices it."""

    file: str
    old: str
    new: str
    test: str


MUTATIONS = {
    "the maze's reward is a constant": Mutation(
        "maze.py",
        "reward=TASK_REWARD * reached + FORMAT_REWARD * formed,",
        "reward=FORMAT_REWARD,",
        "test_maze.py::test_the_goal_gives_the_whole_reward",
    ),
    "the player never moves": Mutation(
        "maze.py",
        "self.place = self.place.after(found[1])",
        "self.place.after(found[1])",
        "test_maze.py::test_each_picture_shows_the_player_where_the_move_has_led",
    ),
    "validation rows are drawn from the seed of training": Mutation(
        "prepare.py",
        "rows(args.validation, VALIDATION_SEED)",
        "rows(args.validation, args.seed)",
        "test_records.py::test_validation_rows_are_the_same_for_every_seed_of_training",
    ),
    "held-out episodes are drawn from the run's seed": Mutation(
        "teach.py",
        "return training, held_out(task, self.served, options.records, options.validation_groups)",
        "found = held_out(task, self.served, options.records, options.validation_groups)\n"
        "        return training, Episodes(**{**vars(found), 'seed': options.seed})",
        "test_teach.py::test_held_out_episodes_are_the_same_in_every_run_and_in_no_training",
    ),
    "the second square is rewarded for the first one's colour": Mutation(
        "squares.py",
        "== self.colours[self.turn]",
        "== self.colours[0]",
        "test_squares.py::test_each_turn_is_rewarded_for_its_own_square",
    ),
    "the tool says the same of every answer": Mutation(
        "geometry.py",
        'return "too small" if float(answer) < float(truth) else "too large"',
        'return "too small"',
        "test_feedback.py::test_two_questions_to_the_tool_find_the_answer_that_a_guess_does_not",
    ),
    "what the tool says is not in the next prompt": Mutation(
        "geometry.py",
        "self.messages = [*self.messages, *(self._feedback(call) for call in calls)]",
        "[self._feedback(call) for call in calls]",
        "test_feedback.py::test_each_prompt_goes_on_from_the_last_turn_and_the_picture_is_shown_once",
    ),
    "an answer that is cut off is rewarded": Mutation(
        "base.py",
        "BAD_ANSWER_REWARD = 0.0",
        "BAD_ANSWER_REWARD = 1.0",
        "test_tokens.py::test_an_answer_that_is_cut_off_or_has_no_end_is_worth_nothing",
    ),
    "answers are equal that differ by less than one": Mutation(
        "geometry.py",
        "abs(float(answer) - float(truth)) < 1e-6",
        "abs(float(answer) - float(truth)) < 1",
        "test_records.py::test_answers_are_compared_as_numbers",
    ),
    "the first of several boxes is the answer": Mutation(
        "geometry.py",
        "same(boxed[-1], self._truth)",
        "same(boxed[0], self._truth)",
        "test_records.py::test_the_last_of_several_boxes_is_the_answer",
    ),
    "the tool tells the answer": Mutation(
        "geometry.py",
        "is {_fault(answer, self._truth)}; try again",
        "is {_fault(answer, self._truth)}; try {self._truth}",
        "test_records.py::test_the_tools_words_help_with_the_next_answer_and_do_not_tell_it",
    ),
    "the warm start of the maze never moves the player": Mutation(
        "maze.py",
        "        place = place.after(move)\n    return messages",
        "    return messages",
        "test_maze.py::test_each_picture_of_the_warm_start_shows_where_the_moves_before_it_have_led",
    ),
    "the warm start weighs all answers": Mutation(
        "teach.py",
        "TrainOnWhat.LAST_ASSISTANT_MESSAGE",
        "TrainOnWhat.ALL_ASSISTANT_MESSAGES",
        "test_teach.py::test_a_datum_of_the_warm_start_weighs_its_last_answer_alone",
    ),
    "saved weights are measured on other episodes than a run validates on": Mutation(
        "evaluate_policy.py",
        "options.episodes).get_batch(0)",
        "options.episodes).get_batch(1)",
        "test_teach.py::test_a_policy_is_measured_on_the_episodes_that_a_run_validates_on",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_fails_the_test_that_is_named(tmp_path: Path, name: str) -> None:
    mutation = MUTATIONS[name]
    # teach.py finds the embedded model two folders above its own.
    folder = tmp_path / "examples" / HERE.name
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tinker_server").symlink_to(HERE.parents[1] / "tinker_server")
    path = folder / mutation.file
    source = path.read_text()
    assert source.count(mutation.old) == 1, "the mutation no longer fits the source"
    path.write_text(source.replace(mutation.old, mutation.new))
    fork = multiprocessing.get_context("fork").Process(target=run, args=(folder, mutation.test, tmp_path / "said"))
    fork.start()
    fork.join(TIMEOUT_S)
    fork.kill()
    said = (tmp_path / "said").read_text()
    assert fork.exitcode == pytest.ExitCode.TESTS_FAILED and "AssertionError" in said, said[-2000:]


def run(folder: Path, test: str, said: Path) -> None:
    """Run a test of another copy of this folder in this process, and end with pytest's exit code."""
    sys.stdout = sys.stderr = said.open("w")
    for name in {one.stem for one in HERE.glob("*.py")}:
        sys.modules.pop(name, None)
    sys.path[:] = [one for one in sys.path if Path(one).resolve() != HERE]
    code = pytest.main(["-x", "-p", "no:cacheprovider", "-c", str(folder / "pytest.ini"), str(folder / test)])
    sys.stdout.flush()
    os._exit(code)
