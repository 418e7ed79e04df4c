"""A directory that has its model in two layouts: trainer and engine read the same one."""

from functools import partial
from pathlib import Path

from tests.engines import fork_sampler
from tests.layouts import add_mistrals_layout
from tests.models import make_tiny_of
from tests.sampling import ATOL, sampler_config, score_distances, scores_of
from tests.trainers import LORA, trainer
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.sampler.pool import SamplerPool


async def test_engine_and_trainer_read_the_same_of_two_layouts(tmp_path: Path) -> None:
    make = partial(make_tiny_of, "mistral", sliding_window=8)
    source = make(tmp_path / "model")
    add_mistrals_layout(source, make(tmp_path / "other", seed=1))
    rank = trainer(source)
    rank.create_model("fresh", LORA)
    running = SamplerPool(
        sampler_config(source, tmp_path / "scratch"), fork_sampler, score_base=scores_of(rank.base.score_base())
    )
    await running.start()
    try:
        renderer = Renderer(str(source), image_cache_bytes=0, max_image_pixels=1)
        assert (await score_distances(running, None, rank, "fresh", renderer)).max() < ATOL
    finally:
        await running.stop()
