"""The gradients of tokens that the dashboard shows are those of the trainer's losses."""

import numpy as np
import pytest
import torch

from tinker_server.api_schemas.losses import CLIP_HIGH, CLIP_LOW, LOSS_CONFIG
from tinker_server.backends.trainer.step.losses import LOSSES, LossInputs
from tinker_server.observability.datum_gradients import TOKEN_LOSSES, token_losses

T = 64


def test_every_loss_has_its_config_and_its_gradients() -> None:
    assert set(LOSSES) == set(TOKEN_LOSSES) == set(LOSS_CONFIG)
    assert {name: dict(loss.config) for name, loss in LOSSES.items()} == {k: dict(v) for k, v in LOSS_CONFIG.items()}


@pytest.mark.parametrize("loss_fn", list(LOSSES))
@pytest.mark.parametrize("has_bounds", [False, True])
def test_losses_and_gradients_of_tokens_equal_the_trainers(loss_fn: str, has_bounds: bool) -> None:
    random = np.random.default_rng(3)
    old_T = -random.exponential(1.0, T).astype(np.float32)
    logprobs_T = np.minimum(old_T + random.normal(0, 0.4, T), -1e-3).astype(np.float32)
    advantages_T = random.choice([-1.5, -0.5, 0.0, 0.5, 2.0], T).astype(np.float32)
    mask_T = random.choice([0.0, 1.0], T).astype(np.float32)
    tensors = {"logprobs": old_T, "advantages": advantages_T}
    tensors |= {"sequence_ratio_mask": mask_T} if loss_fn == "gspo" else {}
    tensors = {"weights": advantages_T} if loss_fn == "cross_entropy" else tensors
    loss = LOSSES[loss_fn]
    bounds = {CLIP_LOW: np.full(T, 0.9, np.float32), CLIP_HIGH: np.linspace(1, 1.6, T, dtype=np.float32)}
    given = tensors | (bounds if has_bounds and CLIP_LOW in loss.optional else {})
    defaults = {n: loss.config[d] if isinstance(d, str) else d for n, d in loss.optional.items()}
    filled = {name: torch.full((T,), value) for name, value in defaults.items()}
    filled |= {name: torch.from_numpy(value) for name, value in given.items()}
    if loss.soft_targets:
        filled = {name: value[:, None] for name, value in filled.items()}
    logprobs_TK = torch.from_numpy(logprobs_T)[:, None].clone().requires_grad_()
    inputs = LossInputs(logprobs_TK, filled, loss.config, torch.zeros(T, dtype=torch.int64), 1)
    value_T = loss.by_position(inputs).reshape(T)
    (gradient_TK,) = torch.autograd.grad(value_T.sum(), logprobs_TK)
    found = token_losses(loss_fn, loss.config, given, logprobs_T)
    np.testing.assert_allclose(found.loss_T, value_T.detach().numpy(), rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(found.push_T, -gradient_TK[:, 0].numpy(), rtol=2e-5, atol=1e-6)
    if loss_fn == "ppo" or (loss_fn == "gspo" and not has_bounds):
        assert (found.push_T[advantages_T != 0] == 0).any()
