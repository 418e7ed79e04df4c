"""A server in a thread of the test, on a backend of fakes, and small requests to it."""

import asyncio
import math
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
from starlette.types import ASGIApp

from tests.fakes import FakeBackend
from tinker_server.__main__ import listen
from tinker_server.api_schemas import tinker_wire_pb2 as pb
from tinker_server.app import create_app
from tinker_server.observability.progress import Processes
from tinker_server.settings import Settings
from tinker_server.web.server import Server

if TYPE_CHECKING:  # the SDK imports torch
    import tinker
    from tinker import types

HOLD_S = 0.3
"""Time for which a server of fakes holds a poll."""


class Running:
    """A server in a thread. `around` may put something in front of it, such as a record or a proxy."""

    def __init__(
        self,
        data_dir: Path,
        *,
        around: Callable[[ASGIApp], ASGIApp] | None = None,
        backend: FakeBackend | None = None,
        clock: Callable[[], float] | None = None,
        is_awaited: bool = True,
        **settings: Any,
    ) -> None:
        """`is_awaited`: return once the server is ready."""
        self.backend = backend or FakeBackend()
        self.processes = Processes()
        self._around = around
        self._clock = clock
        values = {"poll_hold_s": HOLD_S, "gap_grace_s": 1.5, "max_body_bytes": 1 << 20, "drain_s": 1} | settings
        self.settings = Settings(data_dir=data_dir, **values)
        self._ready = threading.Event()
        self._listener = listen("127.0.0.1", 0)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        if is_awaited:
            self.wait_until_ready()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        headers = {"accept": "application/x-protobuf, application/json", "x-api-key": "tml-test"}
        self.http = httpx.Client(base_url=f"{self.url}/api/v1", timeout=20, headers=headers)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        app = self.app = create_app(self.settings, self.backend, self._clock, self.processes.note)
        self._server = Server(app if self._around is None else self._around(app), self.processes)
        async with self._server.listening(self._listener), app.router.lifespan_context(app):
            self._server.open(app.state.services.drain)
            self._ready.set()
            await self._server.wait_closed()

    def restart_trainer(self) -> None:
        """End the trainer of `tiny`, which is there again at once, and wait until this is recorded."""
        history, trainer = self.app.state.services.machine_history, self.backend.tiny.trainer

        async def restart() -> None:
            before = len(await history.trainer_restarts("tiny", 0, math.inf))
            await trainer.die()
            async with asyncio.timeout(20):
                while len(await history.trainer_restarts("tiny", 0, math.inf)) == before:  # noqa: ASYNC110 - nobody sets an event
                    await asyncio.sleep(0.02)

        asyncio.run_coroutine_threadsafe(restart(), self.loop).result(30)

    def wait_until_ready(self) -> None:
        assert self._ready.wait(60)

    def stop(self) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive() and not self.backend.running

    def post(self, path: str, /, **body: object) -> httpx.Response:
        return self.http.post(path, json=body)

    def result(self, submitted: httpx.Response) -> httpx.Response:
        assert submitted.status_code == 200, submitted.text
        while (answer := self.post("/retrieve_future", request_id=submitted.json()["request_id"])).status_code == 408:
            pass
        return answer

    def session(self) -> str:
        session_id: str = self.post("/create_session", sdk_version="0.38.0").json()["session_id"]
        return session_id

    def sampler(self, session_id: str | None = None, model_path: str | None = None) -> str:
        """A sampling session on the base model, or on saved weights."""
        created = self.post(
            "/create_sampling_session",
            session_id=session_id or self.session(),
            sampling_session_seq_id=0,
            **({"base_model": "tiny"} if model_path is None else {"model_path": model_path}),
        )
        sampler_id: str = created.json()["sampling_session_id"]
        return sampler_id

    def sample(self, sampler_id: str, seq_id: int = 0, **fields: object) -> httpx.Response:
        body = {
            "sampling_session_id": sampler_id,
            "seq_id": seq_id,
            "prompt": {"chunks": [{"tokens": [1], "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 1},
        }
        return self.post("/asample", **(body | fields))

    def set_gate(self, gate: asyncio.Event, *, is_open: bool) -> None:
        """Let the fake work, or hold it."""
        self.loop.call_soon_threadsafe(gate.set if is_open else gate.clear)

    def model(self) -> str:
        submitted = self.post(
            "/create_model", session_id=self.session(), model_seq_id=0, base_model="tiny", lora_config={"rank": 8}
        )
        model_id: str = self.result(submitted).json()["model_id"]
        return model_id


def datum(length: int = 3) -> "types.Datum":
    from tinker import types

    return types.Datum(
        model_input=types.ModelInput.from_ints(list(range(length))),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.arange(length)),
            "weights": types.TensorData.from_numpy(np.ones(length, np.float32)),
        },
    )


def forward_backward_body(
    model_id: str, seq_id: int, tokens: bytes = b"\1\0\0\0", loss_fn: str = "cross_entropy"
) -> bytes:
    chunk = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=tokens))
    target = pb.Tensor(dtype=pb.DTYPE_INT64, shape=[1], dense=b"\1" + b"\0" * 7)
    one = pb.Datum(model_input=[chunk], loss_fn_inputs={"target_tokens": target})
    return pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, data=[one], loss_fn=loss_fn).SerializeToString()


def policy_body(model_id: str, seq_id: int, prompt: list[int], answers: list[tuple[list[int], float]]) -> bytes:
    """A batch of reinforcement learning: a prompt, and its answers with their advantages."""
    data = []
    for answer, advantage in answers:
        num_before, num_answer = len(prompt) - 1, len(answer)
        tensors = {
            "target_tokens": np.array([0] * num_before + answer, "<i8"),
            "advantages": np.array([0] * num_before + [advantage] * num_answer, "<f4"),
            "logprobs": np.array([0] * num_before + [-1] * num_answer, "<f4"),
        }
        tokens = np.array(prompt + answer[:-1], "<i4").tobytes()
        datum = pb.Datum(model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=tokens))])
        for name, values in tensors.items():
            dtype = pb.DTYPE_INT64 if values.dtype == "<i8" else pb.DTYPE_FLOAT32
            tensor = pb.Tensor(dtype=dtype, shape=[len(values)], dense=values.tobytes())
            datum.loss_fn_inputs[name].CopyFrom(tensor)
        data.append(datum)
    request = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, data=data, loss_fn="importance_sampling")
    return request.SerializeToString()


def session_of(training: "tinker.TrainingClient") -> str:
    return training.model_id.partition(":train:")[0]


def fetch(url: str) -> bytes:
    """Without any header of the SDK."""
    with urllib.request.urlopen(url, timeout=20) as answer:
        body: bytes = answer.read()
        return body
