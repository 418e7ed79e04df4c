"""`stable_reinforce`, whose formula is not published, is answered by the loss that the operator names, and says so."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests.factories import MIXED, batch, datum
from tests.trainers import LORA, config, forward_backward, lora_model
from tinker_server.api_schemas.inputs import Datum
from tinker_server.api_schemas.sampling import SampleRequest
from tinker_server.backends.config import BackendConfig
from tinker_server.backends.configure.create import make_models
from tinker_server.backends.configure.describe import describe_models
from tinker_server.backends.configure.memory_plan import Machine
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.protocol import InvalidInput
from tinker_server.backends.trainer.distributed import World
from tinker_server.backends.trainer.rank import TrainerRank

GIB = 1 << 30


def trainer_with(source: Path, stable_reinforce: str | None) -> TrainerRank:
    made = TrainerRank(replace(config(source), stable_reinforce=stable_reinforce), World(0, 1, torch.device("cpu")))
    made.create_model("m", LORA)
    return made


def rollouts(renderer: Renderer) -> list[Datum]:
    found = []
    for seed, one in enumerate(MIXED.values()):
        made = datum(one, renderer, seed)
        targets = made.loss_fn_inputs["target_tokens"]
        random = np.random.default_rng(seed)
        inputs = {
            "target_tokens": targets,
            "logprobs": random.uniform(-5, -1, len(targets)).astype(np.float32),
            "advantages": random.normal(size=len(targets)).astype(np.float32),
        }
        found.append(Datum(model_input=made.model_input, loss_fn_inputs=inputs))
    return found


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo"])
def test_the_named_loss_answers_and_the_metrics_say_so(tiny_vl: Path, renderer: Renderer, loss_fn: str) -> None:
    trainer = trainer_with(tiny_vl, loss_fn)
    data = rollouts(renderer)
    expected = forward_backward(trainer, "m", batch(data, loss_fn))
    gradient = lora_model(trainer, "m").gradients
    expected_gradient = {name: value.clone() for name, value in gradient.items()}
    trainer.models["m"].clear_gradient()
    found = forward_backward(trainer, "m", batch(data, "stable_reinforce"))
    assert expected is not None and found is not None
    assert found.metrics == expected.metrics | {f"stable_reinforce_as_{loss_fn}:max": 1.0}
    for name, value in lora_model(trainer, "m").gradients.items():
        torch.testing.assert_close(value, expected_gradient[name], rtol=0, atol=0)


def test_keys_of_its_config_that_the_named_loss_does_not_have_are_refused(tiny_vl: Path, renderer: Renderer) -> None:
    trainer = trainer_with(tiny_vl, "importance_sampling")
    with pytest.raises(InvalidInput, match="loss_fn_config key 'kl_coeff': importance_sampling has no config keys"):
        forward_backward(trainer, "m", batch(rollouts(renderer), "stable_reinforce", {"kl_coeff": 0.1}))


def test_without_a_choice_it_is_refused_with_the_setting_that_makes_one(tiny_vl: Path, renderer: Renderer) -> None:
    trainer = trainer_with(tiny_vl, None)
    with pytest.raises(InvalidInput, match=r"'stable_reinforce' is not supported; .* backend\.stable_reinforce"):
        forward_backward(trainer, "m", batch(rollouts(renderer), "stable_reinforce"))


@pytest.mark.parametrize("chosen", ["importance_sampling", None])
def test_samples_for_it_are_taken_where_it_is_answered(
    tiny_vl: Path, chosen: Literal["importance_sampling"] | None
) -> None:
    request = SampleRequest.model_validate(
        {
            "sampling_session_id": "s",
            "seq_id": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": 4},
            "record_stability_info": True,
        }
    )
    backend = BackendConfig(models={"a": str(tiny_vl)}, device="cpu", stable_reinforce=chosen)
    model = make_models(describe_models(backend, Machine(64 * GIB)))["a"]
    if chosen:
        assert model.check_sample(request).num_tokens == 3
        return
    with pytest.raises(InvalidInput, match=r"backend\.stable_reinforce"):
        model.check_sample(request)


def test_the_largest_rank_is_128_and_less_where_memory_is_small(tiny_vl: Path) -> None:
    def largest(main_bytes: int, **settings: Any) -> int:
        backend = BackendConfig(models={"a": str(tiny_vl)}, device="cpu", **settings)
        return describe_models(backend, Machine(main_bytes))["a"].spec.max_lora_rank

    assert largest(64 * GIB) == 128
    assert largest(64 * GIB, max_lora_rank=16) == 16
    # Two processes take 3 GiB, the cache a half; adapters and their slots have the rest. Ranks beyond 32 need room
    # for four models.
    assert [largest(main_mib << 20) for main_mib in (3615, 3601, 3590, 3588, 3587)] == [128, 64, 32, 16, 8]
