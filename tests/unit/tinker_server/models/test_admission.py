"""What an owner may have in flight: several hundred images, and never so little that nothing gets in."""

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
            admission.enter_sample("alice", 1, 50_000, SCORING)
            num_let_in += 1
    assert 500 < num_let_in < 1000
    for _ in range(4517 - num_let_in):
        admission.leave_sample("alice", 1, 50_000, SCORING)
        admission.enter_sample("alice", 1, 50_000, SCORING)


def test_a_prompt_whose_images_are_larger_than_all_room_is_let_in_alone_and_text_beside_it() -> None:
    admission = Admission(100, 1 << 40, 1 << 40)
    admission.enter_sample("alice", 1, 10, 2 * MAX_IMAGE_BYTES)
    with pytest.raises(Busy, match="bytes of images' pixels are in flight"):
        admission.enter_sample("alice", 1, 10, 1)
    admission.enter_sample("alice", 1, 10, 0)
    assert admission.sequences.total == 2, "what is refused counts for nothing"
    admission.leave_sample("alice", 1, 10, 2 * MAX_IMAGE_BYTES)
    admission.enter_sample("alice", 1, 10, 1)
