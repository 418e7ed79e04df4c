"""Grammars that answers must follow: none may stop the sequences of other owners.

pytest tests/contract/sampler/test_grammars.py
"""

import asyncio
import json
import time
from typing import Any

import pytest

from tinker_server.backends.protocol import ChatTask, InvalidInput
from tinker_server.backends.sampler.engine.grammars import COMPILE_S

pytestmark = pytest.mark.asyncio(loop_scope="package")
USER = [{"role": "user", "content": "what is this world"}]


def schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}


def pattern(text: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "string", "pattern": text}}, "required": ["a"]}


ENDLESS = {
    "many optional letters": pattern("^" + "[a-z ]?" * 4000 + "$"),
    "many properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(8000)}},
    "many alternatives": {"anyOf": [pattern(f"^[a-z ]{{1,{i}}}$") for i in range(1, 900)]},
}


async def ask(sampler, owner: str = "somebody", **body: Any) -> dict[str, Any]:
    parts: list[str] = []
    await sampler.chat(
        ChatTask("chat_completions", {"model": "tiny", "messages": USER, **body}, None, owner), parts.append
    )
    answer: dict[str, Any] = json.loads("".join(parts))
    return answer


@pytest.mark.parametrize("name", ENDLESS)
async def test_a_grammar_that_takes_too_long_is_refused_and_nobody_else_waits(sampler, name):
    await ask(sampler, max_tokens=1)
    quiet, busy = await seconds_of(sampler), []
    hostile = asyncio.create_task(ask(sampler, "hostile", max_tokens=20, response_format=schema(ENDLESS[name])))
    while not hostile.done():
        busy.append(await seconds_of(sampler))
    print(f"{name}: others' one-token chats took {max(busy):.2f} s at most, {quiet:.2f} s before")
    with pytest.raises(InvalidInput, match=f"response_format: its grammar takes more than {COMPILE_S:g} s"):
        await hostile
    assert max(busy) < max(1.0, 3 * quiet)


async def test_a_sequence_whose_grammar_takes_too_long_between_tokens_ends(sampler):
    """A small vocabulary compiles it at once; each token of an answer then takes longer than the one before."""
    slow = schema(pattern("^(([a-z ]{1,900}x?){1,900}y?){900,900}$"))
    busy = []
    hostile = asyncio.create_task(ask(sampler, "hostile", max_tokens=2000, response_format=slow))
    while not hostile.done():
        busy.append(await seconds_of(sampler))
    with pytest.raises(InvalidInput, match="response_format: its grammar, with your others', took more than 2 s"):
        await hostile
    print(f"others' one-token chats took {max(busy):.2f} s at most, {sum(busy) / len(busy):.3f} s on average")
    assert max(busy) < 5  # of 30 s and more without the bound, and however busy the machine is


async def test_many_sequences_of_slow_grammars_take_no_longer_than_a_few(sampler):
    slow, busy = schema(pattern("^([a-z ]{1,100}x?){1,100}0$")), []
    asked = {"max_tokens": 300, "n": 64, "response_format": slow}
    hostile = asyncio.gather(*(ask(sampler, "hostile", **asked) for _ in range(2)), return_exceptions=True)
    while not hostile.done():
        busy.append(await seconds_of(sampler))
    for error in await hostile:
        assert isinstance(error, InvalidInput), error
    print(f"others' one-token chats took {max(busy):.2f} s at most, {sum(busy):.1f} s in all")
    assert max(busy) < 8  # of 12 s without a bound for all of them


async def test_many_sequences_of_an_ordinary_schema_are_answered_beside_slow_grammars(sampler):
    slow = schema(pattern("^([a-z ]{1,100}x?){1,100}0$"))
    hostile = asyncio.create_task(ask(sampler, "hostile", max_tokens=300, n=16, response_format=slow))
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["a", "b"]}}
    ordinary = schema({"type": "object", "properties": properties, "required": list(properties)})
    answer = await ask(sampler, "other", max_tokens=100, n=64, response_format=ordinary)
    assert len(answer["choices"]) == 64
    await asyncio.gather(hostile, return_exceptions=True)


async def seconds_of(sampler) -> float:
    began = time.monotonic()
    await ask(sampler, "other", max_tokens=1)
    return time.monotonic() - began


async def test_grammars_are_followed_after_one_was_refused(sampler):
    with pytest.raises(InvalidInput, match="takes more than"):
        await ask(sampler, "hostile", max_tokens=5, response_format=schema(ENDLESS["many properties"]))
    # JSON may have spaces between its parts, of which a model that knows nothing draws many.
    answer = await ask(sampler, max_tokens=1000, seed=1, response_format=schema(pattern("^[ab]{3}$")))
    assert json.loads(answer["choices"][0]["message"]["content"])["a"].strip("ab") == ""


async def test_a_grammar_whose_chat_has_ended_is_not_anothers(sampler):
    """The process that tries grammars goes on with it, and ends with it."""
    await ask(sampler, max_tokens=1, response_format=schema(pattern("^[ab]{2}$")))
    hostile = asyncio.create_task(
        ask(sampler, "hostile", max_tokens=5, response_format=schema(ENDLESS["many properties"]))
    )
    await asyncio.sleep(1.5)
    hostile.cancel()
    answer = await ask(sampler, "other", max_tokens=1, response_format=schema(pattern("^[ab]{3}$")))
    assert answer["choices"]
    with pytest.raises(asyncio.CancelledError):
        await hostile


async def test_a_grammar_that_no_text_follows_is_refused_by_name(sampler):
    with pytest.raises(InvalidInput, match="response_format"):
        await ask(sampler, max_tokens=5, response_format=schema({"type": "string", "minLength": 5, "maxLength": 2}))
    with pytest.raises(InvalidInput, match="response_format"):
        await ask(sampler, max_tokens=5, response_format=schema({"enum": []}))
    nothing = {"type": "structural_tag", "format": {"type": "regex", "pattern": "[^\\s\\S]"}}
    with pytest.raises(InvalidInput, match="response_format: no answer is allowed by it"):
        await ask(sampler, max_tokens=5, response_format=nothing)
    with pytest.raises(InvalidInput, match=r"response_format: .* or allows none where the answer stands"):
        await ask(sampler, max_tokens=500, response_format=schema(pattern("[^\\s\\S]")))


async def test_a_grammar_that_is_too_large_is_refused_by_its_size(sampler):
    with pytest.raises(InvalidInput, match="262144 are allowed"):
        await ask(sampler, max_tokens=5, response_format=schema({"enum": ["x" * 300_000]}))
