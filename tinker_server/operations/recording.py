"""Records finished operations: a step for the run's curves, and times for the metrics.

Nothing here fails an operation: what cannot be recorded is left out, and logged.
"""

import logging
import math
import time
from dataclasses import dataclass, replace

from api_schemas import wire
from api_schemas.base import Response
from api_schemas.training import (
    AdamParams,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    OptimStepRequest,
    OptimStepResponse,
)
from backends.lru import LRU
from tinker_server.models.model import Model
from tinker_server.observability.metrics import Metrics
from tinker_server.offload import off_loop
from tinker_server.store.futures.records import Operation
from tinker_server.store.records import Step
from tinker_server.store.steps import StepStore

log = logging.getLogger(__name__)
RUNS_KEPT = 10_000
"""Runs whose last step is remembered; the last step of others is read again."""
TRAINED = ("forward_backward", "forward", "optim_step")
"""Operations that do nothing but have the trainer work: while the trainer did not work for them, they waited."""


@dataclass(frozen=True)
class Timing:
    """The seconds that one operation waited and ran."""

    waited_s: float
    run_s: float


class Timer:
    """Times an operation, from when it is carried out."""

    def __init__(self, operation: Operation, model: Model | None) -> None:
        self._model = model if operation.operation_kind in TRAINED else None
        self._queued_s = max(0.0, time.time() - operation.accepted_at)
        self._began = time.monotonic()
        self._worked_s = 0.0 if self._model is None else self._model.worked_s

    def read(self) -> Timing:
        """Return the times until now."""
        run_s = elapsed_s = time.monotonic() - self._began
        if self._model is not None and 0 < (worked_s := self._model.worked_s - self._worked_s) < elapsed_s:
            run_s = worked_s
        return Timing(self._queued_s + elapsed_s - run_s, run_s)


class Recording:
    """Follows the runs' steps."""

    def __init__(self, steps: StepStore, metrics: Metrics) -> None:
        self._steps = steps
        self._metrics = metrics
        self._last: LRU[str, Step] = LRU(RUNS_KEPT)

    async def done(self, operation: Operation, response: Response, timer: Timer) -> Step | None:
        """Record an operation, and return the step to store with its result; None for most kinds."""
        timing = timer.read()
        self._metrics.ran(operation.operation_kind, timing.waited_s, timing.run_s)
        try:
            return await self._step(operation, response, timing)
        except Exception:  # curves must not cost a result
            log.exception("%s %d of %s is not recorded", operation.operation_kind, operation.seq_id, operation.lane)
            return None

    async def _step(self, operation: Operation, response: Response, timing: Timing) -> Step | None:
        if operation.operation_kind not in ("forward_backward", "optim_step"):
            return None
        last = self._last.get(operation.lane) or await self._steps.last(operation.lane)
        blank = Step(
            model_id=operation.lane,
            seq_id=operation.seq_id,
            step=0 if last is None else last.step + is_optim_step(last),
            at=time.time(),
            total_tokens=0 if last is None else last.total_tokens,
            waited_s=timing.waited_s,
            run_s=timing.run_s,
        )
        if isinstance(response, ForwardBackwardOutput):
            step = _of_batch(blank, response)
            owner, size_bytes = operation.owner, operation.size_bytes
            if step.loss_tokens == 0 and await off_loop(owner, size_bytes, _has_advantages, operation):
                step = replace(step, advantage=0.0)  # the trainer gives means only of positions that train
            if step.sampler_gap is not None:
                self._metrics.sampler_gap.observe(step.sampler_gap)
        else:
            assert isinstance(response, OptimStepResponse) and isinstance(operation.request, OptimStepRequest)
            step = _of_optim_step(blank, operation.request, response)
        self._last.put(operation.lane, step)
        return step


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
    )


def _has_advantages(operation: Operation) -> bool:
    """Return whether the loss of a forward_backward weighs positions by advantages."""
    assert operation.body is not None, "the body has been read"
    if operation.content_type == wire.PROTOBUF:
        request = wire.decode_forward_backward(operation.body)
    else:
        request = ForwardBackwardRequest.model_validate_json(operation.body)
    data = request.forward_backward_input.data
    return any("advantages" in datum.loss_fn_inputs for datum in data)


def _of_optim_step(blank: Step, request: OptimStepRequest, response: OptimStepResponse) -> Step:
    adam = request.adam_params or AdamParams()
    return replace(blank, learning_rate=adam.learning_rate, grad_norm=_finite(response.metrics, "grad_norm"))


def _finite(metrics: dict[str, float], name: str) -> float | None:
    value = metrics.get(name)
    return value if value is not None and math.isfinite(value) else None
