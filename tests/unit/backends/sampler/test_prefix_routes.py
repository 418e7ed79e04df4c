"""Requests with the same beginning go to the same engine, unless it is clearly busier."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.factories import as_text, image, photo, prompt, words
from tinker_server.api_schemas.inputs import ImageChunk, ModelInput
from tinker_server.api_schemas.sampling import SamplingParams
from tinker_server.backends.protocol import ChatTask, SamplingTask
from tinker_server.backends.sampler import prefix_routes
from tinker_server.backends.sampler.prefix_routes import (
    BLOCK_TOKENS,
    SLACK_TOKENS,
    WORTH,
    Piece,
    PrefixRoutes,
    chat_pieces,
    task_pieces,
    task_tokens,
)

IDLE = {0: 0, 1: 0, 2: 0}


def task(model_input: ModelInput, owner: str = "one", weights: Path | None = None, max_tokens: int = 8) -> SamplingTask:
    return SamplingTask(model_input, SamplingParams(max_tokens=max_tokens), 2, weights, owner)


def text(seed: int, length: int) -> ModelInput:
    chunk = words(1)
    tokens = np.random.default_rng(seed).integers(0, 300, length)
    return prompt(chunk.model_copy(update={"tokens": tokens}))


def chat(*contents: object, owner: str = "one") -> ChatTask:
    messages = [{"role": "user", "content": content} for content in contents]
    return ChatTask("chat_completions", {"messages": messages}, None, owner)


def test_a_new_prompt_goes_to_the_engine_with_the_fewest_waiting_tokens_and_the_same_prompt_follows_it() -> None:
    routes = PrefixRoutes()
    first = task_pieces(task(text(1, 30)))
    assert routes.choose(first, {0: 500, 1: 400, 2: 400}) == 1
    assert routes.choose(task_pieces(task(text(2, 30))), {0: 500, 1: 400, 2: 300}) == 2
    assert routes.choose(first, {0: 0, 1: SLACK_TOKENS, 2: 0}) == 1


def test_an_engine_that_is_clearly_busier_is_left_and_the_prompt_stays_where_it_went() -> None:
    routes, pieces = PrefixRoutes(), task_pieces(task(text(1, 30)))
    assert routes.choose(pieces, {0: 0, 1: 1, 2: 1}) == 0
    assert routes.choose(pieces, {0: SLACK_TOKENS + 11, 1: 10, 2: 20}) == 1
    assert routes.choose(pieces, IDLE) == 1


def test_a_long_known_beginning_is_worth_waiting_for() -> None:
    routes, pieces = PrefixRoutes(), task_pieces(task(text(1, 40 * BLOCK_TOKENS)))
    routes.choose(pieces, IDLE)
    worth = WORTH * 40 * BLOCK_TOKENS
    assert routes.choose(pieces, {0: worth, 1: 0}) == 0
    assert routes.choose(pieces, {0: worth + 1, 1: 0}) == 1


def test_prompts_that_share_a_beginning_with_an_image_go_together_and_others_do_not() -> None:
    routes = PrefixRoutes()
    beginning, picture = text(1, 200).chunks[0], image(64, 96, 1)
    routes.choose(task_pieces(task(prompt(beginning, picture, words(3, 1)))), {0: 9, 1: 0})
    assert routes.choose(task_pieces(task(prompt(beginning, picture, words(3, 2)))), IDLE) == 1
    assert routes.choose(task_pieces(task(prompt(beginning, image(64, 96, 2)))), {0: 9, 1: SLACK_TOKENS, 2: 0}) == 1
    other = task_pieces(task(prompt(text(5, 200).chunks[0], picture)))
    assert routes.choose(other, IDLE) == 0


def test_images_that_differ_are_told_apart_by_their_ends() -> None:
    """Also files of one length."""
    first, second = (raw_picture(seed) for seed in (1, 2))
    assert len(first.data) == len(second.data)
    assert len({task_pieces(task(prompt(one)))[0].digest for one in (first, second, raw_picture(1))}) == 2
    head, tail = (b"a", b"b"), (b"c", b"d")
    ends = [ImageChunk(data=one + bytes(10_000) + other, format="png") for one in head for other in tail]
    assert len({task_pieces(task(prompt(one)))[0].digest for one in ends}) == 4


def raw_picture(seed: int) -> ImageChunk:
    """A PNG that is not compressed: its length is that of any picture of its size."""
    buffer = io.BytesIO()
    Image.open(io.BytesIO(photo(64, 96, seed))).save(buffer, "png", compress_level=0)
    return ImageChunk(data=buffer.getvalue(), format="png")


def test_a_prompt_whose_first_piece_is_forgotten_is_a_new_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its later pieces alone say nothing: a prefix cache ends at the first block that it does not have."""
    monkeypatch.setattr(prefix_routes, "_REMEMBERED_PIECES", 4)
    routes, pieces = PrefixRoutes(), [Piece(1, BLOCK_TOKENS), Piece(2, BLOCK_TOKENS)]
    assert routes.choose(pieces, {0: 9, 1: 0}) == 1
    routes.choose([Piece(number, 1) for number in (3, 4, 5)], IDLE)  # one too many
    assert routes.choose(pieces, {0: 0, 1: 9}) == 0


