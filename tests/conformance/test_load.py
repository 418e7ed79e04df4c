"""Many clients and large bodies at once: all are served, and nothing of it stays behind (items 33, 79, 80).

pytest tests/conformance/test_load.py
"""

import asyncio
import concurrent.futures
from pathlib import Path

import httpx
import pytest
import tinker
from tinker import types

from tests.fake_server import Running
from tinker_server.api_schemas import tinker_wire_pb2 as pb

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
CLIENTS, SAMPLES = 5, 300
SUBMITS, TOKENS = 200, 25_000
PROTOBUF = {"content-type": "application/x-protobuf"}


@pytest.mark.slow
def test_080_five_clients_at_once_are_all_served_and_leave_nothing_behind(tmp_path: Path) -> None:
    server = Running(tmp_path)
    try:

        def ask(_: int) -> int:
            service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
            sampler = service.create_sampling_client(base_model="tiny").result()
            prompt, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)
            futures = [sampler.sample(prompt, 2, params) for _ in range(SAMPLES)]
            return sum(len(future.result().sequences) for future in futures)

        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
            assert list(pool.map(ask, range(CLIENTS))) == [2 * SAMPLES] * CLIENTS
        assert server.backend.tiny.sampler.running == 0
        answer = server.sample(server.sampler())
        assert server.result(answer).status_code == 200, "room is left for more"
    finally:
        server.stop()


@pytest.mark.slow
def test_033_two_hundred_large_submits_at_once_lose_none(tmp_path: Path) -> None:
    """Each of 300 kB, with heartbeats between them, and every result in its place."""
    server = Running(tmp_path, max_body_bytes=32 << 20)
    try:
        models = [server.model() for _ in range(4)]

        def body(number: int) -> bytes:
            model_id, seq_id = models[number % 4], 1 + number // 4
            message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
            num_datums = 1 + number % 3
            for _ in range(num_datums):
                datum = message.data.add()
                datum.model_input.add().encoded_text.tokens = bytes(4 * (TOKENS // num_datums))
                targets = datum.loss_fn_inputs["target_tokens"]
                targets.dense, targets.dtype = bytes(8 * (TOKENS // num_datums)), pb.DTYPE_INT64
            return message.SerializeToString()

        async def load() -> list[httpx.Response]:
            limits = httpx.Limits(max_connections=300)
            headers = server.http.headers
            async with httpx.AsyncClient(
                base_url=f"{server.url}/api/v1", timeout=60, headers=headers, limits=limits
            ) as http:

                async def submit_and_fetch(number: int) -> httpx.Response:
                    submitted = await http.post("/forward_backward", content=body(number), headers=PROTOBUF)
                    assert submitted.status_code == 200, submitted.text
                    beat = await http.post("/session_heartbeat", json={"session_id": models[0].partition(":")[0]})
                    assert beat.status_code == 200
                    while (answer := await http.post("/retrieve_future", json=submitted.json())).status_code == 408:
                        pass
                    return answer

                return await asyncio.gather(*map(submit_and_fetch, range(SUBMITS)))

        for number, answer in enumerate(asyncio.run(load())):
            output = pb.ForwardBackwardOutput.FromString(answer.content)
            assert output.metrics["loss:sum"] == 1 + number % 3
        numbers = [[call for call in server.backend.tiny.trainer.calls if call == ("cross_entropy", m)] for m in models]
        assert [len(calls) for calls in numbers] == [SUBMITS // 4] * 4
    finally:
        server.stop()
