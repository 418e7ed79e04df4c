"""Grammars of an engine's sequences: steps that take too long, and the process that tries them."""

import asyncio
import os
import signal
from types import SimpleNamespace

import psutil
import pytest
import torch
import xgrammar
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from tests.factories import present
from tinker_server.backends.processes import forking
from tinker_server.backends.processes.launcher import GRAMMARS
from tinker_server.backends.sampler.engine import grammars


class Matcher:
    """In the place of xgrammar's; each mask and each token take as long as told."""

    def __init__(self, fill_s: float = 0.0, accept_s: float = 0.0) -> None:
        self.fill_s, self.accept_s = fill_s, accept_s

    def fill_next_token_bitmask(self, *_: object) -> None:
        clock.now += self.fill_s

    def accept_token(self, *_: object) -> bool:
        clock.now += self.accept_s
        return True

    def is_terminated(self) -> bool:
        return False


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


clock = Clock()


@pytest.fixture(autouse=True)
def own_clock(monkeypatch):
    monkeypatch.setattr(grammars, "time", clock)


def sequence(allowance: grammars.Allowance, **seconds: float) -> grammars.BoundedGrammar:
    grammar = grammars.BoundedGrammar(100, Matcher(**seconds), None)
    grammar.pay_from(allowance)
    return grammar


def step(sequences: list[grammars.BoundedGrammar]) -> list[bool]:
    """Return which of them may go on after a step of the engine."""
    masks = torch.zeros(len(sequences), 4, dtype=torch.int32)
    for row, grammar in enumerate(sequences):
        grammar.fill_bitmask(masks, row)
    return [grammar.accept_tokens("request", [1]) for grammar in sequences]


@pytest.mark.parametrize(
    ("seconds", "goes_on"), [({"fill_s": 9}, False), ({"accept_s": 9}, False), ({"fill_s": 0.1}, True)]
)
def test_a_sequence_ends_once_a_step_of_its_grammar_took_too_long(seconds, goes_on):
    assert step([sequence(grammars.Allowance(), **seconds)]) == [goes_on]


@pytest.mark.parametrize("num_sequences", [1, 64, 256])
def test_sequences_of_an_owner_take_no_longer_the_more_they_are(num_sequences):
    allowance, began = grammars.Allowance(), clock.now
    for _ in range(5):  # the owner asks again as soon as all have ended
        running = [sequence(allowance, fill_s=0.05) for _ in range(num_sequences)]
        while running:
            running = [grammar for grammar, goes_on in zip(running, step(running), strict=True) if goes_on]
        clock.now += 0.02  # the model's step
    paid = 1 - grammars.USUAL_STEP_S / 0.05
    assert clock.now - began < (1.5 * grammars.OWNER_S + 5 * 0.02 * (1 + grammars.REGAINED) + 0.1) / paid


def test_quick_sequences_of_all_owners_go_on_beside_slow_ones():
    slow, own = grammars.Allowance(), grammars.Allowance()
    running = [sequence(slow, fill_s=0.1) for _ in range(64)]
    quick = [sequence(slow, fill_s=1e-5), *(sequence(own, fill_s=6e-5) for _ in range(64))]
    for _ in range(1000):
        assert all(step(quick))
        running = [grammar for grammar, goes_on in zip(running, step(running), strict=True) if goes_on]
        clock.now += 0.02
    assert len(running) < 10


def test_many_sequences_that_take_the_usual_time_go_on():
    """Strings that have a largest length, with a large vocabulary: most tokens take some milliseconds, few many."""
    allowance = grammars.Allowance()
    running = [sequence(allowance, fill_s=0.003) for _ in range(64)]
    for number in range(300):
        running[number % 64].matcher.fill_s = 0.04
        assert all(step(running))
        running[number % 64].matcher.fill_s = 0.003
        clock.now += 0.02


def test_a_chats_sequences_check_their_grammar_a_single_time():
    checked: list[SamplingParams] = []
    check = grammars.once_each(checked.append)
    for pattern in ["a*", "b*"] * 64:
        check(SamplingParams(structured_outputs=StructuredOutputsParams(regex=pattern)))
    assert len(checked) == 2
    for number in range(200):
        check(SamplingParams(structured_outputs=StructuredOutputsParams(regex=f"a{{{number}}}")))
    assert len(checked) == 202


def test_a_grammar_that_failed_its_check_fails_again():
    def refuse(params: SamplingParams) -> None:
        raise ValueError(params)

    check, params = grammars.once_each(refuse), SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    for _ in range(2):
        with pytest.raises(ValueError, match="a"):
            check(params)


@pytest.fixture
async def tried(monkeypatch):
    """Grammars of a vocabulary of three tokens."""
    words = xgrammar.TokenizerInfo(["a", "b", "</s>"], stop_token_ids=[2])
    of_tokenizer = SimpleNamespace(from_huggingface=lambda *_, **__: words)
    monkeypatch.setattr(grammars, "xgrammar", SimpleNamespace(TokenizerInfo=of_tokenizer))
    tried = grammars.Grammars("m", None, 3)
    yield tried
    await present(tried._child).stop(grace_s=0)


async def test_a_process_that_a_grammar_has_ended_is_followed_by_a_fork_of_the_same_libraries(tried):
    """To import them takes seconds, for which the next owner would wait."""
    importers = []
    for _ in range(3):
        await tried.require_quick("somebody", StructuredOutputsParams(regex="a*"))
        importers.append(present(psutil.Process(tried._child.process.pid).parent()))
        os.kill(tried._child.process.pid, signal.SIGPROF)  # as the kernel does when its time is over
        async with asyncio.timeout(20):
            await tried._child.died.wait()
    assert importers[0].cmdline()[2] == forking.__name__ and importers == [importers[0]] * 3
    assert not forks_of(importers[0])


async def test_a_chat_that_ends_while_the_process_starts_leaves_no_process(tried, monkeypatch):
    monkeypatch.setenv("LIBRARIES", "imported for this test")
    before = set(psutil.Process().children())
    chat = asyncio.create_task(tried.require_quick("somebody", StructuredOutputsParams(regex="a*")))
    async with asyncio.timeout(20):
        while not (started := set(psutil.Process().children()) - before):  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.01)
        chat.cancel()
        with pytest.raises(asyncio.CancelledError):
            await chat
        await tried.require_quick("somebody", StructuredOutputsParams(regex="a*"))
        [importer] = started
        while len(forks_of(importer)) > 1:  # noqa: ASYNC110 - a guard beside the first ends it
            await asyncio.sleep(0.01)
    assert [fork.pid for fork in forks_of(importer)] == [tried._child.process.pid]


def forks_of(importer: psutil.Process) -> list[psutil.Process]:
    return [child for child in importer.children() if f"-m {GRAMMARS} " in " ".join(child.cmdline())]
