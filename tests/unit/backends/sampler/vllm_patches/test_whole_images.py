"""The next tokens of a prompt that a step may compute without a part of an image."""

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from backends.sampler.vllm_patches.whole_images import whole_tokens

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
    features = [
        MultiModalFeatureSpec(None, "image", str(offset), PlaceholderRange(offset=offset, length=length))
        for offset, length in IMAGES
    ]
    assert whole_tokens(features, computed, new) == allowed
