"""A short run of reinforcement learning from pictures: the embedded model learns to name the colours of squares."""

import numpy as np
import tinker
from tinker import types

from tests.squares import COLOURS, RATE, UNSEEN, Colours, square
from tinker_server.client_metrics import Metrics
from tinker_server.embedded import TINY_VL

WARM_STEPS, WARM_BATCH = 8, 12
"""Supervised steps that teach the form of an answer, and only partly which colour it names."""
PROMPTS, ANSWERS = 6, 8
"""Squares in a step, and samples for each of them."""
MEASURED, HELD_OUT = 4, 8
"""Steps between two evaluations, and the squares of each colour there."""


class RewardedSquares:
    """The run `training`, whose reward is the share of answers that name the colour."""

    def __init__(self, url: str, key: str, title: str) -> None:
        self._colours = Colours()
        service = tinker.ServiceClient(base_url=url, api_key=key)
        first = service.create_lora_training_client(TINY_VL, rank=16, seed=3, user_metadata={"name": "warm start"})
        state = self._warm(first.result())
        self.training = service.create_training_client_from_state(state, user_metadata={"name": title}).result()
        self._metrics = Metrics(self.training, base_url=url, api_key=key)

    def _warm(self, training: tinker.TrainingClient) -> str:
        for step in range(WARM_STEPS):
            names = list(COLOURS) * (WARM_BATCH // len(COLOURS))
            batch = [self._colours.datum(square(name, 100 * step + i), name) for i, name in enumerate(names)]
            training.forward_backward(batch, "cross_entropy").result()
            training.optim_step(types.AdamParams(learning_rate=RATE)).result()
        return training.save_state("form-of-an-answer").result().path

    def learn(self, steps: int) -> list[float]:
        """Return the mean reward of each step."""
        return [self._step(step) for step in range(steps)]

    def _step(self, step: int) -> float:
        name = f"step-{step}"
        if step % MEASURED == 0:
            path = self.training.save_weights_for_sampler(name).result().path
            sampler = self.training.create_sampling_client(path).result()
            self._metrics.log({"test/accuracy": self._held_out(sampler)}, step=step)
        else:
            sampler = self.training.save_weights_and_get_sampling_client().result()
        rewards, batch = [], []
        for number in range(PROMPTS):
            found, datums = self._group(sampler, list(COLOURS)[number % len(COLOURS)], PROMPTS * step + number)
            rewards.append(found)
            batch += datums
        self.training.forward_backward(batch, "importance_sampling").result()
        self.training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        self._metrics.log(step=step, reward=float(np.mean(rewards)))
        return float(np.mean(rewards))

    def _group(self, sampler: tinker.SamplingClient, colour: str, seed: int) -> tuple[float, list[types.Datum]]:
        """Return the mean reward of the samples for a square, and their datums."""
        jpeg = square(colour, UNSEEN // 2 + seed)
        params = types.SamplingParams(max_tokens=4, temperature=1.0, seed=seed, stop=[self._colours.end])
        drawn = sampler.sample(self._colours.prompt(jpeg), ANSWERS, params).result().sequences
        rewards = np.array([float(self._colours.text(one.tokens) == colour) for one in drawn])
        advantages = rewards - rewards.mean()
        data = [self._colours.rollout(jpeg, one, float(by)) for one, by in zip(drawn, advantages, strict=True)]
        return float(rewards.mean()), data

    def _held_out(self, sampler: tinker.SamplingClient) -> float:
        asked = [(colour, square(colour, UNSEEN + number)) for colour in COLOURS for number in range(HELD_OUT)]
        answers = self._colours.called(sampler, [jpeg for _, jpeg in asked])
        return float(np.mean([answer == colour for answer, (colour, _) in zip(answers, asked, strict=True)]))