def test_text_in_several_chunks_is_the_same_prompt() -> None:
    chunk = text(1, 300).chunks[0]
    parts = [chunk.model_copy(update={"tokens": part}) for part in np.split(as_text(chunk).tokens, [7, 150])]
    assert task_pieces(task(prompt(*parts))) == task_pieces(task(prompt(chunk)))


@pytest.mark.parametrize("fields", [{"owner": "other"}, {"weights": Path("/weights/2")}])
def test_other_owners_and_other_weights_share_nothing(fields: dict) -> None:
    routes = PrefixRoutes()
    routes.choose(task_pieces(task(text(1, 300))), {0: 9, 1: 9, 2: 0})
    assert routes.choose(task_pieces(task(text(1, 300), **fields)), IDLE) == 0


def test_an_engine_that_is_not_open_is_not_chosen_however_much_it_has() -> None:
    routes, pieces = PrefixRoutes(), task_pieces(task(text(1, 300)))
    assert routes.choose(pieces, IDLE) == 0
    assert routes.choose(pieces, {1: 99, 2: 100}) == 1


def test_a_conversation_stays_with_its_engine_as_it_grows() -> None:
    routes = PrefixRoutes()
    routes.choose(chat_pieces(chat("hello")), {0: 9, 1: 0})
    assert routes.choose(chat_pieces(chat("hello", "good day", "how are you")), IDLE) == 1
    assert routes.choose(chat_pieces(chat("hello", owner="other")), IDLE) == 0
    assert routes.choose(chat_pieces(chat("hello", "good day", "how are you", "well")), {0: 0, 1: SLACK_TOKENS}) == 1


@pytest.mark.parametrize(("length", "engine"), [(10, 0), (300, 1)])
def test_long_instructions_bring_conversations_together_and_short_ones_do_not(length: int, engine: int) -> None:
    instructions = {"role": "system", "content": "word " * length}

    def pieces(content: str) -> list[Piece]:
        body = {"messages": [instructions, {"role": "user", "content": content}]}
        return chat_pieces(ChatTask("chat_completions", body, None, "one"))

    routes = PrefixRoutes()
    assert routes.choose(pieces("hello"), {0: 9, 1: 0}) == 1
    assert routes.choose(pieces("good day"), {0: 0, 1: 9}) == engine
    assert routes.choose(pieces("hello"), {0: 0, 1: 9}) == 1


def test_a_completions_prompt_is_cut_into_blocks() -> None:
    def pieces(prompt: str) -> list[int]:
        return [one.digest for one in chat_pieces(ChatTask("completions", {"prompt": prompt}, None, "one"))]

    first, second = pieces("a" * 5000), pieces("a" * 4999 + "b")
    assert first[:-1] == second[:-1] and first[-1] != second[-1]


def test_many_short_prompts_are_spread_over_all_engines() -> None:
    """As many groups arrive at once; each counts its answers."""
    routes, waiting = PrefixRoutes(), dict(IDLE)
    for seed in range(30):
        one = task(text(seed, 50), max_tokens=100)
        pieces = task_pieces(one)
        waiting[routes.choose(pieces, waiting)] += task_tokens(one, pieces)
    assert set(waiting.values()) == {10 * (50 + 2 * 100)}
