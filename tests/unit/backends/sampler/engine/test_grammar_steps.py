"""Grammars of an engine's sequences: steps that take too long, and the process that tries them."""

import asyncio
from types import SimpleNamespace

import psutil
import pytest
import xgrammar
from vllm.sampling_params import StructuredOutputsParams

from tinker_server.backends.sampler.engine import grammars


class Matcher:
    """In the place of xgrammar's; `slow` names what takes long."""

    def __init__(self, slow: str) -> None:
        self.slow = slow

    def fill_next_token_bitmask(self, *_: object) -> None:
        clock.now += 5 if self.slow == "fill" else 0.01

    def accept_token(self, *_: object) -> bool:
        clock.now += 5 if self.slow == "accept" else 0.01
        return True

    def is_terminated(self) -> bool:
        return False


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


clock = Clock()


@pytest.mark.parametrize(("slow", "goes_on"), [("fill", False), ("accept", False), ("neither", True)])
def test_a_sequence_ends_once_a_step_of_its_grammar_took_too_long(slow, goes_on, monkeypatch):
    monkeypatch.setattr(grammars, "time", clock)
    one = grammars.BoundedGrammar(100, Matcher(slow), None)
    one.fill_bitmask(None, 0)
    assert one.accept_tokens("request", [1]) is goes_on


def test_a_sequence_ends_too_where_many_steps_of_its_grammar_take_a_little_long(monkeypatch):
    monkeypatch.setattr(grammars, "time", clock)
    one, num_tokens = grammars.BoundedGrammar(100, Matcher("neither"), None), 0
    while one.accept_tokens("request", [1]):
        one.fill_bitmask(None, 0)
        num_tokens += 1
        clock.now += 3  # another's step
    assert 90 < num_tokens < 110  # each takes 0.02 s, of which 0.01 s is usual


async def test_a_chat_that_ends_while_the_process_starts_leaves_no_process(monkeypatch):
    words = xgrammar.TokenizerInfo(["a", "b", "</s>"], stop_token_ids=[2])
    of_tokenizer = SimpleNamespace(from_huggingface=lambda *_, **__: words)
    monkeypatch.setattr(grammars, "xgrammar", SimpleNamespace(TokenizerInfo=of_tokenizer))
    here, tried = psutil.Process(), grammars.Grammars("m", None, 3)
    before = set(here.children(recursive=True))
    chat = asyncio.create_task(tried.require_quick("somebody", StructuredOutputsParams(regex="a*")))
    async with asyncio.timeout(20):
        while not any("grammar_process" in " ".join(child.cmdline()) for child in here.children()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        chat.cancel()
        with pytest.raises(asyncio.CancelledError):
            await chat
        while set(here.children(recursive=True)) - before:  # noqa: ASYNC110 - a guard beside it ends by itself
            await asyncio.sleep(0.01)
