"""Grammars that answers must follow, and the bounds on what they may cost other owners' sequences.

The engine computes a grammar's allowed tokens between the steps that all sequences share.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from typing import Any

import xgrammar
from torch import Tensor
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar
from vllm.v1.structured_output.request import get_structured_output_key

from tinker_server.backends import tasks
from tinker_server.backends.lru import LRU
from tinker_server.backends.processes.fair_queue import FairQueue
from tinker_server.backends.processes.launcher import GRAMMARS, launch
from tinker_server.backends.processes.rpc import Child, ChildDied
from tinker_server.backends.protocol import InvalidInput
from tinker_server.backends.sampler.commands import GrammarKind, StartGrammars, TryGrammar

MAX_BYTES = 1 << 18
"""Size of a grammar as it is sent."""
COMPILE_S = 3.0
"""CPU time, on one core. With a vocabulary of 150,000 a schema of 300 properties took 1.1 s, `([a-z ]{1,10}x?){1,10}`
6 s, and with a third level hours."""
OWNER_S, REGAINED = 2.0, 3.0
"""The grammars of an owner's sequences may take two seconds of the engine's time at once, beside `USUAL_STEP_S` for
each token. Three seconds come back for each that they do not take: in the long run they may take three quarters."""
USUAL_STEP_S = 0.005
"""With a vocabulary of 150,000 a token of an ordinary schema took 0.02 ms, of 30 optional properties 0.06 ms, and of
strings that have a largest length 1 to 5 ms, some 40 ms. Sequences whose latest token took no longer end last, once
their owner has taken half of `OWNER_S` too much."""
OWNER = "grammar_owner"
"""Name, among a request's extra arguments, of who pays for its grammar."""
_MOST_PASSED = 64
"""Grammars that are remembered."""
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

    @cached_property
    def _first_command(self) -> StartGrammars:
        """To read a large tokenizer holds up the engine for part of a second: once for all processes."""
        info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._vocab_size)
        return StartGrammars(info.serialize_json(), COMPILE_S)

    async def _drop(self, dead: Child) -> None:
        self._child = None
        await dead.stop(grace_s=0)

    async def _start(self) -> Child:
        child = await launch(self._name, GRAMMARS, {"OMP_NUM_THREADS": "1"})
        try:
            await child.call(self._first_command)
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


class Allowance:
    """Counts the time that the grammars of an owner's sequences may still take in an engine."""

    left_s = OWNER_S
    """Below 0: how much too much they took."""

    def __init__(self) -> None:
        self._counted_until = time.monotonic()

    def take(self, seconds: float, paid_s: float) -> None:
        """Count time that a grammar took until now, of which `paid_s` are more than usual."""
        now = time.monotonic()
        regained_s = REGAINED * max(0.0, now - self._counted_until - seconds)
        self.left_s = min(OWNER_S, self.left_s + regained_s) - paid_s
        self._counted_until = now


_allowances: defaultdict[str, Allowance] = defaultdict(Allowance)
"""By owner. They outlive the owner's sequences, as the next would begin anew otherwise."""


class BoundedGrammar(XgrammarGrammar):  # type: ignore[misc]
    """A sequence's grammar that accepts no further token once its owner's grammars have taken too long; the engine then
    ends the sequence."""

    step_s = 0.0
    """Time that the latest token took."""
    has_ended = False

    def pay_from(self, allowance: Allowance) -> None:
        """Count the time that the grammar takes from now on."""
        self._allowance = allowance

    def fill_bitmask(self, bitmask: Tensor, idx: int) -> None:
        """Fill the mask of the tokens that are allowed next, or with all of them where the sequence is to end."""
        self._allowance.take(0, 0)
        self.has_ended |= self._takes_too_long()
        if self.has_ended:
            bitmask[idx].fill_(-1)
            return
        self.step_s, began = 0.0, time.monotonic()
        super().fill_bitmask(bitmask, idx)
        self._count(began)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Return whether the sequence may go on with these tokens."""
        if self.has_ended:
            return False
        began = time.monotonic()
        accepted: bool = super().accept_tokens(request_id, tokens)
        self._count(began)
        return accepted and not self._takes_too_long()

    def _count(self, began: float) -> None:
        took_s, before_s = time.monotonic() - began, self.step_s
        self.step_s += took_s
        self._allowance.take(took_s, max(USUAL_STEP_S, self.step_s) - max(USUAL_STEP_S, before_s))

    def _takes_too_long(self) -> bool:
        return self._allowance.left_s < (0 if self.step_s > USUAL_STEP_S else -OWNER_S / 2)


def with_owners(create: Callable[[Any, Request], BoundedGrammar]) -> Callable[[Any, Request], BoundedGrammar]:
    """Return vLLM's function that makes a request's grammar, which then counts against the request's owner."""

    def create_grammar(manager: object, request: Request) -> BoundedGrammar:
        grammar = create(manager, request)
        grammar.pay_from(_allowances[request.sampling_params.extra_args[OWNER]])
        return grammar

    return create_grammar


def once_each(check: Callable[[SamplingParams], None]) -> Callable[[SamplingParams], None]:
    """Return vLLM's check of a sequence's grammar, without the grammars that lately passed it.

    It may take 0.06 s, in which no sequence of the engine is served, and each of a chat's sequences is checked.
    """
    passed: LRU[object, bool] = LRU(_MOST_PASSED)

    def check_grammar(params: SamplingParams) -> None:
        asked = params.structured_outputs
        if asked is None or asked.choice:  # which the check rewrites
            check(params)
            return
        key = get_structured_output_key(asked)
        if not passed.get(key):
            check(params)
            passed.put(key, True)

    return check_grammar
