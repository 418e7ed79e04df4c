"""Sampling, on fakes where the engine does not matter and on the real one where it does; numbers are the checklist's.

pytest tests/conformance/test_sampling.py
"""

import math

import numpy as np
import pytest
import tinker
from tinker import types

from tests.conformance.wire import Wire, paths
from tests.factories import present
from tests.fake_server import Running
from tests.servers import MODEL, Server

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
PROMPT, ONE_TOKEN = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)
LONG = types.ModelInput.from_ints([5, 6, 7, 8])


@pytest.fixture(scope="module")
def real(server: Server) -> tinker.SamplingClient:
    return server.client().create_sampling_client(base_model=MODEL).result()


def first_token(sampler: tinker.SamplingClient) -> int:
    return sampler.sample(PROMPT, 1, ONE_TOKEN).result().sequences[0].tokens[0]


def test_060_inflight_sessions_follow_later_saves_and_snapshots_do_not(client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client("tiny", rank=8).result()
    snapshot = training.save_weights_and_get_sampling_client().result()
    inflight = training.save_weights_and_get_sampling_client(kind="inflight").result()
    assert (first_token(snapshot), first_token(inflight)) == (0, 0)
    for step in (1, 2, 3):
        training.optim_step(types.AdamParams()).result()
        assert first_token(inflight) == step - 1
        later = training.save_weights_and_get_sampling_client(kind="inflight").result()
        assert (first_token(snapshot), first_token(inflight), first_token(later)) == (0, step, step)


@pytest.mark.parametrize("kind", ["sampler_weights", "weights"])
def test_063_and_066_both_kinds_of_saved_weights_can_be_sampled_from(
    wire: Wire, client: tinker.ServiceClient, kind: str
) -> None:
    training = client.create_lora_training_client("tiny", rank=8).result()
    training.optim_step(types.AdamParams()).result()
    save = training.save_state if kind == "weights" else training.save_weights_for_sampler
    path = save("a").result().path
    for create in (client.create_sampling_client, training.create_sampling_client):
        with wire.recording() as requests:
            sampler = create(model_path=path).result()
        sent = [(one.method, one.path.split("/")[1]) for one in requests()]
        assert sent == [("POST", "create_sampling_session"), ("GET", "samplers")]
        assert sampler.get_base_model() == "tiny" and first_token(sampler) == 1


def test_067_and_084_a_base_model_costs_one_request_and_what_is_known_none(
    wire: Wire, client: tinker.ServiceClient
) -> None:
    with wire.recording() as requests:
        sampler = client.create_sampling_client(base_model="tiny").result()
    assert paths(requests()) == ["/create_sampling_session"]
    with wire.recording() as requests:
        assert sampler.get_base_model() == "tiny" and sampler.get_sampler_handle()
    assert requests() == [] and first_token(sampler) == 100


def test_084_a_clone_by_handle_samples_too(client: tinker.ServiceClient) -> None:
    handle = client.create_sampling_client(base_model="tiny").result().get_sampler_handle()
    clone = tinker.SamplingClient.from_sampler_handle(handle, api_key="tml-test")
    assert clone.get_base_model() == "tiny" and first_token(clone) == 100


def test_068_what_cannot_be_sampled_from_is_refused(client: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.NotFoundError):
        client.create_sampling_client(model_path="tinker://nobody/sampler_weights/a").result()
    with pytest.raises(tinker.NotFoundError):
        client.create_sampling_client(model_path="tinker://nobody/external_weights/a").result()
    with pytest.raises(tinker.NotFoundError, match="served: tiny"):
        client.create_sampling_client(base_model="other").result()


def test_069_asample_takes_weights_without_a_session(fake: Running) -> None:
    submitted = fake.sample(None, None, base_model="tiny")  # type: ignore[arg-type]
    assert submitted.status_code == 200 and len(submitted.json()["sample_sequence_ids"]) == 1
    assert fake.result(submitted).headers["content-type"] == "application/x-protobuf"
    both = fake.sample(fake.sampler(), 0, base_model="tiny")
    neither = fake.sample(None, None)  # type: ignore[arg-type]
    assert (both.status_code, neither.status_code) == (400, 400)


def test_085_weights_deleted_under_a_session_fail_its_samples_with_a_text(
    fake: Running, client: tinker.ServiceClient
) -> None:
    training = client.create_lora_training_client("tiny", rank=8).result()
    path = training.save_weights_for_sampler("gone").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    tinker.RestClient(base_url=fake.url, api_key="tml-test").delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.RequestFailedError, match="deleted") as caught:
        first_token(sampler)
    assert caught.value.category == "user"


