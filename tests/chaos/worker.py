"""One client's mixed work on one model at a time, and what it saw of the model's weights on the way."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.client import Client, Model, State, is_lost, tokens

ACTIONS = {"train": 8, "probe": 3, "save": 3, "load": 2, "sample": 5}
"""With their weights."""
ATTEMPTS = 12
"""At making a model again while processes go down."""


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
    num_models: int = 0
    num_samples: int = 0

    def start(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.session_id = self.client.session()
            self.model = self._made()
            while self.may_go_on():
                (action,) = self.random.choices(list(ACTIONS), list(ACTIONS.values()))
                if not getattr(self, f"_{action}")():
                    self.model = self._made()
        except BaseException as error:  # noqa: BLE001 - raised again by the test
            self.error = error

    def _made(self) -> Model:
        """A model from the newest checkpoint, or a fresh one."""
        for _ in range(ATTEMPTS):
            model = Model(self.client, self.session_id, self.num_models)
            self.num_models += 1
            if model.create() and (not self.saved or self._loaded(model, list(self.saved)[-1])):
                return model
        raise AssertionError(f"no model could be made in {ATTEMPTS} attempts")

    def _loaded(self, model: Model, path: str) -> bool:
        result = model.do("/load_weights", path=path, optimizer=True)
        if is_lost(result):
            return False
        assert "error" not in result, result
        model.state = self.saved[path]
        return True

    # ---- actions: whether the model is still there

    def _train(self) -> bool:
        return self.model.train(tuple(self.random.randrange(1, 9) for _ in range(self.random.choice((1, 2)))))

    def _probe(self) -> bool:
        logprobs = self.model.probe()
        if logprobs is not None:
            self.seen.append(Seen(self.model.state, logprobs, "the model"))
        return logprobs is not None

    def _save(self) -> bool:
        path, found = self.random.choice([("/save_weights", self.saved), ("/save_weights_for_sampler", self.sampled)])
        result = self.model.do(path, path=f"at-{self.model.seq_id}")
        if is_lost(result):
            return False
        assert "error" not in result, result
        found[result["path"]] = self.model.state
        return True

    def _load(self) -> bool:
        return not self.saved or self._loaded(self.model, self.random.choice(list(self.saved)))

    def _sample(self) -> bool:
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
        assert "error" not in result, result
        state = () if path is None else self.sampled[path]
        self.seen.append(Seen(state, result["prompt_logprobs"][1:], "the sampler"))
        return True
