"""Random microbatches, on which `tests/gpu/test_truth.py` compares gradients with a reference, cover all cases."""

from tests.compositions import LONGEST, MAX_TOKENS, RANKS, compositions, data_of
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.trainer.model.cuda_graphs import TOKENS


def test_there_are_a_hundred_microbatches_of_every_kind() -> None:
    rows = compositions()
    assert len(rows) >= 100 and len({row.name for row in rows}) == len(rows)
    assert all(row.num_tokens <= MAX_TOKENS and 1 <= len(row.models) <= 4 for row in rows)
    lengths = {length for row in rows for _, of_model in row.models for length in of_model}
    assert min(lengths) == 1 and 6000 < max(lengths) <= LONGEST
    assert max(sum(len(of_model) for _, of_model in row.models) for row in rows) == 130
    assert {rank for row in rows for rank, _ in row.models} == set(RANKS)
    assert {size + more for size in TOKENS for more in (-1, 0, 1)} <= {row.num_tokens for row in rows}


def test_a_third_of_the_microbatches_have_an_image_and_each_datum_has_its_stated_length(renderer: Renderer) -> None:
    rows, num_seeing = compositions(), 0
    for row in rows:
        data = data_of(row, renderer)
        layouts = [[renderer.layout(datum.model_input, "datum") for datum in of_model] for of_model in data]
        assert [tuple(length for length, _ in of_model) for of_model in layouts] == [of for _, of in row.models]
        num_images = sum(len(spans) for of_model in layouts for _, spans in of_model)
        assert row.has_images or not num_images
        num_seeing += num_images > 0
    assert 3 * num_seeing >= len(rows)
