"""What survives when the server stops, and when it is killed."""

import numpy as np
import pytest
import tinker
import tinker.types as types

from tests.e2e.test_training import batch, logprobs_of, step
from tests.factories import MIXED
from tests.servers import MODEL, Server, sdk_input


def test_a_run_resumed_after_a_restart_goes_on_as_if_never_interrupted(tiny_vl, renderer, tmp_path):
    server = Server(tmp_path / "data", {MODEL: tiny_vl}).start()
    service = server.client()
    client = service.create_lora_training_client(MODEL, rank=8, seed=1, user_metadata={"renderer_name": "x"}).result()
    for number in range(2):
        step(client, batch(renderer, number))
    state = client.save_state("two-steps").result().path
    weights = client.save_weights_for_sampler("two-steps").result().path
    model_input = sdk_input(MIXED["one image"])
    scores = service.create_sampling_client(model_path=weights).result().compute_logprobs(model_input).result()
    step(client, batch(renderer, 2))
    uninterrupted = logprobs_of(client, batch(renderer))
    server.kill()

    server.start()
    try:
        with pytest.raises(tinker.RequestFailedError, match="from a checkpoint") as caught:
            client.optim_step(types.AdamParams()).result(timeout=120)
        assert caught.value.category == "server"
        service = server.client()
        resumed = service.create_training_client_from_state_with_optimizer(state).result()
        assert resumed.get_info().lora_rank == 8
        step(resumed, batch(renderer, 2))
        for one, other in zip(logprobs_of(resumed, batch(renderer)), uninterrupted, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)
        sampler = service.create_sampling_client(model_path=weights).result()
        assert sampler.compute_logprobs(model_input).result()[1:] == pytest.approx(scores[1:], abs=1e-5)
        fresh = service.create_training_client_from_state(state).result()
        step(fresh, batch(renderer, 2))
        differences = [
            np.abs(one - other).max()
            for one, other in zip(logprobs_of(fresh, batch(renderer)), uninterrupted, strict=True)
        ]
        assert max(differences) > 1e-4
    finally:
        assert server.stop() == 0
