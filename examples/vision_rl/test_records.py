"""Records in the shape of Geometry-3K, and the environment that asks them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from base import Served, renderer_of
from geometry import GeometryEnv, figure, geometry_task, same, warm_start
from PIL import Image
from prepare import rows, write
from records import BadRecord, make_row, parse, read_records
from teach import TINY_VL
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
        (changed(answer="2"), "row 0: it has prompt, env_class and reward_spec"),
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


def test_validation_rows_are_the_same_for_every_seed_of_training() -> None:
    assert rows(3, 1) == rows(3, 1) and rows(3, 1) != rows(3, 2)


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


def test_there_are_three_turns_and_no_more() -> None:
    assert [step.episode_done for step in played(ASK, ASK, ASK)] == [False, False, True]
    assert played(ASK, ASK, BOX)[-1].reward == 1.0


def test_a_wrong_box_or_none_ends_the_episode_without_a_reward() -> None:
    for content in ("\\boxed{3}", "2"):
        (step,) = played({"role": "assistant", "content": content})
        assert (step.reward, step.episode_done) == (0.0, True)


def test_answers_are_compared_as_numbers() -> None:
    assert same("12.0", "12") and same(" Yes", "yes") and not same("1", "12")


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
