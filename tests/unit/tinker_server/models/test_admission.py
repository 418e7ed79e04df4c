"""An owner may have several hundred images in flight, and never so few that nothing gets in."""

import pytest

from tinker_server.errors import Busy
from tinker_server.models.admission import MAX_IMAGE_BYTES, Admission

SCORING = 512 * 512 * 3
"""Bytes of the pixels of an image of 512 x 512."""


def test_several_hundred_images_are_in_flight_at_once_and_each_that_ends_makes_room_for_another() -> None:
    admission = Admission(1 << 20, 1 << 40, 1 << 40)
    num_let_in = 0
    with pytest.raises(Busy):
        for _ in range(4517):
            admission.samples.enter("alice", 1, 50_000, SCORING)
            num_let_in += 1
    assert 500 < num_let_in < 1000
    for _ in range(4517 - num_let_in):
        admission.samples.leave("alice", 1, 50_000, SCORING)
        admission.samples.enter("alice", 1, 50_000, SCORING)


def test_a_prompt_whose_images_are_larger_than_all_room_is_let_in_alone_and_text_beside_it() -> None:
    admission = Admission(100, 1 << 40, 1 << 40)
    admission.samples.enter("alice", 1, 10, 2 * MAX_IMAGE_BYTES)
    with pytest.raises(Busy, match="bytes of images' pixels are in flight"):
        admission.samples.enter("alice", 1, 10, 1)
    admission.samples.enter("alice", 1, 10, 0)
    assert admission.samples.totals[0] == 2, "what is refused counts for nothing"
    admission.samples.leave("alice", 1, 10, 2 * MAX_IMAGE_BYTES)
    admission.samples.enter("alice", 1, 10, 1)
