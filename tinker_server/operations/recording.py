"""Records finished operations as steps for the run's curves."""

import math
import time
from dataclasses import replace
from typing import Any

from tinker_server.api_schemas import wire
from tinker_server.api_schemas.training import (
    AdamParams,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    OptimStepRequest,
    OptimStepResponse,
)
from tinker_server.backends.lru import LRU
from tinker_server.offload import off_loop
from tinker_server.store.futures.observers import Work
from tinker_server.store.futures.records import Operation
from tinker_server.store.records import Step
from tinker_server.store.steps import StepStore

RUNS_KEPT = 10_000
"""Runs whose last step is remembered; the last step of others is read again."""


class Recording:
    """Follows the runs' steps."""

    def __init__(self, steps: StepStore) -> None:
        self._steps = steps
        self._last: LRU[str, Step] = LRU(RUNS_KEPT)

    async def on_success(self, work: Work[Any]) -> None:
        """Have the step of a forward_backward or optim_step stored with its result."""
        operation, response = work.operation, work.response
        if operation.operation_kind not in ("forward_backward", "optim_step"):
            return
        last = self._last.get(operation.lane) or await self._steps.last(operation.lane)
        blank = Step(
            model_id=operation.lane,
            seq_id=operation.seq_id,
            step=0 if last is None else last.step + is_optim_step(last),
            at=time.time(),
            digest=operation.digest or None,
            total_tokens=0 if last is None else last.total_tokens,
            waited_s=work.waited_s,
            run_s=work.run_s,
        )
        if isinstance(response, ForwardBackwardOutput):
            step = _of_batch(blank, response)
            owner, size_bytes = operation.owner, operation.size_bytes
            if step.loss_tokens == 0 and await off_loop(owner, size_bytes, _has_advantages, operation):
                step = replace(step, advantage=0.0)  # the trainer gives means only of positions that train
        else:
            assert isinstance(response, OptimStepResponse) and isinstance(work.request, OptimStepRequest)
            adam = work.request.adam_params or AdamParams()
            norm = _finite(response.metrics, "grad_norm")
            step = replace(blank, learning_rate=adam.learning_rate, grad_norm=norm)
        self._last.put(operation.lane, step)
        work.step = step


def is_optim_step(step: Step) -> bool:
    """Return whether the record is of an optim_step, the last of its step."""
    return step.learning_rate is not None


def _of_batch(blank: Step, output: ForwardBackwardOutput) -> Step:
    tokens = sum(len(outputs["logprobs"]) for outputs in output.loss_fn_outputs)
    metrics = output.metrics
    return replace(
        blank,
        tokens=tokens,
        total_tokens=blank.total_tokens + tokens,
        loss=_finite(metrics, "loss:sum"),
        loss_tokens=int(metrics.get("tokens:sum", tokens)),
        sampler_gap=_finite(metrics, "sampler_gap:mean"),
        divergence=_finite(metrics, "kl_k3:mean"),
        clip_fraction=_finite(metrics, "clip_fraction:mean"),
        advantage=_finite(metrics, "advantage:mean"),
        shared_tokens=_finite(metrics, "shared_tokens:sum"),
    )


def _has_advantages(operation: Operation) -> bool:
    """Return whether the loss of a forward_backward weighs positions by advantages."""
    return any("advantages" in datum.loss_fn_inputs for datum in decode_batch(operation).data)


def decode_batch(operation: Operation) -> ForwardBackwardInput:
    """Decode the body of a forward_backward, which was checked before."""
    assert operation.body is not None, "the body has been read"
    if operation.content_type == wire.PROTOBUF:
        return wire.decode_checked(operation.body)
    return ForwardBackwardRequest.model_validate_json(operation.body).forward_backward_input


def _finite(metrics: dict[str, float], name: str) -> float | None:
    value = metrics.get(name)
    return value if value is not None and math.isfinite(value) else None