def test_069_sample_returns_n_sequences_with_logprobs(real: tinker.SamplingClient) -> None:
    sampled = real.sample(LONG, 3, types.SamplingParams(max_tokens=5, stop=[])).result()
    assert len(sampled.sequences) == 3
    for sequence in sampled.sequences:
        assert len(sequence.tokens) == len(present(sequence.logprobs)) == 5 and sequence.stop_reason == "length"
        assert sequence.sequence_id


def test_071_max_tokens_past_the_context_names_the_numbers(real: tinker.SamplingClient) -> None:
    with pytest.raises(tinker.BadRequestError, match=r"4 \+ 10000000 > \d+"):
        real.sample(LONG, 1, types.SamplingParams(max_tokens=10**7)).result()


def test_073_last_n_leaves_the_rest_undefined(real: tinker.SamplingClient) -> None:
    scores = real.sample(LONG, 1, ONE_TOKEN, include_prompt_logprobs=True, prompt_logprobs_last_n=2).result()
    assert present(scores.prompt_logprobs)[:2] == [None, None] and None not in present(scores.prompt_logprobs)[2:]
    with pytest.raises(tinker.BadRequestError, match="prompt_logprobs_last_n is 9"):
        real.sample(LONG, 1, ONE_TOKEN, include_prompt_logprobs=True, prompt_logprobs_last_n=9).result()


def test_074_topk_tables_are_dense(real: tinker.SamplingClient) -> None:
    scores = real.sample(
        LONG, 1, types.SamplingParams(max_tokens=2, stop=[]), topk_prompt_logprobs=3, topk_sample_logprobs=2
    ).result()
    assert (
        present(scores.topk_prompt_logprobs)[0] is None
        and [len(present(row)) for row in present(scores.topk_prompt_logprobs)[1:]] == [3] * 3
    )
    assert present(scores.sequences[0].topk_logprobs_np).token_ids.shape == (2, 2)


def test_075_target_logprobs_come_back_in_the_layout_asked(real: tinker.SamplingClient) -> None:
    dense = types.TensorData.from_numpy(np.array([[6, -1], [7, 3], [8, 4]]))
    sparse = types.TensorData(
        data=[6, 4], dtype="int64", shape=[3, 2], sparse_crow_indices=[0, 1, 1, 2], sparse_col_indices=[0, 1]
    )
    first = real.sample(LONG, 1, ONE_TOKEN, include_prompt_logprobs=True, target_prompt_logprobs=dense).result()
    second = real.sample(LONG, 1, ONE_TOKEN, target_prompt_logprobs=sparse).result().target_prompt_logprobs
    table = np.asarray(present(first.target_prompt_logprobs).data).reshape(3, 2)
    np.testing.assert_allclose(table[:, 0], [present(one) for one in present(first.prompt_logprobs)[1:]], atol=1e-4)
    assert table[0, 1] == 0 and (table[1:] < 0).all()
    assert present(second).sparse_crow_indices == [0, 1, 1, 2] and present(second).sparse_col_indices == [0, 1]
    np.testing.assert_allclose(present(second).data, [table[0, 0], table[2, 1]], atol=1e-4)


def test_075_alternative_tokens_are_drawn_at_every_position(real: tinker.SamplingClient) -> None:
    drawn = real.sample(LONG, 1, ONE_TOKEN, prompt_alt_tokens_k=4).result().prompt_alt_tokens
    assert present(drawn).tokens.shape == present(drawn).logprobs.shape == [3, 4]
    assert all(math.isfinite(value) and value < 0 for value in np.asarray(present(drawn).logprobs.data))


def test_077_an_empty_prompt_is_refused_and_one_token_is_enough(real: tinker.SamplingClient) -> None:
    with pytest.raises(tinker.BadRequestError, match="empty"):
        real.sample(types.ModelInput(chunks=[]), 1, ONE_TOKEN).result()
    one = real.sample(types.ModelInput.from_ints([5]), 1, ONE_TOKEN, include_prompt_logprobs=True).result()
    assert one.prompt_logprobs == [None] and len(one.sequences[0].tokens) == 1


def test_078_an_image_by_location_is_refused(real: tinker.SamplingClient) -> None:
    pointer = types.ImageAssetPointerChunk(format="png", location="file:///etc/passwd", expected_tokens=1)
    with pytest.raises(tinker.BadRequestError, match="image_asset_pointer chunks are not supported"):
        real.sample(types.ModelInput(chunks=[pointer]), 1, ONE_TOKEN).result()
