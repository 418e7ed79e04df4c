"""Work that cannot be done fails its own future, says why, and harms nothing else; numbers are the checklist's.

pytest tests/conformance/test_bad_data.py
"""

from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.conformance.failures import assert_each_fails_alone, bad, complete, floats
from tests.servers import MODEL, sdk_datum
from tests.training import PLACEHOLDER, batch
from tinker_server.backends.inputs.rendering import Renderer

LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]


@pytest.mark.parametrize(
    ("loss_fn", "config"), [("stable_reinforce", {"kl_coeff": "0.1"}), ("custom", {"loss_id": "some"})]
)
def test_038_losses_that_are_not_published_are_refused_by_name(
    service: tinker.ServiceClient, renderer: Renderer, loss_fn: str, config: dict[str, str]
) -> None:
    client = service.create_lora_training_client(MODEL, rank=4, seed=9).result()
    supported = f"loss_fn '{loss_fn}' is not supported; supported: {', '.join(LOSSES)}"
    with pytest.raises(tinker.RequestFailedError, match=supported) as caught:
        client.forward_backward([sdk_datum(batch(renderer)[0])], loss_fn, config).result()  # type: ignore[arg-type]
    assert caught.value.category == "user"


def test_039_an_unknown_loss_names_the_known_ones_and_numbering_goes_on(
    service: tinker.ServiceClient, renderer: Renderer
) -> None:
    assert_each_fails_alone(
        service, renderer, [(name, bad(), f"'{name}'.*{', '.join(LOSSES)}") for name in ("crossentropy", "PPO", "")]
    )


def test_037_an_unknown_key_of_a_losss_config_is_refused_with_the_known_ones(service: tinker.ServiceClient) -> None:
    client = service.create_lora_training_client(MODEL, rank=4, seed=9).result()
    for loss_fn, config, message in (
        ("ppo", {"clip_hihg_threshold": 2.0}, "'clip_hihg_threshold'.*clip_low_threshold, clip_high_threshold"),
        ("cross_entropy", {"beta": 1.0}, "'beta'.*no config keys"),
        ("dro", {"beta": "small"}, "'beta' is 'small', not a number"),
        ("dro", {"beta": float("inf")}, "'beta' is not finite"),
    ):
        work = [complete(loss_fn)]
        with pytest.raises(tinker.RequestFailedError, match=message) as caught:
            client.forward_backward(work, loss_fn, config).result()  # type: ignore[arg-type]
        assert caught.value.category == "user"


def test_040_a_missing_input_is_named_with_its_datum(service: tinker.ServiceClient, renderer: Renderer) -> None:
    cases = [("cross_entropy", bad(target_tokens=None, weights=floats(5)), "target_tokens")]
    for loss_fn in LOSSES[1:]:
        inputs = complete(loss_fn).loss_fn_inputs
        for missing in inputs:
            rest = {name: tensor for name, tensor in inputs.items() if name != missing}
            cases.append((loss_fn, types.Datum(model_input=bad().model_input, loss_fn_inputs=rest), missing))
    named = [(loss_fn, datum, f"datum 1: {loss_fn} needs loss_fn_inputs '{key}'") for loss_fn, datum, key in cases]
    assert len(named) == 1 + 4 * 3 + 4
    assert_each_fails_alone(service, renderer, named)


def test_041_wrong_lengths_and_ranks_are_named_with_both(service: tinker.ServiceClient, renderer: Renderer) -> None:
    targets = np.zeros(5, np.int64)
    both: dict[str, Any] = {"logprobs": floats(5), "advantages": floats(5)}
    assert_each_fails_alone(
        service,
        renderer,
        [
            (
                "cross_entropy",
                bad(target_tokens=targets[:3]),
                r"datum 1: target_tokens has shape \(3,\), model_input has 5 tokens",
            ),
            (
                "cross_entropy",
                bad(weights=floats(4)),
                r"datum 1: weights has shape \(4,\), target_tokens \(5,\)",
            ),
            (
                "cross_entropy",
                bad(target_tokens=np.zeros((5, 3), np.int64), weights=floats(5, 2)),
                r"datum 1: weights has shape \(5, 2\), target_tokens \(5, 3\)",
            ),
            (
                "cross_entropy",
                bad(target_tokens=np.zeros((5, 1, 1), np.int64)),
                r"datum 1: target_tokens has shape \(5, 1, 1\).*\(5,\) or \(5, K\)",
            ),
            (
                "ppo",
                bad(target_tokens=np.zeros((5, 2), np.int64), logprobs=floats(5, 2), advantages=floats(5, 2)),
                r"datum 1: target_tokens has shape \(5, 2\).*it must be \(5,\)",
            ),
            ("ppo", bad(**both | {"advantages": floats(6)}), r"datum 1: advantages has shape \(6,\)"),
            ("cross_entropy", bad(target_tokens=floats(5)), "datum 1: target_tokens must be int64, got float32"),
            (
                "cross_entropy",
                bad(advantages=floats(5)),
                "datum 1: cross_entropy takes no loss_fn_inputs 'advantages'; it takes target_tokens, weights",
            ),
            ("cross_entropy", bad([]), "datum 1: model_input is empty"),
        ],
    )


def test_041_tokens_outside_the_vocabulary_and_values_that_are_not_finite_are_named(
    service: tinker.ServiceClient, renderer: Renderer
) -> None:
    def targets(*ids: int) -> np.ndarray:
        return np.array(ids, np.int64)

    where = r"datum 1, chunk 0: "
    both: dict[str, Any] = {"logprobs": floats(5), "advantages": floats(5)}
    nan, infinite = floats(5, fill=float("nan")), np.append(floats(4), np.float32("inf"))
    assert_each_fails_alone(
        service,
        renderer,
        [
            ("cross_entropy", bad([1, 2, 384]), where + r"token id 384 is outside the vocabulary \(0 to 383\)"),
            ("cross_entropy", bad([1, -2, 3]), where + "token id -2 is outside the vocabulary"),
            (
                "cross_entropy",
                bad([1, PLACEHOLDER]),
                where + r"token 320 \(<\|image_pad\|>\) is the model",
            ),
            ("cross_entropy", bad(target_tokens=targets(0, 999, 0, 0, 0)), "datum 1: target token 999 is outside"),
            ("cross_entropy", bad(target_tokens=targets(0, -1, 0, 0, 0)), "datum 1: target token -1 is outside"),
            ("cross_entropy", bad(weights=nan), "datum 1: NonFiniteInTensor: weights"),
            ("cross_entropy", bad(weights=infinite), "datum 1: NonFiniteInTensor: weights"),
            ("ppo", bad(**both | {"logprobs": nan}), "datum 1: NonFiniteInTensor: logprobs"),
            ("ppo", bad(**both | {"advantages": -infinite}), "datum 1: NonFiniteInTensor: advantages"),
        ],
    )


def test_042_a_sequence_over_the_context_names_both_numbers(service: tinker.ServiceClient, renderer: Renderer) -> None:
    over = bad([1] * 4097)
    assert_each_fails_alone(
        service,
        renderer,
        [("cross_entropy", over, "datum 1: 4097 tokens, but the context window holds 4096")],
    )
    client = service.create_lora_training_client(MODEL, rank=4, seed=8).result()
    whole = client.forward([bad([1] * 4096)], "cross_entropy").result()
    assert len(whole.loss_fn_outputs[0]["logprobs"].data) == 4096
