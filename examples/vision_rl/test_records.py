"""Records in the shape of Geometry-3K, and the environment that asks them."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from base import Served, renderer_of
from geometry import INSTRUCTIONS, TOOL, GeometryEnv, figure, geometry_task, instructed, same, warm_start
from PIL import Image
from prepare import main, rows, write
from records import BadRecord, Record, make_row, parse, read_records
from teach import TINY_VL
from test_tokens import flat
from tinker_cookbook.renderers.base import ToolCall
from tinker_cookbook.rl.message_env import MessageStepResult

SOME = [make_row(*figure(1)[:2], "geometry3k", figure(1)[2]), make_row(None, "No picture.", "geometry3k", "2")]


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl"])
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, SOME)
    first, stub = read_records(tmp_path / name)
    image, text = first.messages[0]["content"]
    assert image["type"] == "image" and image["image"].size == (160, 160)
    assert text == {"type": "text", "text": figure(1)[1]}
    assert (first.env_class, first.method, first.ground_truth) == ("geometry3k", "rule", figure(1)[2])
    assert stub.messages == [{"role": "user", "content": [{"type": "text", "text": "No picture."}]}]


def test_a_prompt_may_hold_several_pictures_and_messages() -> None:
    row = json.loads(json.dumps(SOME[0]))
    row["prompt"][0]["content"].append(row["prompt"][0]["content"][0])
    row["prompt"].insert(0, {"role": "system", "content": "Be brief."})
    system, user = parse(row, "row").messages
    assert system == {"role": "system", "content": "Be brief."}
    assert [part["type"] for part in user["content"]] == ["image", "text", "image"]


def changed(**values: Any) -> dict[str, Any]:
    return {**SOME[1], **values}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ([], "row 0: a record is an object"),
        ({"prompt": SOME[1]["prompt"]}, "row 0: it has prompt, env_class and, for most, reward_spec"),
        (changed(reward_spec={"method": "rule"}), "reward_spec has method and ground_truth"),
        (changed(reward_spec={"method": "rule", "ground_truth": 2}), "ground_truth is a text"),
        (changed(prompt=[]), "prompt is a list of messages"),
        (changed(prompt=[{"role": "judge", "content": "x"}]), r"prompt\[0\]: role is one of system, user, assistant"),
        (changed(prompt=[{"role": "user", "content": [{"type": "image"}]}]), r"content\[0\]: a part is"),
        (
            changed(
                prompt=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.jpg"}}]}]
            ),
            "image_url.url is a data URI in base64",
        ),
        (
            changed(
                prompt=[
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,AAAA"}}],
                    }
                ]
            ),
            "the picture does not decode",
        ),
    ],
)
def test_another_shape_is_refused_where_it_differs(tmp_path: Path, row: Any, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(BadRecord, match=text):
        read_records(path)


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl"])
def test_records_of_other_programs_are_read_whatever_else_they_hold(tmp_path: Path, name: str) -> None:
    """As the preparation scripts of SkyRL's Geometry-3K and VisGym write them."""
    extra = {"split": "train", "index": 7, "answer": "2"}
    geometry = {**SOME[0], "data_source": "hiyouga/geometry3k", "extra_info": extra}
    geometry["reward_spec"] = {**geometry["reward_spec"], "style": "rule"}
    stub = {"prompt": [{"role": "user", "content": "placeholder"}], "env_class": "visgym"}
    write(tmp_path / name, [geometry])
    write(tmp_path / f"stub-{name}", [{**stub, "visgym_env_id": "maze_2d/easy", "seed": 3}])
    (read,) = read_records(tmp_path / name)
    assert (read.method, read.ground_truth) == ("rule", figure(1)[2])
    (read,) = read_records(tmp_path / f"stub-{name}")
    assert read == Record([{"role": "user", "content": "placeholder"}], "visgym", None, None)
    geometry_task(tmp_path / name)
    with pytest.raises(BadRecord, match=f"stub-{name} row 0: it has no reward_spec"):
        geometry_task(tmp_path / f"stub-{name}")


def test_validation_rows_are_the_same_for_every_seed_of_training(tmp_path: Path) -> None:
    for seed in (0, 1):
        main([str(tmp_path / str(seed)), "--train", "8", "--validation", "5", "--seed", str(seed), "--format", "jsonl"])
    validation, other_validation = ((tmp_path / seed / "validation.jsonl").read_text() for seed in "01")
    training, other_training = (set((tmp_path / seed / "train.jsonl").read_text().splitlines()) for seed in "01")
    assert validation == other_validation and len(validation.splitlines()) == 5
    assert len(training) == 8 and training.isdisjoint(other_training)
    assert training.isdisjoint(validation.splitlines())


