"""Grammars that answers must follow, and the bounds on what they may cost other owners' sequences.

The engine computes a grammar's allowed tokens between the steps that all sequences share.
"""

import json
import time
from typing import Any

import xgrammar
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from tinker_server.backends import tasks
from tinker_server.backends.processes.fair_queue import FairQueue
from tinker_server.backends.processes.launcher import launch
from tinker_server.backends.processes.rpc import Child, ChildDied
from tinker_server.backends.protocol import InvalidInput
from tinker_server.backends.sampler.commands import GrammarKind, StartGrammars, TryGrammar

MAX_BYTES = 1 << 18
"""Size of a grammar as it is sent."""
COMPILE_S = 3.0
"""CPU time, on one core. With a vocabulary of 150,000 a schema of 300 properties took 1.1 s, `([a-z ]{1,10}x?){1,10}`
6 s, and with a third level hours."""
STEP_S, USUAL_STEP_S = 1.0, 0.01
"""A sequence's grammar may take one second of the time between the engine's steps, and `USUAL_STEP_S` more per
token."""
_TOOK_TOO_LONG = (
    f"takes more than {COMPILE_S:g} s to prepare, or more memory than allowed: repeat less in its patterns, or allow"
    " fewer properties, alternatives and lengths"
)


def allow_objects_alone(params: StructuredOutputsParams) -> None:
    """Have the arguments of every call that a structural tag allows be a JSON object, as vendors promise.

    Of a tool that is not strict the tag allows any JSON, such as `true`.
    """
    if params.structural_tag is not None:
        params.structural_tag = json.dumps(_with_objects(json.loads(params.structural_tag)))


def _with_objects(tag: Any) -> Any:
    if isinstance(tag, list):
        return [_with_objects(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "json_schema":
        return tag | {"json_schema": {"type": "object"}} if tag["json_schema"] is True else tag
    return {name: _with_objects(part) for name, part in tag.items()}


class Grammars:
    """Tries the grammars of an engine's requests in a separate process, which starts with the first of them."""

    def __init__(self, name: str, tokenizer: object, vocab_size: int) -> None:
        self._name = f"grammars {name}"
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._queue = FairQueue()
        self._child: Child | None = None

    async def require_quick(self, owner: str, params: StructuredOutputsParams | None) -> None:
        """Raise InvalidInput for a grammar that takes too long to compile, or that no text can follow."""
        if params is None or params.json_object:
            return
        kind, text = _grammar(params)
        if len(text) > MAX_BYTES:
            raise InvalidInput(f"response_format: its grammar has {len(text)} characters; {MAX_BYTES} are allowed")
        async with self._queue.grant(owner, kind):
            if self._child is not None and self._child.died.is_set():  # of a grammar whose chat has ended
                await self._drop(self._child)
            if self._child is None:
                self._child = await self._start()
            try:
                # A trial that nobody waits for any longer is its owner's until the process is free.
                await tasks.to_the_end(self._child.call(TryGrammar(kind, text)))
            except InvalidInput as error:
                raise InvalidInput(f"response_format: {error}") from None
            except ChildDied:
                await self._drop(self._child)
                raise InvalidInput(f"response_format: its grammar {_TOOK_TOO_LONG}") from None

    async def _drop(self, dead: Child) -> None:
        self._child = None
        await dead.stop(grace_s=0)

    async def _start(self) -> Child:
        info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._vocab_size)
        child = await launch(
            self._name, "tinker_server.backends.sampler.engine.grammar_process", {"OMP_NUM_THREADS": "1"}
        )
        try:
            await child.call(StartGrammars(info.serialize_json(), COMPILE_S))
        except BaseException:  # such as the end of the chat that asked
            await child.stop(grace_s=0)
            raise
        return child


def _grammar(params: StructuredOutputsParams) -> tuple[GrammarKind, str]:
    if params.json is not None:
        return "json", params.json if isinstance(params.json, str) else json.dumps(params.json)
    if params.regex is not None:
        return "regex", params.regex
    if params.grammar is not None:
        return "grammar", params.grammar
    if params.structural_tag is not None and "structures" not in json.loads(params.structural_tag):
        return "structural_tag", params.structural_tag
    raise InvalidInput("response_format: json_object, json_schema and structural_tag (with format) are supported")


class BoundedGrammar(XgrammarGrammar):  # type: ignore[misc]
    """A sequence's grammar that accepts no further token once it has taken too long; the engine then ends the
    sequence."""

    allowed_s = STEP_S
    """Time that it may still take."""

    def fill_bitmask(self, bitmask: object, idx: int) -> None:
        """Fill the mask of the tokens that are allowed next."""
        began = time.monotonic()
        super().fill_bitmask(bitmask, idx)
        self.allowed_s -= time.monotonic() - began

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Return whether the sequence may go on with these tokens."""
        began = time.monotonic()
        accepted: bool = super().accept_tokens(request_id, tokens)
        self.allowed_s += USUAL_STEP_S - (time.monotonic() - began)
        return accepted and self.allowed_s >= 0
