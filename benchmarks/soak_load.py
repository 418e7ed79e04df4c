"""The mixed work of `soak.py`: tenants that train, sample, chat, save, pause, end sessions, look on and send rubbish.

Nothing that they make is kept for long: weights have no name, or are deleted, and sessions end.
"""

import base64
import io
import random
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import httpx
from PIL import Image

from tests.chaos.client import Client, Model, batch, tokens, well
from tests.servers import MODEL

PAUSE_S = 0.2
"""Between two turns of a tenant: two cores are for the server, and not for what waits for it."""
SLEEP_S = 90
"""A sleeper is silent for longer than `session_timeout_s`: its model goes to disk and comes back."""
PAGES = ("/", "/runs", "/machine", "/machine/now", "/samples", "/checkpoints")
SIDE, IMAGE_TOKENS = 160, 25


class Work(Protocol):
    """One tenant's kind of work, done turn after turn."""

    client: Client

    @abstractmethod
    def turn(self) -> None:
        """Do a little of it; raises if the server does anything but what it should."""


class Trainer:
    """Trains one model on text and pictures, and samples from its latest weights, which have no name."""

    def __init__(self, client: Client) -> None:
        self.client, self._turns = client, 0
        self._model = Model(client, client.session(), 0)
        self._model.create()

    def turn(self) -> None:
        """Take a step on text and one on a new picture, then hand the weights over and sample."""
        self._turns += 1
        self._model.train((self._turns % 7 + 1, 8))
        jpeg = new_picture()
        self._model.do("/forward_backward", forward_backward_input=picture_batch(jpeg))
        self._model.do("/optim_step", adam_params={"learning_rate": 1e-4})
        saved = self._model.do("/save_weights_for_sampler", sampling_session_seq_id=self._turns)
        prompt = {"chunks": [*picture_chunks(jpeg), text_chunk(tokens(self._turns % 9))]}
        body = {"sampling_session_id": saved["sampling_session_id"], "seq_id": 0, "prompt": prompt, "num_samples": 4}
        well(self.client.do("/asample", body | {"sampling_params": {"max_tokens": 8, "temperature": 1.0}}))


class Churner:
    """Makes a session, a model and a checkpoint, loads it again, and ends all of it."""

    def __init__(self, client: Client, http: httpx.Client) -> None:
        self.client, self._http = client, http

    def turn(self) -> None:
        """Live one short life."""
        session_id = self.client.session()
        model = Model(self.client, session_id, 0)
        model.create()
        model.train((1, 2))
        saved = [model.do(f"/{kind}", path="latest")["path"] for kind in ("save_weights", "save_weights_for_sampler")]
        model.load(saved[0], model.state)
        for path in saved:
            run_id, _, name = path.removeprefix("tinker://").partition("/")
            self._http.delete(f"/api/v1/training_runs/{run_id}/checkpoints/{name}").raise_for_status()
        reason = {"reason": {"type": "success"}}
        self._http.post(f"/api/v1/sessions/{session_id}/finish", json=reason).raise_for_status()


class Sleeper:
    """Takes a step, then is silent until its model has gone to disk."""

    def __init__(self, client: Client, may_go_on: Callable[[], bool]) -> None:
        self.client, self._may_go_on = client, may_go_on
        self._model = Model(client, client.session(), 0)
        self._model.create()

    def turn(self) -> None:
        """Wake the model, and leave it again."""
        self._model.train((3,))
        asleep_until = time.monotonic() + SLEEP_S
        while time.monotonic() < asleep_until and self._may_go_on():
            time.sleep(PAUSE_S)


class Chatter:
    """Talks about pictures through OpenAI's endpoint, and hangs up on one stream of three."""

    def __init__(self, client: Client, http: httpx.Client) -> None:
        self.client, self._http, self._turns = client, http, 0

    def turn(self) -> None:
        """Hold one chat."""
        self._turns += 1
        url = f"data:image/jpeg;base64,{base64.b64encode(new_picture()).decode()}"
        asked = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What colour is it?"}]
        body = {"model": MODEL, "messages": [{"role": "user", "content": asked}], "max_tokens": 8, "stream": True}
        with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            for _ in answer.iter_lines():
                if self._turns % 3 == 0:
                    break


