"""The samples that are kept for reading: bounded for each owner and in all, and none of them another owner's."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from tests.factories import as_text
from tinker_server.api_schemas.inputs import Chunk, EncodedTextChunk, ImageChunk, ModelInput
from tinker_server.api_schemas.sampling import SampledSequence, SampleRequest, SampleResponse, SamplingParams
from tinker_server.observability.gallery import Gallery
from tinker_server.observability.recent_samples import IMAGE_BYTES, PROMPT_TOKENS, SEQUENCES, TOKENS, Drawn, make_shown
from tinker_server.observability.sample_files import SampleFiles
from tinker_server.observability.thinned_steps import PER_STEP, STEPS

OF = Drawn("tiny")


def request(num_tokens: int = 3, image_bytes: int = 0) -> SampleRequest:
    chunks: list[Chunk] = [EncodedTextChunk(tokens=np.arange(num_tokens))]
    if image_bytes:
        chunks.append(ImageChunk(data=b"x" * image_bytes, format="png"))
    prompt = ModelInput(chunks=chunks)
    return SampleRequest(base_model="tiny", prompt=prompt, sampling_params=SamplingParams(max_tokens=1))


def response(num_tokens: int = 2, num_sequences: int = 1) -> SampleResponse:
    tokens, logprobs = np.arange(num_tokens, dtype=np.int32), np.zeros(num_tokens, np.float32)
    sequence = SampledSequence(stop_reason="stop", tokens=tokens, logprobs=logprobs)
    return SampleResponse(sequences=[sequence] * num_sequences)


def test_each_owner_has_the_last_few_the_newest_first() -> None:
    gallery = Gallery(3)
    for num_tokens in range(1, 6):
        gallery.note(request(num_tokens), response(), "alice", OF)
    gallery.note(request(9), response(), "bob", OF)
    assert [len(as_text(one.prompt.chunks[0]).tokens) for one in gallery.of("alice")] == [5, 4, 3]
    assert len(gallery.of("bob")) == 1 and gallery.of("carol") == []
    sample_id = gallery.of("alice")[0].sample_id
    assert gallery.get("alice", sample_id) is gallery.of("alice")[0]
    assert gallery.get("bob", sample_id) is None


def test_all_together_are_bounded_and_who_has_the_most_gives_way() -> None:
    gallery = Gallery(100, max_bytes=40_000)
    gallery.note(request(image_bytes=1000), response(), "bob", OF)
    for _ in range(50):
        gallery.note(request(image_bytes=1000), response(), "alice", OF)
    sizes = [one.size_bytes for owner in ("alice", "bob") for one in gallery.of(owner)]
    assert sum(sizes) <= 40_000
    assert len(gallery.of("bob")) == 1 and len(gallery.of("alice")) > 5


def of_run(number: int) -> Drawn:
    return Drawn("tiny", None, f"checkpoints/s:train:0/snapshot/{number}~a")


def test_a_run_keeps_a_few_samples_of_steps_that_are_spread_over_it() -> None:
    gallery = Gallery(3)
    for number in range(10 * STEPS):
        shown = make_shown(request(), response(), "alice", of_run(number))
        assert shown is not None
        for part in range(PER_STEP + 2):
            gallery.put(replace(shown, at=number + part / 10, sample_id=f"{number} {part}"))
    gallery.note(request(), response(), "alice", OF)
    kept = Counter(shown.of for shown in gallery.of_run("alice", "s:train:0")[2:])
    assert len(kept) == STEPS and max(kept.values()) == PER_STEP
    numbers = [int(of.directory.rpartition("/")[2][:-2]) for of in kept if of.directory]
    assert min(numbers) == 0 and max(numbers) == 10 * STEPS - 1
    assert max(before - after for before, after in pairwise(numbers)) <= 4 * 10
    assert len(gallery.of("alice")) == 3 and gallery.of_run("bob", "s:train:0") == []
    oldest = gallery.of_run("alice", "s:train:0")[-1]
    assert gallery.get("alice", oldest.sample_id) is oldest
    gallery.drop_run("alice", "s:train:0")
    assert gallery.of_run("alice", "s:train:0") == [] and len(gallery.all()) == 1


def test_where_room_is_short_old_steps_give_way_before_the_latest_samples() -> None:
    gallery = Gallery(3, max_bytes=60_000)
    for number in range(60):
        gallery.note(request(image_bytes=1000), response(), "alice", of_run(number))
    assert len(gallery.of("alice")) == 3
    assert sum(shown.size_bytes for shown in gallery.all()) <= 60_000
    steps = [shown.of.directory for shown in gallery.of_run("alice", "s:train:0")]
    assert 10 < len(steps) < 60 and steps[-1] == of_run(0).directory and steps[0] == of_run(59).directory


def test_long_and_many_continuations_are_cut_and_hold_no_larger_array() -> None:
    gallery = Gallery(3)
    gallery.note(request(), response(num_tokens=10 * TOKENS, num_sequences=10 * SEQUENCES), "alice", OF)
    (shown,) = gallery.of("alice")
    assert len(shown.sequences) == SEQUENCES
    assert all(len(one.tokens) == len(one.logprobs) == TOKENS for one in shown.sequences)
    assert all(one.tokens.base is None and one.logprobs.base is None for one in shown.sequences)


def test_what_is_too_large_to_look_at_is_not_kept() -> None:
    gallery = Gallery(3)
    gallery.note(request(num_tokens=PROMPT_TOKENS + 1), response(), "alice", OF)
    gallery.note(request(image_bytes=IMAGE_BYTES + 1), response(), "alice", OF)
    Gallery(0).note(request(), response(), "alice", OF)
    assert gallery.of("alice") == []


def test_stop_strings_and_pieces_take_no_memory_that_is_not_counted() -> None:
    gallery = Gallery(100, max_bytes=1 << 20)
    stops = SamplingParams(max_tokens=1, stop=["x" * 60 + str(i) for i in range(1000)])
    for _ in range(50):
        many: list[Chunk] = [EncodedTextChunk(tokens=np.arange(1)) for _ in range(900)]
        one = SampleRequest(base_model="tiny", prompt=ModelInput(chunks=many), sampling_params=stops)
        gallery.note(one, response(), "alice", OF)
    assert all(one.params.stop is None for one in gallery.of("alice"))
    assert 0 < sum(len(one.prompt.chunks) for one in gallery.of("alice")) <= (1 << 20) // 1000
    chunks: list[Chunk] = [EncodedTextChunk(tokens=np.arange(1)) for _ in range(5000)]
    one = SampleRequest(base_model="tiny", prompt=ModelInput(chunks=chunks), sampling_params=stops)
    gallery.note(one, response(), "bob", OF)
    assert gallery.of("bob") == []


def test_the_newest_samples_are_on_disk_within_the_bound_and_come_back_as_they_were(tmp_path: Path) -> None:
    gallery, files = Gallery(5), SampleFiles(tmp_path / "samples", 12_000)
    for owner in ("alice", "bob", "alice", "alice"):
        gallery.note(request(image_bytes=3000), response(), owner, Drawn("tiny", "tinker://r/weights/a", "a/b"))
    files.save(gallery.all())
    sizes = [path.stat().st_size for path in (tmp_path / "samples").iterdir()]
    assert len(sizes) == 2 and 8_000 < sum(sizes) <= 12_000
    (tmp_path / "samples/broken.json").write_text("{")
    again = Gallery(5)
    again.restore(files.load())
    assert [one.sample_id for one in again.all()] == [one.sample_id for one in gallery.all()[:2]]
    before, after = gallery.of("alice")[0], again.of("alice")[0]
    assert (after.of, after.params, after.at, after.size_bytes) == (
        before.of,
        before.params,
        before.at,
        before.size_bytes,
    )
    assert after.prompt.chunks[1] == before.prompt.chunks[1]
    np.testing.assert_array_equal(after.sequences[0].tokens, before.sequences[0].tokens)
    gallery.note(request(image_bytes=3000), response(), "alice", OF)
    files.save(gallery.all())
    assert {path.stem for path in (tmp_path / "samples").iterdir()} == {one.sample_id for one in gallery.all()[:2]}
    SampleFiles(tmp_path / "samples", 0).save(gallery.all())
    assert list((tmp_path / "samples").iterdir()) == []


def test_samples_that_were_written_without_a_step_are_read(tmp_path: Path) -> None:
    gallery, files = Gallery(5), SampleFiles(tmp_path, 1 << 20)
    gallery.note(request(), response(), "alice", of_run(7))
    files.save(gallery.all())
    (path,) = tmp_path.iterdir()
    fields = json.loads(path.read_text())
    del fields["step"]
    path.write_text(json.dumps(fields))
    again = Gallery(5)
    again.restore(files.load())
    assert [shown.step for shown in again.of("alice")] == [None]


def test_stop_strings_are_bounded_by_name() -> None:
    with pytest.raises(ValidationError, match="stop"):
        SamplingParams(stop=["x" * 1000] * 100)
    with pytest.raises(ValidationError, match="stop"):
        SamplingParams(stop="x" * 100_000)
    assert SamplingParams(stop=["\n\nUser:"] * 100).stop
