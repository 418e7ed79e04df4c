"""Check a forward_backward before anything is computed.

The checks depend on the request only, so that all ranks find the same: a datum that passes can only fail on pixels
that do not decode.
"""

import math
from collections.abc import Mapping

import numpy as np

from tinker_server.api_schemas.inputs import MAX_COLUMNS
from tinker_server.api_schemas.losses import CLIP_HIGH, CLIP_LOW
from tinker_server.api_schemas.training import OUTPUT_BYTES, ForwardBackwardInput
from tinker_server.backends.inputs.rendering import Layout, Renderer
from tinker_server.backends.processes.rpc import MAX_ANSWER_BYTES
from tinker_server.backends.protocol import InvalidInput
from tinker_server.backends.trainer.step.losses import LOSSES, Loss

STABLE_REINFORCE = "stable_reinforce"


def replace_stable_reinforce(loss_input: ForwardBackwardInput, stable_reinforce: str | None) -> ForwardBackwardInput:
    """Replace `stable_reinforce` by the published loss that the operator chose, with the same datums.

    Its config stays: keys that the published loss does not have are refused like any other.
    """
    if loss_input.loss_fn != STABLE_REINFORCE or stable_reinforce is None:
        return loss_input
    return loss_input.model_copy(update={"loss_fn": stable_reinforce})


def check_forward_backward(
    renderer: Renderer, loss_input: ForwardBackwardInput, max_context_length: int
) -> list[Layout]:
    """Return the layout of each datum. Raises InvalidInput that names the datum, the field and what is allowed."""
    loss = LOSSES.get(loss_input.loss_fn)
    if loss is None:
        hint = "; its formula is not published: the operator may choose one by the setting backend.stable_reinforce"
        raise InvalidInput(
            f"loss_fn {loss_input.loss_fn!r} is not supported; supported: {', '.join(LOSSES)}"
            + (hint if loss_input.loss_fn == STABLE_REINFORCE else "")
        )
    config = loss_config(loss, loss_input)
    if not loss_input.data:
        raise InvalidInput("data is empty: send at least one datum")
    layouts: list[Layout] = []
    num_pixels = num_cells = 0
    max_cells = MAX_ANSWER_BYTES // 2 // (OUTPUT_BYTES * (1 + len(loss.more_outputs)))  # the rest: names, shapes
    for index, datum in enumerate(loss_input.data):
        where = f"datum {index}"
        layouts.append(renderer.layout(datum.model_input, where))
        length, spans = layouts[-1]
        num_pixels += sum(span.num_pixels for span in spans)
        renderer.check_pixels(num_pixels, f"datums 0 to {index}")
        if length == 0:
            raise InvalidInput(f"{where}: model_input is empty")
        if length > max_context_length:
            raise InvalidInput(f"{where}: {length} tokens, but the context window holds {max_context_length}")
        if (runs := datum.model_input_spans) and (covered := sum(run.length for run in runs)) != length:
            raise InvalidInput(f"{where}: model_input_spans cover {covered} tokens, model_input has {length}")
        _check_names(loss, loss_input.loss_fn, datum.loss_fn_inputs, where)
        _check_targets(loss, datum.loss_fn_inputs["target_tokens"], length, renderer.vocab_size, where)
        _check_values(datum.loss_fn_inputs, where)
        _check_clip(loss, config, datum.loss_fn_inputs, where)
        num_cells += datum.loss_fn_inputs["target_tokens"].size
        if num_cells > max_cells:
            raise InvalidInput(
                f"datums 0 to {index} have {num_cells} target tokens; {max_cells} can be answered at once"
            )
    return layouts


def loss_config(loss: Loss, loss_input: ForwardBackwardInput) -> dict[str, float]:
    """Return the loss's config with its defaults. Raises InvalidInput for a key that it does not have."""
    values = dict(loss.config)
    for key, value in (loss_input.loss_fn_config or {}).items():
        if key not in values:
            known = ", ".join(values) or "no config keys"
            raise InvalidInput(f"loss_fn_config key {key!r}: {loss_input.loss_fn} has {known}")
        try:
            values[key] = float(value)
        except ValueError:
            raise InvalidInput(f"loss_fn_config {key!r} is {value!r}, not a number") from None
        if not math.isfinite(values[key]):
            raise InvalidInput(f"loss_fn_config {key!r} is not finite")
    _check_clip(loss, values, {}, "loss_fn_config")
    return values


def _check_clip(loss: Loss, config: Mapping[str, float], inputs: Mapping[str, np.ndarray], where: str) -> None:
    if CLIP_LOW not in loss.optional:
        return
    low, high = np.broadcast_arrays(*(inputs.get(name, np.float32(config[name])) for name in (CLIP_LOW, CLIP_HIGH)))
    if (wrong := low > high).any():
        raise InvalidInput(f"{where}: {CLIP_LOW} {low[wrong].flat[0]:g} is above {CLIP_HIGH} {high[wrong].flat[0]:g}")


def _check_names(loss: Loss, loss_fn: str, inputs: Mapping[str, np.ndarray], where: str) -> None:
    known = {"target_tokens", *loss.required, *loss.optional}
    for name in ("target_tokens", *loss.required):
        if name not in inputs:
            raise InvalidInput(f"{where}: {loss_fn} needs loss_fn_inputs {name!r}")
    for name in inputs:
        if name not in known:
            raise InvalidInput(
                f"{where}: {loss_fn} takes no loss_fn_inputs {name!r}; it takes {', '.join(sorted(known))}"
            )


def _check_targets(loss: Loss, targets: np.ndarray, length: int, vocab_size: int, where: str) -> None:
    if not np.issubdtype(targets.dtype, np.integer):
        raise InvalidInput(f"{where}: target_tokens must be int64, got {targets.dtype.name}")
    if targets.ndim > (2 if loss.soft_targets else 1) or targets.shape[:1] != (length,) or 0 in targets.shape:
        shapes = f"({length},) or ({length}, K)" if loss.soft_targets else f"({length},)"
        raise InvalidInput(
            f"{where}: target_tokens has shape {targets.shape}, model_input has {length} tokens: it must be {shapes}"
        )
    if targets.ndim == 2 and targets.shape[1] > MAX_COLUMNS:
        raise InvalidInput(f"{where}: target_tokens has K = {targets.shape[1]}; at most {MAX_COLUMNS} are supported")
    low, high = targets.min(), targets.max()
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InvalidInput(f"{where}: target token {bad} is outside the vocabulary (0 to {vocab_size - 1})")


def _check_values(inputs: Mapping[str, np.ndarray], where: str) -> None:
    targets = inputs["target_tokens"]
    for name, values in inputs.items():
        if values.shape != targets.shape:
            raise InvalidInput(
                f"{where}: {name} has shape {values.shape}, target_tokens {targets.shape}: they must agree"
            )
        if not np.isfinite(values).all():
            raise InvalidInput(f"{where}: NonFiniteInTensor: {name} holds NaN or infinity")
