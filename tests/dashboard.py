"""Somebody who looks at the dashboard of a server on fakes, without a browser; and runs for them to look at."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.fake_server import Running, forward_backward_body
from tinker_server.auth import keys

PROTOBUF = {"content-type": "application/x-protobuf"}


class Owner:
    """One key: its runs by the API, and its pages."""

    def __init__(self, server: Running, key: str) -> None:
        self.server = server
        self.key = key
        self.pages = httpx.Client(base_url=server.url, timeout=20)
        self.token = ""

    def __enter__(self) -> "Owner":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.pages.close()

    def sign_in(self) -> "Owner":
        answer = self.pages.post("/login", data={"key": self.key})
        assert answer.status_code == 303, answer.text
        return self

    def get(self, path: str) -> httpx.Response:
        return self.pages.get(path)

    def change(self, method: str, path: str, **data: object) -> httpx.Response:
        """As our own page does it."""
        if not self.token:
            found = re.search(r'data-token="([0-9a-f]{64})"', self.get("/").text)
            assert found is not None
            self.token = found[1]
        return self.pages.request(method, path, data=data or None, headers={"x-csrf-token": self.token})

    def post(self, path: str, /, **body: Any) -> Any:
        """By the API, until the result of what it queues is there."""
        headers = {"x-api-key": self.key, "accept": "application/json"}
        answer = self.server.http.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return self._result(answer)

    def _result(self, answer: httpx.Response) -> Any:
        found = answer.json()
        headers = {"x-api-key": self.key, "accept": "application/json"}
        if "request_id" not in found:
            return found
        while (
            polled := self.server.http.post(
                "/retrieve_future", json={"request_id": found["request_id"]}, headers=headers
            )
        ).status_code == 408:
            pass
        return polled.json()

    def new_run(self, metadata: dict[str, str] | None = None) -> str:
        session_id = self.post("/create_session", sdk_version="0.38.0")["session_id"]
        made = self.post(
            "/create_model",
            session_id=session_id,
            model_seq_id=0,
            base_model="tiny",
            lora_config={"rank": 8},
            user_metadata=metadata,
        )
        return str(made["model_id"])

    def train(self, run_id: str, numbers: range) -> None:
        """A batch and a step for each number."""
        for number in numbers:
            body = forward_backward_body(run_id, 2 * number + 1)
            headers = {**PROTOBUF, "x-api-key": self.key}
            self._result(self.server.http.post("/forward_backward", content=body, headers=headers))
            step = {"model_id": run_id, "seq_id": 2 * number + 2}
            self.post("/optim_step", **step, adam_params={"learning_rate": 0.25})

    def train_and_sample(
        self, run_id: str, steps: range, *chunks: dict[str, Any], tokens: Sequence[int] = (1, 2)
    ) -> None:
        """As in reinforcement learning: each step begins with two samples of its weights."""
        prompt = {"chunks": [*chunks, {"type": "encoded_text", "tokens": list(tokens)}]}
        for step in steps:
            name = f"at-{step}"
            saved = self.post("/save_weights_for_sampler", model_id=run_id, seq_id=3 * step + 1, path=name)
            sample = {"model_path": saved["path"], "prompt": prompt, "sampling_params": {"max_tokens": 4}}
            for _ in range(2):
                self.post("/asample", **sample)
            body = forward_backward_body(run_id, 3 * step + 2)
            headers = {**PROTOBUF, "x-api-key": self.key}
            self._result(self.server.http.post("/forward_backward", content=body, headers=headers))
            self.post("/optim_step", model_id=run_id, seq_id=3 * step + 3, adam_params={"learning_rate": 0.25})

    def train_on(self, body: bytes) -> None:
        """On a batch, without a step."""
        headers = {**PROTOBUF, "x-api-key": self.key}
        self._result(self.server.http.post("/forward_backward", content=body, headers=headers))

    def report(self, run_id: str, step: int, **metrics: float) -> httpx.Response:
        """Metrics of the client's own."""
        body = {"step": step, "metrics": metrics}
        url = f"/training_runs/{run_id}/metrics"
        return self.server.http.post(url, json=body, headers={"x-api-key": self.key})

    def save(self, run_id: str, seq_id: int, name: str) -> None:
        self.post("/save_weights", model_id=run_id, seq_id=seq_id, path=name)

    def chat(self, said: str, **fields: Any) -> None:
        """With the base model, which says this."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "user": said, **fields}
        url = f"{self.server.url}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers={"x-api-key": self.key}, timeout=20)
        assert answer.status_code == 200, answer.text

    def sample(self, *chunks: dict[str, Any], tokens: Sequence[int] = (1, 2, 3)) -> None:
        """From the base model: what follows these tokens and chunks."""
        prompt = {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}, *chunks]}
        self.post("/asample", base_model="tiny", prompt=prompt, sampling_params={"max_tokens": 4, "seed": 7})


def with_keys(folder: Path, *names: str, **settings: Any) -> tuple[Running, list[str]]:
    """A server, and a key of each owner."""
    made = [keys.add(folder / "keys", name) for name in names]
    return Running(folder / "data", keys_file=folder / "keys", **settings), made


@contextmanager
def alice_and_bob(folder: Path) -> Iterator[tuple[Owner, Owner]]:
    """Two owners of a server, signed in."""
    server, made = with_keys(folder, "alice", "bob")
    with Owner(server, made[0]) as alice, Owner(server, made[1]) as bob:
        yield alice.sign_in(), bob.sign_in()
    server.stop()
