"""Which datums of a batch are kept: the largest by gradient and by loss, and the answers of one prompt."""

import asyncio
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tests.factories import as_text
from tinker_server.api_schemas.inputs import Chunk, Datum, EncodedTextChunk, ImageChunk, ModelInput
from tinker_server.api_schemas.training import ForwardBackwardInput, ForwardBackwardOutput
from tinker_server.observability.datum_prompts import IMAGE_BYTES, PROMPT_TOKENS
from tinker_server.observability.gallery import Gallery
from tinker_server.observability.kept_datums import ANSWERS, TOKENS, BatchName, KeptBatch, keep
from tinker_server.observability.sample_files import SampleFiles

NAME = BatchName("alice", "s:train:0", 7, "tiny")
IMAGE = ImageChunk(data=b"photo", format="png")


def datum(prompt: list[Chunk], answer: list[int], advantage: float, old_logprob: float = -1.0) -> Datum:
    """As the cookbook makes them: the prompt's positions have no advantage and no log probability."""
    num_prompt = sum(len(chunk.tokens) if isinstance(chunk, EncodedTextChunk) else 3 for chunk in prompt)
    chunks = [*prompt, EncodedTextChunk(tokens=np.array(answer[:-1], np.int32))] if len(answer) > 1 else prompt
    num_before = num_prompt - 1
    inputs = {
        "target_tokens": np.array([0] * num_before + answer),
        "advantages": np.array([0.0] * num_before + [advantage] * len(answer), np.float32),
        "logprobs": np.array([0.0] * num_before + [old_logprob] * len(answer), np.float32),
    }
    return Datum(model_input=ModelInput(chunks=chunks), loss_fn_inputs=inputs)


def text(*tokens: int) -> EncodedTextChunk:
    return EncodedTextChunk(tokens=np.array(tokens, np.int32))


def kept(data: list[Datum], logprob: float | list[float] = -1.0, loss_fn: str = "importance_sampling") -> KeptBatch:
    values = logprob if isinstance(logprob, list) else [logprob] * len(data)
    outputs = [
        {"logprobs": np.full(one.loss_fn_inputs["target_tokens"].shape, value, np.float32)}
        for one, value in zip(data, values, strict=True)
    ]
    found = keep(
        NAME,
        ForwardBackwardInput(data=data, loss_fn=loss_fn),
        ForwardBackwardOutput(loss_fn_outputs=outputs, metrics={}),
    )
    assert found is not None
    return found


def test_the_answers_of_the_prompt_whose_advantages_differ_most_are_kept_in_order() -> None:
    same: list[Chunk] = [text(1, 2), IMAGE, text(3)]
    split: list[Chunk] = [text(1), text(2), IMAGE, text(3)]
    other: list[Chunk] = [text(1, 2), ImageChunk(data=b"other", format="png"), text(3)]
    data = [datum(same, [10, 11], -1.0), datum(other, [20], 0.1), datum(split, [12, 13, 14], 2.0)]
    data += [datum(other, [21], -0.1), datum(same, [15], 0.0)]
    batch = kept(data)
    assert [(one.index, one.advantage) for one in batch.group] == [(2, 2.0), (4, 0.0), (0, -1.0)]
    assert [one.tokens.tolist() for one in batch.group] == [[12, 13, 14], [15], [10, 11]]
    assert [np.sign(one.push).tolist() for one in batch.group] == [[1, 1, 1], [0], [-1, -1]]
    assert len({one.prompt for one in batch.group}) == 1
    (chunks,) = {id(batch.prompts[one.prompt]): batch.prompts[one.prompt].chunks for one in batch.group}.values()
    first, image, last = chunks
    assert (as_text(first).tokens.tolist(), image, as_text(last).tokens.tolist()) == ([1, 2], IMAGE, [3])


def test_the_largest_gradients_and_losses_are_kept_with_their_numbers() -> None:
    data = [datum([text(1, 2, 3)], [number] * 4, 1.0) for number in range(20)]
    logprobs = [-0.01] * 20
    logprobs[5], logprobs[11] = -3.0, -2.0
    batch = kept(data, logprobs)
    assert batch.num_datums == 20
    assert {5, 11} <= {one.index for one in batch.largest}
    for one in batch.largest:
        logprob = logprobs[one.index]
        ratio = np.exp(logprob + 1)
        assert one.loss == pytest.approx(-4 * ratio, rel=1e-5)
        assert one.gradient_norm == pytest.approx(2 * ratio * (1 - np.exp(logprob)), rel=1e-5)


