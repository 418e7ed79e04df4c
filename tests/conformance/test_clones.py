"""Sampling clients that are copied to other processes; numbers are the checklist's.

pytest tests/conformance/test_clones.py
"""

import pickle
import subprocess
import sys
import time

import pytest
import tinker
from tinker import types

from tests.conformance.wire import Seen, Wire
from tests.factories import present
from tests.fake_server import Running

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
PROMPT, ONE_TOKEN = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)
SPAN = 10**9
"""Numbers of samples per client of a sampling session."""
BEAT_S = 10
CHILD = f"""
import pickle, sys, time
import tinker
from tinker import types

given = sys.stdin.buffer.read()
if sys.argv[1] == "pickle":
    sampler = pickle.loads(given)
else:
    sampler = tinker.SamplingClient.from_sampler_handle(given.decode(), api_key="tml-test")
for _ in range(2):
    prompt, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)
    assert sampler.sample(prompt, 1, params).result().sequences[0].tokens == [100]
time.sleep({BEAT_S} + 2)
"""


def samples(wire: Wire, sampler_id: str) -> list[Seen]:
    return [one for one in wire.requests if one.path == "/asample" and one.json()["sampling_session_id"] == sampler_id]


@pytest.mark.slow
def test_081_copies_in_other_processes_sample_under_numbers_of_their_own(
    wire: Wire, client: tinker.ServiceClient
) -> None:
    sampler = client.create_sampling_client(base_model="tiny").result()
    assert sampler.sample(PROMPT, 1, ONE_TOKEN).result().sequences[0].tokens == [100]
    first = next(one for one in reversed(wire.requests) if one.path == "/asample")
    sampler_id, session_id = first.json()["sampling_session_id"], client.holder.get_session_id()
    assert first.json()["seq_id"] == 0
    began, children = time.monotonic(), []
    for form, given in (("pickle", pickle.dumps(sampler)), ("handle", sampler.get_sampler_handle().encode())):
        child = subprocess.Popen([sys.executable, "-c", CHILD, form], stdin=subprocess.PIPE)
        present(child.stdin).write(given)
        present(child.stdin).close()
        children.append(child)
    assert [child.wait(60) for child in children] == [0, 0]
    elapsed_s = time.monotonic() - began
    numbers = [one.json()["seq_id"] for one in samples(wire, sampler_id)[1:]]
    clones = {number // SPAN for number in numbers}
    assert len(numbers) == len(set(numbers)) == 4 and len(clones) == 2
    assert all(1 <= clone <= SPAN for clone in clones)
    assert all(one.status == 200 for one in samples(wire, sampler_id))
    beats = [
        one
        for one in wire.requests
        if one.path == "/session_heartbeat" and one.json()["session_id"] == session_id and one.arrived > began
    ]
    assert len(beats) >= 2 + elapsed_s // (BEAT_S + 0.1), "one of each copy, besides our own"
    assert {one.status for one in beats} == {200}


def test_081_a_copy_joins_if_the_clients_configuration_says_so(wire: Wire, client: tinker.ServiceClient) -> None:
    config, before = client.holder.get_client_config(), len(wire.requests)
    client.holder._client_config = config.model_copy(update={"sample_join_sampling_session": True})
    try:
        sampler = client.create_sampling_client(base_model="tiny").result()
        clones = [pickle.loads(pickle.dumps(sampler)) for _ in range(2)]
        for clone in clones:
            assert clone.sample(PROMPT, 1, ONE_TOKEN).result().sequences[0].tokens == [100]
    finally:
        client.holder._client_config = config
    joins = [one for one in wire.requests[before:] if one.path == "/join_sampling_session"]
    assert [one.status for one in joins] == [200, 200]
    numbers = [one.json()["seq_id"] for one in samples(wire, joins[0].json()["sampling_session_id"])]
    assert len({number // SPAN for number in numbers}) == 2 and min(numbers) >= SPAN


def test_081_clients_that_join_get_numbers_of_their_own(fake: Running) -> None:
    sampler_id = fake.sampler()
    numbers = {
        fake.post("/join_sampling_session", sampling_session_id=sampler_id).json()["client_counter"] for _ in range(20)
    }
    assert len(numbers) == 20 and min(numbers) >= 1
    assert fake.sample(sampler_id, max(numbers) * SPAN).status_code == 200
    assert fake.post("/join_sampling_session", sampling_session_id="nothing").status_code == 404