def png(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), colour).save(file, "PNG")
    return file.getvalue()


def published(problem: str, *images: bytes, answer: str = "2 \\sqrt { 221 }") -> dict[str, Any]:
    """Return a row with all the columns of the published file."""
    pictures = [{"bytes": image, "path": None} for image in images]
    choices = ["15", "27", answer, "32"]
    return {"images": pictures, "problem": problem, "answer": answer, "id": 7, "choices": choices, "ground_truth": "C"}


def test_the_published_file_is_read_with_pictures_where_its_text_has_them(tmp_path: Path) -> None:
    given = [
        published("<image>Find x.", png("red")),
        published("Compare <image> and <image>.", png("red"), png("blue"), answer="12"),
    ]
    write(tmp_path / "train.parquet", given)
    first, second = read_records(tmp_path / "train.parquet")
    (message,) = first.messages
    image, text = message["content"]
    assert image["image"].size == (40, 30) and image["image"].getpixel((1, 1)) == (255, 0, 0)
    assert text == {"type": "text", "text": "Find x."}
    assert (first.env_class, first.ground_truth) == ("geometry3k", "2 \\sqrt { 221 }")
    parts = second.messages[0]["content"]
    shown = [part["text"] if part["type"] == "text" else part["image"].getpixel((1, 1)) for part in parts]
    assert shown == ["Compare", (255, 0, 0), "and", (0, 0, 255), "."]
    asked = asyncio.run(geometry_task(tmp_path / "train.parquet")(1).initial_observation())
    assert asked[-1]["content"][-1]["text"] == INSTRUCTIONS


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (published("Find x.", b"x"), "the problem has <image> once for each of its 1 images"),
        (published("<image>Find x.", b"no picture"), "the picture does not decode"),
        ({**published("<image>"), "images": [{"path": "a.png"}]}, r"images\[0\] has the bytes"),
        ({**published("x"), "answer": 3}, "problem and answer are texts"),
        ({**published("x"), "images": None}, "images is a list"),
    ],
)
def test_a_published_row_that_is_damaged_is_refused(row: Any, text: str) -> None:
    with pytest.raises(BadRecord, match=text):
        parse(row, "row")


def test_a_question_that_names_the_box_is_asked_as_it_is() -> None:
    record = parse(SOME[0], "row")
    assert instructed(record) is record


def call(answer: str) -> ToolCall:
    return ToolCall(function=ToolCall.FunctionBody(name="calc_score", arguments=json.dumps({"answer": answer})))


def played(*answers: Any) -> list[MessageStepResult]:
    env = GeometryEnv(parse(SOME[1], "row"))

    async def play() -> list[MessageStepResult]:
        await env.initial_observation()
        return [await env.step(answer) for answer in answers]

    return asyncio.run(play())


ASK = {"role": "assistant", "content": "", "tool_calls": [call("5")]}
BOX = {"role": "assistant", "content": "So \\boxed{2}"}


def test_the_tool_answers_with_text_and_a_right_box_is_rewarded() -> None:
    asked, boxed = played(ASK, BOX)
    assert (asked.reward, asked.episode_done) == (0.0, False)
    assert asked.next_messages[-1]["role"] == "tool" and "score 0.0" in asked.next_messages[-1]["content"]
    assert (boxed.reward, boxed.episode_done) == (1.0, True)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("1", "score 0.0: the answer 1 is too small; try again"),
        ("5", "score 0.0: the answer 5 is too large; try again"),
        ("many", "score 0.0: the answer many is wrong; try again"),
        ("2", "score 1.0: give this answer in the box"),
    ],
)
def test_the_tools_words_help_with_the_next_answer_and_do_not_tell_it(answer: str, said: str) -> None:
    (asked,) = played({"role": "assistant", "content": "", "tool_calls": [call(answer)]})
    assert asked.next_messages[-1]["content"] == said and asked.reward == 0.0


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        ("calc_scores", "{}", "there is no tool calc_scores; use calc_score"),
        ("calc_score", "12", 'calc_score takes {"answer": "..."}'),
        ("calc_score", '{"answer":', 'calc_score takes {"answer": "..."}'),
        ("calc_score", "{}", 'calc_score takes {"answer": "..."}'),
    ],
)
def test_a_wrong_call_is_answered_and_the_episode_goes_on(function: str, arguments: str, said: str) -> None:
    wrong = ToolCall(function=ToolCall.FunctionBody(name=function, arguments=arguments))
    asked, boxed = played({"role": "assistant", "content": "", "tool_calls": [wrong]}, BOX)
    assert asked.next_messages[-1]["content"] == said
    assert boxed.reward == 1.0 and boxed.metrics["turns"] == 2.0


