"""One client's mixed work on one model, and what it saw of the model's weights on the way."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.client import Client, Model, State, tokens, well

ACTIONS = {"train": 8, "probe": 3, "save": 3, "load": 2, "sample": 5}
"""With their weights."""
PAUSE_S = 3.0
"""Between two actions of a worker that does not hurry."""


@dataclass(frozen=True)
class Seen:
    """Log probabilities of the probe under weights of a known making."""

    state: State
    logprobs: list[float]
    by: str


@dataclass
class Worker:
    """Runs until `may_go_on` says no. `saved` are checkpoints of all workers, by path."""

    client: Client
    random: random.Random
    saved: dict[str, State]
    sampled: dict[str, State]
    may_go_on: Callable[[], bool]
    seen: list[Seen] = field(default_factory=list)
    error: BaseException | None = None
    num_samples: int = 0
    hurries: threading.Event = field(default_factory=threading.Event)
    """Set while one action follows the other at once."""

    def start(self) -> None:
        self.hurries.set()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.session_id = self.client.session()
            self.model = Model(self.client, self.session_id, 0)
            self.model.create()
            while self.may_go_on():
                self.hurries.wait(PAUSE_S)
                (action,) = self.random.choices(list(ACTIONS), list(ACTIONS.values()))
                getattr(self, f"_{action}")()
        except BaseException as error:  # noqa: BLE001 - raised again by the test
            self.error = error

    def _train(self) -> None:
        self.model.train(tuple(self.random.randrange(1, 9) for _ in range(self.random.choice((1, 2)))))

    def _probe(self) -> None:
        self.seen.append(Seen(self.model.state, self.model.probe(), "the model"))

    def _save(self) -> None:
        path, found = self.random.choice([("/save_weights", self.saved), ("/save_weights_for_sampler", self.sampled)])
        found[self.model.do(path, path=f"at-{self.model.seq_id}")["path"]] = self.model.state

    def _load(self) -> None:
        if self.saved:
            path = self.random.choice(list(self.saved))
            self.model.load(path, self.saved[path])

    def _sample(self) -> None:
        """Scores the probe, on the base model's weights or on saved ones; no crash may be seen here."""
        path = self.random.choice([None, *self.sampled])
        weights = {"base_model": "tests/tiny-vl"} if path is None else {"model_path": path}
        body = {"session_id": self.session_id, "sampling_session_seq_id": self.num_samples, **weights}
        self.num_samples += 1
        sampler_id = self.client.post("/create_sampling_session", body)["sampling_session_id"]
        prompt = {"chunks": [{"tokens": tokens(0), "type": "encoded_text"}]}
        result = self.client.do(
            "/asample",
            {
                "sampling_session_id": sampler_id,
                "seq_id": 0,
                "prompt": prompt,
                "sampling_params": {"max_tokens": 4},
                "prompt_logprobs": True,
            },
        )
        well(result)
        state = () if path is None else self.sampled[path]
        self.seen.append(Seen(state, result["prompt_logprobs"][1:], "the sampler"))
