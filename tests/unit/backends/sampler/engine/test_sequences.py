"""A sequence is begun again only where the engine has ended it before its first token."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest


class Engine:
    """Ends each sequence with an error behind some tokens, as often as it is told."""

    def __init__(self, *, tokens: list[int], failures: int) -> None:
        self.tokens, self.failures, self.begun = tokens, failures, 0
        self.input_processor = SimpleNamespace(inject_into_mm_cache=lambda *_: None)

    async def generate(self, *_: object, **named: object) -> AsyncIterator[Any]:
        self.begun += 1
        for token in self.tokens:
            yield output([token], None)
        if self.begun <= self.failures:
            yield output([], "error")
        else:
            yield output([9], "stop")


def output(tokens: list[int], reason: str | None) -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, finish_reason=reason)])


async def drawn(engine: Engine) -> list[tuple[list[int], str | None]]:
    from tinker_server.backends.sampler.engine.sequences import Sequences

    inputs = cast(Any, {"type": "multimodal", "mm_kwargs": {}, "mm_hashes": {}})
    outputs = Sequences(cast(Any, engine)).run(inputs, cast(Any, None), None, 0)
    return [(one.outputs[0].token_ids, one.outputs[0].finish_reason) async for one in outputs]


@pytest.mark.heavy
async def test_a_sequence_whose_pixels_were_evicted_is_sent_again() -> None:
    engine = Engine(tokens=[], failures=2)
    assert await drawn(engine) == [([9], "stop")] and engine.begun == 3


@pytest.mark.heavy
async def test_a_sequence_that_has_given_tokens_is_not_begun_again() -> None:
    """As one whose grammar has used up its time: its answer would be there twice."""
    engine = Engine(tokens=[1, 2], failures=2)
    assert await drawn(engine) == [([1], None), ([2], None), ([], "error")] and engine.begun == 1