class Onlooker:
    """Reads the dashboard and the metrics, and sends requests that have to be refused."""

    def __init__(self, client: Client, http: httpx.Client, key: str) -> None:
        self.client, self._http = client, http
        http.post("/login", data={"key": key})

    def turn(self) -> None:
        """Look at everything once, then be refused."""
        for page in (*PAGES, "/metrics"):
            self._http.get(page).raise_for_status()
        refused = [
            self._http.post("/api/v1/forward_backward", content=b"{"),
            self._http.post("/api/v1/asample", json={"base_model": "nobody/nothing"}),
            self._http.post("/api/v1/retrieve_future", json={"request_id": f"unknown-{random.random()}"}),
        ]
        assert all(400 <= answer.status_code < 500 for answer in refused), [one.status_code for one in refused]


def new_picture() -> bytes:
    """A JPEG of noise that was never sent before, large enough to be stored apart from its body."""
    buffer = io.BytesIO()
    Image.frombytes("RGB", (SIDE, SIDE), random.randbytes(3 * SIDE * SIDE)).save(buffer, "JPEG")
    return buffer.getvalue()


def text_chunk(token_ids: list[int]) -> dict[str, Any]:
    """Tokens as the wire has them."""
    return {"tokens": token_ids, "type": "encoded_text"}


def picture_chunks(jpeg: bytes) -> list[dict[str, Any]]:
    """A picture between a token before it and one behind it."""
    image = {"data": base64.b64encode(jpeg).decode(), "format": "jpeg", "type": "image"}
    return [text_chunk([5]), image, text_chunk([6])]


def picture_batch(jpeg: bytes) -> dict[str, Any]:
    """One datum: a picture, and the text that follows it."""
    found = batch(1)
    (datum,) = found["data"]
    chunks = [*picture_chunks(jpeg), *datum["model_input"]["chunks"]]
    targets = [0] * (2 + IMAGE_TOKENS) + datum["loss_fn_inputs"]["target_tokens"]["data"]
    datum["model_input"]["chunks"] = chunks
    datum["loss_fn_inputs"]["target_tokens"] = {"data": targets, "dtype": "int64", "shape": [len(targets)]}
    return found


class Tenants:
    """Threads, each with its owner's key, that work until the end of the block. Raises what one of them met."""

    def __init__(self, base_url: str, keys: list[str]) -> None:
        """`keys`: of four owners."""
        self._base_url, self._keys = base_url, keys
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []
        self.num_turns = dict.fromkeys(("trainer", "other trainer", "churner", "sleeper", "chatter", "onlooker"), 0)
        self.num_operations = 0

    def __enter__(self) -> "Tenants":
        a, b, c, d = self._keys
        works: list[Callable[[], Work]] = [
            lambda: Trainer(self._client(a)),
            lambda: Trainer(self._client(b)),
            lambda: Churner(self._client(c), self._http(c)),
            lambda: Sleeper(self._client(c), self.may_go_on),
            lambda: Chatter(self._client(d), self._http(d)),
            lambda: Onlooker(self._client(d), self._http(d), d),
        ]
        for name, work in zip(self.num_turns, works, strict=True):
            self._threads.append(threading.Thread(target=self._run, args=(name, work), daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def may_go_on(self) -> bool:
        """Return whether the block has not ended, and no tenant has failed."""
        return not self._ended.is_set() and not self._errors

    def raise_errors(self) -> None:
        """Raise the first error that a tenant met."""
        if self._errors:
            raise self._errors[0]

    def _client(self, key: str) -> Client:
        return Client(self._base_url, key)

    def _http(self, key: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}", "X-API-Key": key}
        return httpx.Client(base_url=self._base_url, headers=headers, timeout=120)

    def _run(self, name: str, make: Callable[[], Work]) -> None:
        try:
            work = make()
            while self.may_go_on():
                work.turn()
                self.num_turns[name] += 1
                self.num_operations += len(work.client.answered)
                work.client.answered.clear()
                time.sleep(PAUSE_S)
        except BaseException as error:  # noqa: BLE001 - raised again by whoever measures
            self._errors.append(error)
