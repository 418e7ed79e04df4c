"""Which datums of a batch are kept for reading: the largest by gradient or loss, and the answers of one prompt."""

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tinker_server.api_schemas.inputs import Datum, ModelInput
from tinker_server.api_schemas.losses import LOSS_CONFIG
from tinker_server.api_schemas.training import ForwardBackwardInput, ForwardBackwardOutput
from tinker_server.observability.datum_gradients import TokenLosses, token_losses
from tinker_server.observability.datum_prompts import PROMPT_TOKENS, Prompts

LARGEST = 2
"""Datums by gradient, and as many by loss."""
ANSWERS = 8
"""Answers of a prompt: half of them the best, half the worst, where there are more."""
TOKENS = 512
"""First tokens of an answer."""
_TOKEN_BYTES, _DATUM_BYTES = 16, 1000
_TELLING = ("weights", "advantages", "logprobs")
"""Inputs of a loss that differ from 0 where the answer is: a prompt's tokens have no sampled log probability."""


@dataclass(frozen=True, kw_only=True)
class KeptDatum:
    """A datum from the first token that counts."""

    index: int
    """Its number in the batch."""
    prompt: int
    """Key of its prompt in the batch's."""
    tokens: np.ndarray
    """[T] int32"""
    logprobs: np.ndarray
    """[T] float32, nats: as the trainer computed them."""
    push: np.ndarray
    """[T] float32: positive where a step makes the token likelier, negative where less likely."""
    advantage: float | None
    """Mean over the answer; None for a loss without advantages."""
    loss: float
    gradient_norm: float
    """Norm of the loss's gradient by the logits of its target tokens."""


@dataclass(frozen=True, kw_only=True)
class KeptBatch:
    """A forward_backward of a step."""

    owner: str
    run_id: str
    step: int
    base_model: str
    loss_fn: str
    num_datums: int
    prompts: dict[int, ModelInput]
    """Their ends, with images that fit."""
    largest: list[KeptDatum]
    group: list[KeptDatum]
    """Answers of one prompt, by falling advantage."""
    size_bytes: int
    at: float = field(default_factory=time.time)
    sample_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Names its file, as a sample's does."""


@dataclass(frozen=True)
class BatchName:
    """The owner, run and step of a batch."""

    owner: str
    run_id: str
    step: int
    base_model: str


def keep(name: BatchName, sent: ForwardBackwardInput, output: ForwardBackwardOutput) -> KeptBatch | None:
    """Choose datums of a batch. None where no token trains, or no datum has a single target for each position."""
    config = {**LOSS_CONFIG[sent.loss_fn], **{key: float(value) for key, value in (sent.loss_fn_config or {}).items()}}
    prompts = Prompts()
    measured = [
        _measure(index, datum, token_losses(sent.loss_fn, config, datum.loss_fn_inputs, outputs["logprobs"]), prompts)
        for index, (datum, outputs) in enumerate(zip(sent.data, output.loss_fn_outputs, strict=True))
        if outputs["logprobs"].ndim == 1 and len(outputs["logprobs"])
    ]
    by_gradient = sorted(measured, key=lambda datum: _rank(datum.gradient_norm), reverse=True)[:LARGEST]
    by_loss = sorted(measured, key=lambda datum: _rank(datum.loss), reverse=True)[:LARGEST]
    largest = list({datum.index: datum for datum in [*by_gradient, *by_loss]}.values())
    group = _group(measured)
    chosen = {datum.index: datum for datum in [*largest, *group]}
    if not chosen:
        return None
    kept_prompts, chunk_bytes = prompts.shorten({datum.prompt for datum in chosen.values()})
    num_tokens = sum(len(datum.tokens[:TOKENS]) for datum in chosen.values()) + len(kept_prompts) * PROMPT_TOKENS
    return KeptBatch(
        **vars(name),
        loss_fn=sent.loss_fn,
        num_datums=len(sent.data),
        prompts=kept_prompts,
        largest=[_shorten(datum) for datum in largest],
        group=[_shorten(datum) for datum in group],
        size_bytes=chunk_bytes + num_tokens * _TOKEN_BYTES + (len(chosen) + 1) * _DATUM_BYTES,
    )


def _measure(index: int, datum: Datum, losses: TokenLosses, prompts: Prompts) -> KeptDatum:
    """Return a datum's answer whole, with views of its arrays."""
    inputs = datum.loss_fn_inputs
    counts = np.logical_or.reduce([inputs[name] != 0 for name in _TELLING if name in inputs] or [losses.push_T != 0])
    first = int(np.argmax(counts)) if counts.any() else len(losses.push_T)
    surprise_T = 1 - np.exp(losses.logprobs_T)
    advantages_T = inputs.get("advantages")
    return KeptDatum(
        index=index,
        prompt=prompts.number(datum.model_input.chunks, len(losses.push_T) - 1 - first),
        tokens=inputs["target_tokens"][first:],
        logprobs=losses.logprobs_T[first:],
        push=losses.push_T[first:],
        advantage=None if advantages_T is None else float(advantages_T[counts].mean()) if counts.any() else 0.0,
        loss=float(losses.loss_T.sum()),
        gradient_norm=float(np.linalg.norm(losses.push_T * surprise_T)),
    )


def _rank(value: float) -> float:
    """Return the value for an order in which what is not finite is largest."""
    return value if math.isfinite(value) else math.inf


def _group(measured: Sequence[KeptDatum]) -> list[KeptDatum]:
    """Return the answers of the prompt whose advantages differ most, the best first; empty where no prompt has two."""
    of_prompt: dict[int, list[KeptDatum]] = {}
    for datum in measured:
        if datum.advantage is not None:
            of_prompt.setdefault(datum.prompt, []).append(datum)
    groups = [sorted(group, key=lambda datum: datum.advantage or 0, reverse=True) for group in of_prompt.values()]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return []
    widest = max(groups, key=lambda group: (group[0].advantage or 0) - (group[-1].advantage or 0))
    return widest if len(widest) <= ANSWERS else [*widest[: ANSWERS // 2], *widest[-ANSWERS // 2 :]]


def _shorten(datum: KeptDatum) -> KeptDatum:
    """Copy the first tokens, so that the batch's body is not kept alive."""
    tokens, logprobs = datum.tokens[:TOKENS].astype(np.int32), datum.logprobs[:TOKENS].astype(np.float32)
    return replace(datum, tokens=tokens, logprobs=logprobs, push=datum.push[:TOKENS].astype(np.float32))
