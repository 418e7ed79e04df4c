"""A backend of fakes whose runs look like learning: the loss falls, advantages rise, samples are words."""

import asyncio
import json
import math
from collections.abc import Callable

import numpy as np

from tests.fakes import FakeBackend
from tests.photographs import SEEING
from tinker_server.api_schemas.sampling import SampledSequence, SampleResponse
from tinker_server.api_schemas.training import AdamParams, ForwardBackwardOutput, OptimStepResponse
from tinker_server.backends.inputs.detokenize import TokenTexts
from tinker_server.backends.protocol import ChatTask, ChatUsage, EncodedBatch, LoadedModel, SamplingTask

QUESTION = "What does this photograph show? "
ANSWER = " The photograph shows a small sailing boat on quiet water; it is a ketch, with two masts and a white hull."


class LearningBackend(FakeBackend):
    """`tiny`, with numbers as a training run has them, the same each time."""

    def __init__(self) -> None:
        super().__init__()
        self.trains = True
        """False: all advantages are 0."""
        self.texts = TokenTexts(SEEING)
        tokenizer = self.texts._tokenizer
        assert tokenizer is not None
        self.question, self.answer = tokenizer.encode(QUESTION).ids, tokenizer.encode(ANSWER).ids
        self.random = np.random.default_rng(7)
        trainer = self.tiny.trainer
        plain_forward_backward, plain_optim_step = trainer.forward_backward, trainer.optim_step

        async def forward_backward(model: LoadedModel, batch: EncodedBatch, *, backward: bool) -> ForwardBackwardOutput:
            output = await plain_forward_backward(model, batch, backward=backward)
            return output.model_copy(update={"metrics": self._metrics(trainer.steps[model.model_id])})

        async def optim_step(model: LoadedModel, adam: AdamParams) -> OptimStepResponse:
            response = await plain_optim_step(model, adam)
            size = float(self.random.lognormal(0, 0.25)) * (0.4 + 2 / (1 + response.metrics["step"]))
            return response.model_copy(update={"metrics": {"grad_norm": size}})

        trainer.forward_backward = forward_backward  # type: ignore[method-assign]
        trainer.optim_step = optim_step  # type: ignore[method-assign]
        self.tiny.sampler.sample = self._sample  # type: ignore[method-assign]
        self.tiny.sampler.chat = self._chat  # type: ignore[method-assign]
        self.tiny.token_texts = self.texts.of  # type: ignore[method-assign]

    def _metrics(self, step: int) -> dict[str, float]:
        if not self.trains:
            return {"loss:sum": 0.0, "tokens:sum": 0.0}
        noise = self.random.normal(0, 1, 4)
        loss = 0.25 + 2.2 * math.exp(-step / 15) + 0.08 * noise[0]
        return {
            "loss:sum": 512 * loss,
            "tokens:sum": 512.0,
            "advantage:mean": math.tanh(step / 30) + 0.12 * noise[1],
            "sampler_gap:mean": 0.004 + 0.0008 * abs(noise[2]),
            "kl_k3:mean": 0.0002 + 0.00004 * abs(noise[3]),
            "clip_fraction:mean": 0.01 + 0.003 * abs(noise[2]),
        }

    async def _sample(self, task: SamplingTask) -> SampleResponse:
        logprobs = -self.random.exponential(0.9, len(self.answer)).astype(np.float32)
        tokens = np.array(self.answer, np.int32)
        sequence = SampledSequence(stop_reason="stop", tokens=tokens, logprobs=logprobs)
        return SampleResponse(sequences=[sequence] * task.num_samples)

    async def _chat(self, task: ChatTask, tell: Callable[[str], None]) -> ChatUsage:
        """As the stream of OpenAI's endpoint."""
        self.tiny.sampler.chats.append(task)
        for number, text in enumerate(self.texts.of(self.answer)):
            choice: dict[str, object] = {"index": 0, "delta": {"content": text}}
            if task.body.get("logprobs"):
                choice["logprobs"] = {"content": [{"token": text, "logprob": -0.5 * number}]}
            tell(f"data: {json.dumps({'choices': [choice]})}\n\n")
            await asyncio.sleep(0)
        tell("data: [DONE]\n\n")
        return ChatUsage(prompt=7, cached=2, sampled=len(self.answer))
