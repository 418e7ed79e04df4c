"""The load check: a short text that travels with saved weights, and the scores that the saver gave its tokens.

Weights that are loaded wrongly (a module left out, another scale, another model's slot) give wrong numbers without an
error. So the loader scores the text too, and uses the weights only if the scores agree. In bfloat16 that finds large
mistakes only; `sampler/engine/slot_check.py` checks that an engine's slot holds the file's values.

A text does not test a vision tower, nor whether an image's tokens see each other: weights that have a tower, and all of
a kind whose tokens do, are also scored behind an image.
"""

import base64
import io
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from tinker_server.api_schemas.inputs import EncodedTextChunk, ImageChunk, ModelInput
from tinker_server.backends.model_spec import ModelSpec
from tinker_server.backends.protocol import BackendFailed, InvalidInput

_KEY = "canary"
_NUM_TOKENS, _PERIOD = 15, 5
"""With the token that an engine samples after them they fit into the smallest context window. They repeat, so that the
later ones are likely and the first are not."""
BASE_TOKENS = 62
"""Tokens of the text by which engine and trainer compare their bases, or as many as the context window holds. They are
many because rounding sends a few to other experts, one in a hundred of a small random mixture in bfloat16, which moves
each by up to 1.5 nats."""
_IMAGE_SIDE = 64
"""Pixels; processors enlarge the image to the smallest that their model takes."""
_TOLERANCE = {"float32": (1e-3, 1e-4), "bfloat16": (0.05, 0.01)}
"""Bound of the mean difference: nats, and part of the scores' mean magnitude. Trainer and engine were seen to differ by
8e-6 at most in float32, in bfloat16 by 0.016 on average; wrongly loaded weights by 0.3 and more, kernels that left
their output unwritten by 0.2 and more."""


@dataclass(frozen=True)
class LoadCheck:
    """Token ids, and the log probability of each after the first, in nats."""

    token_ids: list[int]
    logprobs: list[float]
    model_id: str = ""
    """The model whose weights they are."""
    image: bytes = b""
    """A PNG file; empty for weights that are scored behind none."""
    logprobs_behind_image: Sequence[float] = ()
    """Log probability of each token of the text behind the image, in nats."""

    @property
    def behind_image(self) -> ModelInput:
        """The image, then the text."""
        return image_and_text(self.image, self.token_ids)

    def check_finite(self) -> None:
        """Raise InvalidInput if a score is not finite: no sampler could use such weights."""
        if not np.isfinite([*self.logprobs, *self.logprobs_behind_image]).all():
            raise InvalidInput(
                "the model's log probabilities are not finite: its weights have diverged; load a checkpoint, and"
                " train with a smaller learning_rate"
            )

    def check_same(self, logprobs: np.ndarray, dtype: str) -> None:
        """Raise BackendFailed if `logprobs`, computed in `dtype` by the loader of the weights, differ, and InvalidInput
        if they are not finite."""
        _check_same("a test text", np.array(self.logprobs), logprobs, dtype)

    def check_same_behind_image(self, logprobs: np.ndarray, dtype: str) -> None:
        """Check as `check_same`, but the text behind the image."""
        _check_same("a text behind a test image", np.array(self.logprobs_behind_image), logprobs, dtype)

    def require_same_base(self, other: "LoadCheck", spec: ModelSpec, whose: str) -> list[str]:
        """Compare the trainer's scores of a base with those of `whose`, and say how much they differ.
        Raises BackendFailed if rounding does not explain it."""
        found = []
        for what, own, others in (
            ("a text", self.logprobs, other.logprobs),
            ("a text behind an image", self.logprobs_behind_image, other.logprobs_behind_image),
        ):
            if not len(own):
                continue
            difference, is_rounding = compare(np.array(others), np.array(own), spec.dtype)
            found.append(f"{whose} scores {what} by the base {difference:.2g} nats a token from the trainer")
            if not is_rounding:
                raise BackendFailed(
                    f"{spec.name}: {found[-1]}, which is more than rounding in {spec.dtype} makes: they do not compute"
                    f" the same model. Look at the files in {spec.directory}, whether they have changed since the"
                    " trainer read them, and at the fields of config.json that are not those of the published model"
                )
        return found

    def to_metadata(self) -> dict[str, str]:
        """Encode for the header of a safetensors file."""
        image = [base64.b64encode(self.image).decode(), list(self.logprobs_behind_image)] if self.image else []
        return {_KEY: json.dumps([self.token_ids, self.logprobs, self.model_id, *image])}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str] | None) -> "LoadCheck | None":
        """Decode; None for files that lack it."""
        text = (metadata or {}).get(_KEY)
        if text is None:
            return None
        token_ids, logprobs, model_id, *image = json.loads(text)
        return cls(token_ids, logprobs, model_id, *([base64.b64decode(image[0]), image[1]] if image else []))


def _check_same(what: str, expected: np.ndarray, logprobs: np.ndarray, dtype: str) -> None:
    if not np.isfinite(logprobs).all():  # an engine multiplies an adapter's factors in another order
        raise InvalidInput(
            f"the sampler's log probabilities of {what} are not finite with these weights, though the trainer's are:"
            f" the adapter has values so large that their products overflow in {dtype}; the weights are not used"
        )
    difference, is_rounding = compare(logprobs, expected, dtype)
    if not is_rounding:
        raise BackendFailed(
            f"the sampler's log probabilities of {what} are not the trainer's: with these weights they differ by"
            f" {difference:.3g} nats on average; the weights are not used"
        )


def compare(logprobs: np.ndarray, expected: np.ndarray, dtype: str) -> tuple[float, bool]:
    """Return the mean difference of log probabilities in nats, and whether rounding in `dtype` explains it, which it
    never does for NaN."""
    absolute, relative = _TOLERANCE[dtype]
    difference = float(np.abs(logprobs - expected).mean())
    return difference, difference <= absolute + relative * float(np.abs(expected).mean())


def load_check_tokens(vocab_size: int, placeholders: Collection[int], num_tokens: int = _NUM_TOKENS) -> np.ndarray:
    """Return [T] int64: a few ids from the first half of the vocabulary, repeated; none of an image's."""
    period = num_tokens * _PERIOD // _NUM_TOKENS
    step = max(1, vocab_size // (4 * period))
    ids = [token for token in range(1, vocab_size // 2, step) if token not in placeholders]
    return np.resize(np.array(ids[:period], np.int64), num_tokens)


def load_check_image() -> bytes:
    """Make a PNG file with edges and colours, to test a vision tower."""
    ramp = np.arange(_IMAGE_SIDE, dtype=np.uint8)
    columns, rows = np.meshgrid(ramp, ramp)
    pixels = np.stack([columns * 4, rows * 4, ((columns // 8 + rows // 8) % 2) * np.uint8(255)], axis=-1)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def text_input(token_ids: Sequence[int] | np.ndarray) -> ModelInput:
    """Return a text."""
    return ModelInput(chunks=[EncodedTextChunk(tokens=np.array(token_ids, np.int32))])


def image_and_text(image: bytes, token_ids: Sequence[int]) -> ModelInput:
    """Return an image, then a text."""
    return ModelInput(chunks=[ImageChunk(data=image, format="png"), *text_input(token_ids).chunks])
