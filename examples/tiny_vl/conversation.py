"""Conversations about photographs, and the model's logits for a batch of them.

The layout of tokens is that of the cookbook's renderers. Legend: B rows, S positions, O width.
"""

import random
from dataclasses import dataclass

import torch
from model import Grid
from transformers import PreTrainedTokenizerBase, Qwen3VLForConditionalGeneration
from vision import ImageTokens

QUESTION = "What is the name of the subject in this photo?"
ANSWER_START = "The subject in this photo is:"
RECIPE_SHARE = 0.7
OTHER_FORMS = (
    ("What is in this photo?", "This photo shows a"),
    ("What do you see?", "I see a"),
    ("What is this?", "This is a"),
    ("Name the subject.", ""),
    ("What is the name of the thing in the picture?", "The name is:"),
)
NO_THOUGHT = "<think>\n\n</think>\n\n"  # what the qwen3_5 renderer puts before an answer without thinking
IGNORED = -100


@dataclass(frozen=True)
class Spoken:
    question: str
    start: str
    """Beginning of the answer, up to the name."""
    name: str | None
    """Name of the subject with the space before it; None if the answer has none."""
    end: str = "<|im_end|>"


def recipe_form(name: str | None) -> Spoken:
    return Spoken(QUESTION, ANSWER_START, None if name is None else f" {name}")


def varied_form(name: str | None) -> Spoken:
    """Mostly the recipe's question and answer, with the small variations of its renderers."""
    thought = NO_THOUGHT if random.random() < 0.2 else ""
    end = "\n<|im_end|>" if random.random() < 0.2 else "<|im_end|>"
    question, start = QUESTION, ANSWER_START
    if random.random() > RECIPE_SHARE:
        question, start = random.choice(OTHER_FORMS)
    spoken = name if name is None or not start else f" {name}"
    return Spoken(question, thought + start, spoken, end)


class Tokens:
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}
        self.pad = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        self.image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.before_image = self.encode("<|im_start|>user\n<|vision_start|>")

    def encode(self, text: str) -> list[int]:
        """Encode a text, with a cache: training repeats few texts very often."""
        if text not in self._known:
            self._known[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return self._known[text]

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def padded(self, rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, [B, S], of (asked, answered) rows; only what is answered is a target."""
        length = max(len(asked) + len(answered) for asked, answered in rows)
        inputs = torch.full((len(rows), length), self.pad)
        targets = torch.full((len(rows), length), IGNORED)
        for i, (asked, answered) in enumerate(rows):
            whole = torch.tensor(asked + answered)
            inputs[i, : len(whole)] = whole
            targets[i, len(asked) - 1 : len(whole) - 1] = whole[len(asked) :]
        return inputs, targets

    def asked(self, question: str, grid: Grid) -> list[int]:
        """A photograph and a question, up to where the answer begins."""
        image = [self.image] * (grid[0] * grid[1])
        end = self.encode(f"<|vision_end|>{question}<|im_end|>\n<|im_start|>assistant\n")
        return self.before_image + image + end

    def about_images(self, spoken: list[Spoken], grids: list[Grid]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = zip(spoken, grids, strict=True)
        return self.padded([(self.asked(s.question, grid), self._answer(s)) for s, grid in rows])

    def name_starts(self, spoken: list[Spoken], grids: list[Grid]) -> torch.Tensor:
        """The positions, [B], from which the first tokens of the names are predicted."""
        rows = zip(spoken, grids, strict=True)
        return torch.tensor([len(self.asked(s.question, grid) + self.encode(s.start)) - 1 for s, grid in rows])

    def _answer(self, spoken: Spoken) -> list[int]:
        named = [] if spoken.name is None else self.encode(spoken.name + spoken.end)
        return self.encode(spoken.start) + named

    def repetitions(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random tokens to be said again: every token stays in use, also those that no trained name has."""
        rows = []
        for _ in range(count):
            words = [random.randrange(256, self._tokenizer.vocab_size) for _ in range(random.randint(1, 6))]
            asked = (
                self.encode("<|im_start|>user\nRepeat:") + words + self.encode("<|im_end|>\n<|im_start|>assistant\n")
            )
            rows.append((asked, [*words, self.end]))
        return self.padded(rows)


def positions(length: int, grid: Grid | None, image_start: int) -> torch.Tensor:
    """Rotary positions (time, height, width) of one row, [3, S]."""
    if grid is None:
        return torch.arange(length).expand(3, -1)
    rows, columns = grid
    time = torch.full((rows * columns,), image_start)
    height = image_start + torch.arange(rows).repeat_interleave(columns)
    width = image_start + torch.arange(columns).repeat(rows)
    after = torch.arange(length - image_start - rows * columns) + image_start + max(grid)
    return torch.stack([torch.cat([torch.arange(image_start), part, after]) for part in (time, height, width)])


def last_states(
    model: Qwen3VLForConditionalGeneration,
    inputs_BS: torch.Tensor,
    images: ImageTokens | None,
    grids: list[Grid] | None,
    image_start: int,
) -> torch.Tensor:
    """Return the head's input, [B, S, O], for sequences with at most one image. No position sees right padding."""
    count, length = inputs_BS.shape
    shapes: list[Grid] | list[None] = [None] * count if grids is None else grids
    by_shape = {shape: positions(length, shape, image_start) for shape in set(shapes)}
    positions_3BS = torch.stack([by_shape[shape] for shape in shapes], 1).to(inputs_BS.device)
    embedded = model.model.language_model.embed_tokens(inputs_BS)
    mask_BS, deepstack = None, None
    if images is not None:
        mask_BS = inputs_BS == model.config.image_token_id
        embedded = embedded.masked_scatter(mask_BS[:, :, None], images.merged_NO.to(embedded.dtype))
        deepstack = images.deepstack_NO
    states: torch.Tensor = model.model.language_model(
        inputs_embeds=embedded,
        position_ids=positions_3BS,
        visual_pos_masks=mask_BS,
        deepstack_visual_embeds=deepstack,
        use_cache=False,
    ).last_hidden_state
    return states
