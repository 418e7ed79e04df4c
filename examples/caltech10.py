"""The photographs of caltech10.zip and the conversation about them, in the types of the tinker SDK.

It needs the dataset, a tokenizer and an image processor, but no server.
"""

import io
import random
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from tinker import types
from transformers import AutoImageProcessor, AutoTokenizer

ARCHIVE = Path(__file__).parent / "data" / "caltech10.zip"
QUESTION = "What is the name of the subject in this photo?"
ANSWER_START = "The subject in this photo is:"


@dataclass(frozen=True)
class Photo:
    jpeg: bytes
    size: tuple[int, int]
    """Width and height."""
    label: str
    """As it is spoken: lower case, words separated by spaces."""


def load_photos(split: str) -> list[Photo]:
    """The photographs of `train` or `test`, ordered by class."""
    photos = []
    with zipfile.ZipFile(ARCHIVE) as archive:
        for name in sorted(archive.namelist()):
            folder, class_name, _ = name.split("/")
            if folder == split:
                jpeg = archive.read(name)
                size = Image.open(io.BytesIO(jpeg)).size
                photos.append(Photo(jpeg, size, class_name.replace("_", " ")))
    return photos


def mirrored(photo: Photo) -> Photo:
    out = io.BytesIO()
    image = Image.open(io.BytesIO(photo.jpeg))
    image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(out, "JPEG", quality=90)
    return Photo(out.getvalue(), photo.size, photo.label)


def training_batch(photos: list[Photo], step: int, batch_size: int, seed: int) -> list[Photo]:
    """Photographs of one step, each mirrored or not by chance.

    The steps read one endless row of shuffled epochs, so that any step can be drawn on its own.
    """
    batch = []
    for place in range(step * batch_size, (step + 1) * batch_size):
        epoch, index = divmod(place, len(photos))
        order = random.Random(f"{seed}-{epoch}").sample(range(len(photos)), len(photos))
        photo = photos[order[index]]
        batch.append(mirrored(photo) if random.Random(f"{seed}-{place}").random() < 0.5 else photo)
    return batch


class Conversation:
    """Builds prompts and training data for one model, read from its directory."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._image_processor = AutoImageProcessor.from_pretrained(model_dir)
        self.end_token: int = self._tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._before_image = self._encode("<|im_start|>user\n<|vision_start|>")
        self._after_image = self._encode(
            f"<|vision_end|>{QUESTION}<|im_end|>\n<|im_start|>assistant\n",
        )

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def image_tokens(self, photo: Photo) -> int:
        width, height = photo.size
        patches: int = self._image_processor.get_number_of_image_patches(height, width, {})
        merge: int = self._image_processor.merge_size
        return patches // merge**2

    def prompt(self, photo: Photo) -> types.ModelInput:
        """The question, and the answer up to the place where the name of the class begins."""
        return self._input(photo, self._encode(ANSWER_START))

    def datum(self, photo: Photo) -> types.Datum:
        """The question with its whole answer; the answer alone has weight."""
        answer = self._encode(f"{ANSWER_START} {photo.label}<|im_end|>")
        question = self._input(photo, [])
        asked = question.length - 1  # position i predicts token i + 1
        # Targets at image positions have no effect: their weight is 0.
        targets = np.array([0] * asked + answer, dtype=np.int64)
        weights = np.array([0] * asked + [1] * len(answer), dtype=np.float32)
        return types.Datum(
            model_input=self._input(photo, answer[:-1]),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_numpy(targets),
                "weights": types.TensorData.from_numpy(weights),
            },
        )

    def read_answer(self, token_ids: list[int]) -> str:
        """The class named by a continuation of `prompt`."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text.strip()

    def _input(self, photo: Photo, answer_start: list[int]) -> types.ModelInput:
        return types.ModelInput(
            chunks=[
                types.EncodedTextChunk(tokens=self._before_image),
                types.ImageChunk(data=photo.jpeg, format="jpeg", expected_tokens=self.image_tokens(photo)),
                types.EncodedTextChunk(tokens=self._after_image + answer_start),
            ]
        )
