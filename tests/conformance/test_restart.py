"""Runs and results survive a stop and a kill of the server; numbers are the checklist's.

A client that is killed (64) is in test_silent_clients.py.

pytest tests/conformance/test_restart.py
"""

import time

import httpx
import numpy as np
import pytest
import tinker.types as types

from tests.factories import MIXED, present
from tests.servers import KEY, MODEL, Server, sdk_datum, sdk_input
from tests.training import batch, logprobs_of, step


def test_065_a_run_resumed_after_a_restart_goes_on_as_if_never_interrupted(tiny_vl, renderer, tmp_path):
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
    model_id, long = client.model_id, types.SamplingParams(max_tokens=300, stop=[])
    running = [
        client.forward_backward([sdk_datum(item) for item in batch(renderer, 3)] * 50, "cross_entropy")
        for _ in range(8)
    ]
    sample = service.create_sampling_client(model_path=weights).result().sample(model_input, 1, long)
    time.sleep(0.5)  # they are accepted by now, and far from done
    server.kill()

    server.start()
    try:
        assert len(sample.result(timeout=120).sequences[0].tokens) == 300
        for future in running:
            assert len(future.result(timeout=240).loss_fn_outputs) == 50 * len(batch(renderer, 3))
        info = httpx.post(f"{server.base_url}/api/v1/get_info", json={"model_id": model_id}, headers={"X-API-Key": KEY})
        assert info.status_code == 200
        for one, other in zip(logprobs_of(client, batch(renderer)), uninterrupted, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)
        assert present(client.optim_step(types.AdamParams()).result(timeout=120).metrics)["grad_norm"] > 0
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
