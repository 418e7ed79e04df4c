"""A client that goes on through crashes: it sends again, as the SDK does, and keeps what it was told."""

import re
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.servers import KEY, MODEL

PATIENCE_S = 240
"""An operation without a result for so long is unanswered."""
PAUSE_S = 0.1
LOST = re.compile("again from a checkpoint|process (has )?ended|create (it|the model) again")
"""How a server says that a model went down with its process."""

Json = dict[str, Any]
State = tuple[tuple[int, ...], ...]
"""What makes a model's weights: the steps it took, each with the seeds of its forward_backwards."""


class Unanswered(AssertionError):
    """A request that should have had an answer by now."""


@dataclass
class Told:
    """An operation, and the one answer it may ever have."""

    path: str
    body: Json
    request_id: str
    result: Json
    seconds: float


@dataclass
class Client:
    """Plain HTTP to a server that may be away for a while."""

    base_url: str
    told: list[Told] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._http = httpx.Client(base_url=f"{self.base_url}/api/v1", timeout=60, headers={"X-API-Key": KEY})

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

    def submit(self, path: str, body: Json) -> Told:
        """Accepted; `result` waits for what comes of it."""
        return Told(path, body, self.post(path, body)["request_id"], {}, -time.monotonic())

    def result(self, told: Told) -> Json:
        """What comes of an operation, for good."""
        told.result = self.post("/retrieve_future", {"request_id": told.request_id})
        told.seconds += time.monotonic()
        self.told.append(told)
        return told.result

    def do(self, path: str, body: Json) -> Json:
        return self.result(self.submit(path, body))

    def session(self) -> str:
        session_id: str = self.post("/create_session", {"sdk_version": "0.38.0"})["session_id"]
        return session_id


def is_lost(result: Json) -> bool:
    """Whether a result says that the model is gone. Raises AssertionError for any other failure of the server's."""
    if result.get("category") != "server":
        return False
    assert LOST.search(result["error"]), result
    return True


@dataclass
class Model:
    """A model, and what it must be by what its client was told."""

    client: Client
    session_id: str
    number: int
    seq_id: int = 0
    state: State = ()

    @property
    def model_id(self) -> str:
        return f"{self.session_id}:train:{self.number}"

    def create(self) -> bool:
        """Whether it was made."""
        body = {"session_id": self.session_id, "model_seq_id": self.number, "base_model": MODEL}
        return not is_lost(self.client.do("/create_model", body | {"lora_config": {"rank": 4, "seed": 1}}))

    def submit(self, path: str, /, **body: Any) -> Told:
        self.seq_id += 1
        return self.client.submit(path, {"model_id": self.model_id, "seq_id": self.seq_id} | body)

    def do(self, path: str, /, **body: Any) -> Json:
        return self.client.result(self.submit(path, **body))

    def train(self, seeds: tuple[int, ...]) -> bool:
        """A step with so many forward_backwards, all sent before any is answered; whether the model is still there."""
        passes = [self.submit("/forward_backward", forward_backward_input=batch(seed)) for seed in seeds]
        step = self.submit("/optim_step", adam_params={"learning_rate": 0.01})
        results = [self.client.result(told) for told in passes]
        stepped = self.client.result(step)
        assert stepped.get("category") != "user", stepped
        if is_lost(stepped):
            return False
        assert not any(is_lost(result) for result in results), "a step was taken on part of its gradient"
        self.state += (seeds,)
        return True

    def probe(self) -> list[float] | None:
        """Log probabilities of the probe's tokens; None where the model is lost."""
        result = self.do("/forward", forward_input=batch(0))
        if is_lost(result):
            return None
        logprobs: list[float] = result["loss_fn_outputs"][0]["logprobs"]["data"]
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
