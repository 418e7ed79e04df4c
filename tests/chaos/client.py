"""A client that goes on through crashes: it sends again, as the SDK does, and keeps every answer."""

import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.servers import KEY, MODEL

PATIENCE_S = 240
"""An operation without a result for so long is unanswered."""
PAUSE_S = 0.1

Json = dict[str, Any]
State = tuple[tuple[int, ...], ...]
"""The origin of a model's weights: its steps, each with the seeds of its forward_backwards."""


class Unanswered(AssertionError):
    """A request that should have had an answer by now."""


@dataclass(eq=False)
class Request:
    """An operation, and the one answer it may ever have."""

    path: str
    body: Json
    request_id: str
    result: Json
    seconds: float
    at_s: float = 0
    """When the result was there, by the monotonic clock."""


@dataclass
class Client:
    """Plain HTTP to a server that may be away for a while."""

    base_url: str
    key: str = KEY
    answered: list[Request] = field(default_factory=list)
    under_way: list[Request] = field(default_factory=list)
    """Submitted requests without a result."""

    def __post_init__(self) -> None:
        self._http = httpx.Client(base_url=f"{self.base_url}/api/v1", timeout=60, headers={"X-API-Key": self.key})

    def get(self, path: str) -> Json:
        answer: Json = self._http.get(path).raise_for_status().json()
        return answer

    def post(self, path: str, body: Json) -> Json:
        """The answer, however often it has to be asked for."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                answer = self._http.post(path, json=body)
            except httpx.TransportError:
                time.sleep(PAUSE_S)
                continue
            if answer.status_code in (408, 429) or answer.status_code >= 500:
                time.sleep(0 if answer.status_code == 408 else PAUSE_S)
                continue
            assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
            found: Json = answer.json()
            return found
        raise Unanswered(f"{path} {body}")

    def submit(self, path: str, body: Json) -> Request:
        """Accepted; `result` waits for what comes of it."""
        request = Request(path, body, "", {}, -time.monotonic())
        self.under_way.append(request)
        request.request_id = self.post(path, body)["request_id"]
        return request

    def result(self, request: Request) -> Json:
        """The final outcome of an operation."""
        request.result = self.post("/retrieve_future", {"request_id": request.request_id})
        request.at_s = time.monotonic()
        request.seconds += request.at_s
        self.answered.append(request)
        self.under_way.remove(request)
        return request.result

    def do(self, path: str, body: Json) -> Json:
        return self.result(self.submit(path, body))

    def session(self) -> str:
        session_id: str = self.post("/create_session", {"sdk_version": "0.38.0"})["session_id"]
        return session_id


def well(result: Json) -> Json:
    """A result that is no failure."""
    assert "error" not in result, result
    return result


@dataclass
class Model:
    """A model, and its expected state by its client's answers."""

    client: Client
    session_id: str
    number: int
    seq_id: int = 0
    state: State = ()

    @property
    def model_id(self) -> str:
        return f"{self.session_id}:train:{self.number}"

    def create(self) -> None:
        body = {"session_id": self.session_id, "model_seq_id": self.number, "base_model": MODEL}
        well(self.client.do("/create_model", body | {"lora_config": {"rank": 4, "seed": 1}}))

    def submit(self, path: str, /, **body: Any) -> Request:
        self.seq_id += 1
        return self.client.submit(path, {"model_id": self.model_id, "seq_id": self.seq_id} | body)

    def do(self, path: str, /, **body: Any) -> Json:
        return well(self.client.result(self.submit(path, **body)))

    def train(self, seeds: tuple[int, ...]) -> None:
        """A step with so many forward_backwards, all sent before any is answered."""
        submitted = [self.submit("/forward_backward", forward_backward_input=batch(seed)) for seed in seeds]
        submitted.append(self.submit("/optim_step", adam_params={"learning_rate": 0.01}))
        for one in submitted:
            well(self.client.result(one))
        self.state += (seeds,)

    def load(self, path: str, state: State) -> None:
        self.do("/load_weights", path=path, optimizer=True)
        self.state = state

    def probe(self) -> list[float]:
        """Log probabilities of the probe's tokens."""
        logprobs: list[float] = self.do("/forward", forward_input=batch(0))["loss_fn_outputs"][0]["logprobs"]["data"]
        return logprobs


def tokens(seed: int) -> list[int]:
    """Ten tokens; seed 0 are the probe's."""
    return [(7 * seed + 31 * place * place + 11 * place * (seed + 1)) % 300 for place in range(10)]


def batch(seed: int) -> Json:
    """One datum that learns to foresee its own tokens."""
    text = tokens(seed)
    chunk = {"tokens": text[:-1], "type": "encoded_text"}
    targets = {"data": text[1:], "dtype": "int64", "shape": [len(text) - 1]}
    datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": {"target_tokens": targets}}
    return {"data": [datum], "loss_fn": "cross_entropy"}