def test_what_the_tool_says_stands_in_the_next_prompt_behind_the_picture(tmp_path: Path) -> None:
    """As tokens: the second prompt goes on from the first with what was sampled, then with the tool's words."""
    write(tmp_path / "train.parquet", rows(1, 0))
    env = geometry_task(tmp_path / "train.parquet")(0)
    renderer = renderer_of(Served("tinker-server/tiny-vl", TINY_VL))
    first = renderer.build_generation_prompt(asyncio.run(env.initial_observation()))
    sampled = renderer.tokenizer.encode(
        f'\n<tool_call>\n{{"name": "{TOOL}", "arguments": {{"answer": "0"}}}}\n</tool_call>'
    )
    sampled.append(renderer.tokenizer.convert_tokens_to_ids("<|im_end|>"))
    message, _ = renderer.parse_response(sampled)
    step = asyncio.run(env.step(message))
    assert not step.episode_done
    second = flat(renderer.build_generation_prompt(step.next_messages))
    before = [*flat(first), *sampled]
    assert second[: len(before)] == before
    said = renderer.tokenizer.decode(second[len(before) :])
    assert "the answer 0 is too small" in said and said.endswith("<|im_start|>assistant\n")


def test_there_are_three_turns_and_no_more() -> None:
    assert [step.episode_done for step in played(ASK, ASK, ASK)] == [False, False, True]
    assert played(ASK, ASK, BOX)[-1].reward == 1.0


def test_a_wrong_box_or_none_ends_the_episode_without_a_reward() -> None:
    for content in ("\\boxed{3}", "2"):
        (step,) = played({"role": "assistant", "content": content})
        assert (step.reward, step.episode_done) == (0.0, True)


def test_answers_are_compared_as_numbers() -> None:
    assert same("12.0", "12") and same("12.0000001", "12") and same(" Yes", "yes")
    for answer in ("1", "11", "13", "11.5", "12.001", "-12"):
        assert not same(answer, "12")


def test_the_last_of_several_boxes_is_the_answer() -> None:
    for content, reward in (("\\boxed{3}, no: \\boxed{2}", 1.0), ("\\boxed{2}, no: \\boxed{3}", 0.0)):
        (step,) = played({"role": "assistant", "content": content})
        assert (step.reward, step.episode_done) == (reward, True)


@pytest.mark.parametrize(
    ("answer", "truth", "equal"),
    [
        ("2\\sqrt{221}", "2 \\sqrt { 221 }", True),
        ("\\sqrt{884}", "2 \\sqrt { 221 }", True),
        ("\\frac{1}{2}", "0.5", True),
        ("2\\sqrt{220}", "2 \\sqrt { 221 }", False),
        ("\\frac{1}{3}", "0.5", False),
        ("1" * 200 + "+1", "12", False),
    ],
)
def test_answers_are_compared_as_mathematics(answer: str, truth: str, equal: bool) -> None:
    assert same(answer, truth) is equal
    env = GeometryEnv(Record([], "geometry3k", "rule", truth))
    step = asyncio.run(env.step({"role": "assistant", "content": f"So \\boxed{{{answer}}}"}))
    assert step.reward == float(equal)


def test_a_file_of_records_is_a_task_and_its_conversations_are_rendered(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", rows(4, 0))
    env = geometry_task(tmp_path / "train.parquet")(3)
    renderer = renderer_of(Served("tinker-server/tiny-vl", TINY_VL))
    prompt = renderer.build_generation_prompt(asyncio.run(env.initial_observation()))
    assert prompt.length > 60
    assert isinstance(env.record.messages[0]["content"][0]["image"], Image.Image)
    for seed in range(6):
        messages = warm_start(seed)
        assert messages[-1]["role"] == "assistant" and renderer.build_generation_prompt(messages[:-1]).length > 60


def test_the_warm_start_teaches_the_form_and_not_the_answer() -> None:
    """Whoever answers at once is right by chance; whoever asks first, more often."""
    right: dict[int, list[bool]] = {0: [], 1: [], 2: []}
    for seed in range(600):
        _, *turns, box = warm_start(seed)
        calls, answers = turns[::2], turns[1::2]
        assert [one["role"] for one in answers] == ["tool"] * len(calls)
        right[len(calls)].append(box["content"] == f"\\boxed{{{figure(seed)[2]}}}")
    at_once, asked, asked_twice = (sum(one) / len(one) for one in right.values())
    assert min(map(len, right.values())) > 150
    assert at_once < 0.27 and at_once + 0.15 < asked and asked + 0.15 < asked_twice