def test_a_loss_that_is_not_finite_is_the_largest() -> None:
    data = [datum([text(1, 2)], [3, 4], 1.0) for _ in range(6)]
    batch = kept(data, [-1.0, -2.0, -1.0, float("nan"), -1.0, -1.0])
    assert 3 in [one.index for one in batch.largest]


def test_datums_of_supervised_learning_have_no_group_and_begin_with_their_first_weight() -> None:
    inputs = {"target_tokens": np.arange(6), "weights": np.array([0, 0, 0, 1, 1, -1], np.float32)}
    batch = kept(
        [Datum(model_input=ModelInput(chunks=[text(*range(6))]), loss_fn_inputs=inputs)], loss_fn="cross_entropy"
    )
    (largest,) = batch.largest
    assert batch.group == [] and largest.advantage is None
    assert largest.tokens.tolist() == [3, 4, 5] and np.sign(largest.push).tolist() == [1, 1, -1]
    (chunk,) = batch.prompts[largest.prompt].chunks
    assert as_text(chunk).tokens.tolist() == [0, 1, 2, 3]


def test_what_is_kept_is_bounded_and_holds_no_body() -> None:
    many: list[Chunk] = [text(*range(5000)), ImageChunk(data=b"x" * (IMAGE_BYTES + 1), format="png"), text(1)]
    data = [datum(many, list(range(2000)), float(number)) for number in range(40)]
    batch = kept(data)
    assert len(batch.group) == ANSWERS and batch.group[0].advantage == 39 and batch.group[-1].advantage == 0
    assert all(len(one.tokens) == TOKENS and one.tokens.base is None for one in batch.group + batch.largest)
    (prompt,) = batch.prompts.values()
    assert all(isinstance(chunk, EncodedTextChunk) for chunk in prompt.chunks)
    assert sum(len(chunk.tokens) for chunk in prompt.chunks if isinstance(chunk, EncodedTextChunk)) == PROMPT_TOKENS
    assert batch.size_bytes < 1 << 20


@pytest.mark.parametrize("rest", [[text(2)] * 500, [text()] * 500, [ImageChunk(data=b"x", format="png")] * 500])
def test_each_chunk_of_a_kept_prompt_counts_with_its_object(rest: list[Chunk]) -> None:
    batch = kept([datum([text(1), *rest], [5, 6], 1.0)])
    (prompt,) = batch.prompts.values()
    tracemalloc.start()
    objects = [chunk.model_copy(deep=True) for chunk in prompt.chunks]
    used_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(objects) == 501 and batch.size_bytes > used_bytes


def test_targets_with_several_columns_are_not_kept() -> None:
    inputs: dict[str, np.ndarray] = {
        "target_tokens": np.zeros((2, 3), np.int64),
        "weights": np.ones((2, 3), np.float32),
    }
    sent = ForwardBackwardInput(
        data=[Datum(model_input=ModelInput(chunks=[text(1, 2)]), loss_fn_inputs=inputs)], loss_fn="cross_entropy"
    )
    output = ForwardBackwardOutput(loss_fn_outputs=[{"logprobs": np.zeros((2, 3), np.float32)}], metrics={})
    assert keep(NAME, sent, output) is None


def test_batches_are_written_with_the_samples_and_come_back_as_they_were(tmp_path: Path) -> None:
    batch = kept([datum([text(1, 2), IMAGE], [5, 6], 1.0), datum([text(1, 2), IMAGE], [7], -1.0)])
    gallery, files = Gallery(5), SampleFiles(tmp_path, 1 << 20)
    gallery.put(batch)
    files.save(gallery.all())
    again = Gallery(5)
    again.restore(SampleFiles(tmp_path, 1 << 20).load())
    (back,) = again.batches_of_run("alice", "s:train:0")
    assert (back.step, back.loss_fn, back.at, back.sample_id) == (7, "importance_sampling", batch.at, batch.sample_id)
    dumped = [{number: of.model_dump_json() for number, of in one.prompts.items()} for one in (batch, back)]
    assert dumped[0] == dumped[1]
    for one, other in zip(batch.group + batch.largest, back.group + back.largest, strict=True):
        np.testing.assert_array_equal(one.push, other.push)
        plain = ("index", "prompt", "advantage", "loss", "gradient_norm")
        assert all(getattr(one, name) == getattr(other, name) for name in plain)
    assert asyncio.run(files.held_bytes("alice")) == sum(path.stat().st_size for path in tmp_path.iterdir()) > 0
    again.drop_run("alice", "s:train:0")
    assert again.all() == [] and again.batches_of_run("bob", "s:train:0") == []
