"""Coloured squares, and a few steps that teach the embedded model what their colours are called."""

import io
import random

import numpy as np
import tinker
from PIL import Image, ImageDraw
from tinker import types
from transformers import AutoTokenizer

from tests.photographs import SEEING

COLOURS = {"red": (210, 40, 40), "green": (40, 170, 60), "blue": (40, 70, 210)}
SIDE, IMAGE_TOKENS = 160, 25
RATE = 3e-3
STEPS, BATCH = 40, 24
ASKED, UNSEEN = 8, 10**6
"""Squares of each colour that are asked about, and the first of their seeds."""


def square(colour: str, seed: int) -> bytes:
    """A JPEG of a square of a shade of `colour`, somewhere on gray."""
    draw = random.Random(f"{colour}-{seed}")
    picture = Image.new("RGB", (SIDE, SIDE), (128, 128, 128))
    side = draw.randint(96, 144)
    left, top = draw.randint(0, SIDE - side), draw.randint(0, SIDE - side)
    shade = tuple(value + draw.randint(-15, 15) for value in COLOURS[colour])
    ImageDraw.Draw(picture).rectangle((left, top, left + side, top + side), fill=shade)
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=90)
    return out.getvalue()


class Colours:
    """The conversation about squares, in the SDK's types."""

    def __init__(self) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(SEEING)
        (self.end,) = self._encode("<|im_end|>")

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def prompt(self, jpeg: bytes, answer: list[int] | None = None) -> types.ModelInput:
        """The question, and the beginning of its answer."""
        asked = self._encode("<|vision_end|>What colour is the square?<|im_end|>\n<|im_start|>assistant\n")
        return types.ModelInput(
            chunks=[
                types.EncodedTextChunk(tokens=self._encode("<|im_start|>user\n<|vision_start|>")),
                types.ImageChunk(data=jpeg, format="jpeg", expected_tokens=IMAGE_TOKENS),
                types.EncodedTextChunk(tokens=asked + (answer or [])),
            ]
        )

    def datum(self, jpeg: bytes, colour: str) -> types.Datum:
        """The answer alone has weight."""
        answer = self._encode(f"{colour}<|im_end|>")
        model_input = self.prompt(jpeg, answer[:-1])
        before = [0] * (model_input.length - len(answer))
        targets = np.array(before + answer, dtype=np.int64)
        weights = np.array(before + [1] * len(answer), dtype=np.float32)
        return types.Datum(
            model_input=model_input,
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_numpy(targets),
                "weights": types.TensorData.from_numpy(weights),
            },
        )

    def called(self, sampler: tinker.SamplingClient, jpegs: list[bytes]) -> list[str]:
        """The model's greedy answers for the colours."""
        params = types.SamplingParams(max_tokens=4, temperature=0.0)
        answers = [sampler.sample(self.prompt(jpeg), 1, params) for jpeg in jpegs]
        return [self.text(answer.result().sequences[0].tokens) for answer in answers]

    def text(self, tokens: list[int]) -> str:
        """An answer without its end token."""
        decoded: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return decoded.strip()

    def rollout(self, jpeg: bytes, drawn: types.SampledSequence, advantage: float) -> types.Datum:
        """A sampled answer with its log probabilities, each of whose tokens has the advantage."""
        tokens, logprobs = list(drawn.tokens), list(drawn.logprobs or [])
        model_input = self.prompt(jpeg, tokens[:-1])
        before = [0] * (model_input.length - len(tokens))
        numbers = {"logprobs": before + logprobs, "advantages": before + [advantage] * len(tokens)}
        tensors = {name: np.array(values, dtype=np.float32) for name, values in numbers.items()}
        tensors["target_tokens"] = np.array(before + tokens, dtype=np.int64)
        of = {name: types.TensorData.from_numpy(values) for name, values in tensors.items()}
        return types.Datum(model_input=model_input, loss_fn_inputs=of)


def check_that_a_red_square_is_called_red(service: tinker.ServiceClient, base_model: str) -> None:
    """Teach the colours; squares that were not shown must then be called what they are, and none was before."""
    colours = Colours()
    client = service.create_lora_training_client(base_model, rank=32, seed=0).result()

    def num_right() -> dict[str, int]:
        sampler = client.save_weights_and_get_sampling_client().result()
        return {
            colour: colours.called(sampler, [square(colour, UNSEEN + number) for number in range(ASKED)]).count(colour)
            for colour in COLOURS
        }

    assert num_right() == dict.fromkeys(COLOURS, 0)
    for step in range(STEPS):
        batch = [
            colours.datum(square(colour, BATCH * step + number), colour)
            for number, colour in enumerate(list(COLOURS) * (BATCH // len(COLOURS)))
        ]
        forward_backward = client.forward_backward(batch, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=RATE * (1 - step / STEPS))).result()
        forward_backward.result()
    after = num_right()
    assert min(after.values()) >= ASKED - 1, after
