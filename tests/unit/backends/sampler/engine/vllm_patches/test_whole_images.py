"""The next tokens of a prompt that a step may compute without a part of an image."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.scheduler import Scheduler

from tinker_server.backends.sampler.engine.vllm_patches.whole_images import _in_one_step, whole_tokens

IMAGES = [(10, 5), (15, 5), (30, 5)]
"""First token and length; the second is just behind the first."""


@pytest.mark.parametrize(
    ("computed", "new", "allowed"),
    [
        (0, 10, 10),
        (0, 11, 10),  # ends within the first
        (0, 15, 15),
        (0, 19, 15),  # the first as a whole
        (0, 20, 20),
        (10, 4, 0),  # begins with an image: it waits
        (10, 5, 5),
        (12, 2, 0),  # behind a cached prefix that ends within it
        (12, 3, 3),
        (12, 5, 3),
        (20, 15, 15),
        (20, 14, 10),
        (35, 100, 100),
    ],
)
def test_a_step_ends_before_an_image_or_behind_it(computed: int, new: int, allowed: int) -> None:
    assert whole_tokens(features(), computed, new) == allowed


def features() -> list[MultiModalFeatureSpec]:
    return [
        MultiModalFeatureSpec(None, "image", str(offset), PlaceholderRange(offset=offset, length=length))
        for offset, length in IMAGES
    ]


@pytest.mark.parametrize(("computed", "new", "allowed"), [(10, 4, 0), (12, 2, 0)])
def test_vllms_scheduler_would_cut_an_image_and_ours_does_not(computed: int, new: int, allowed: int) -> None:
    cache = SimpleNamespace(
        get_cached_num_encoder_embeds=lambda *_: None, check_and_update_cache=lambda *_: True
    )  # it has the image's features
    scheduler = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_chunked_mm_input=True),
        is_encoder_decoder=False,
        encoder_cache_manager=cache,
    )
    request: Any = SimpleNamespace(has_encoder_inputs=True, mm_features=features())
    theirs = Scheduler._try_schedule_encoder_inputs
    for schedule, found in ((theirs, new), (_in_one_step(theirs), allowed)):
        assert schedule(scheduler, request, computed, new, 100)[1] == found
    scheduler.scheduler_config.disable_chunked_mm_input = False  # other kinds of model
    assert _in_one_step(theirs)(scheduler, request, computed, new, 100)[1] == new
