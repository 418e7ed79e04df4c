"""How many of our functions a rank calls for the simplest training step: each is one more thing to know for whoever
follows it. The number may only fall."""

import sys
from pathlib import Path
from types import FrameType

from tests.factories import cross_entropy, datum, make_renderer, prompt, words
from tests.trainers import LORA, forward_backward, trained, trainer

CEILING = 125
ROOT = Path(__file__).parents[5]
OURS = tuple(f"{ROOT / 'tinker_server' / room}/" for room in ("api_schemas", "backends"))
FOR_OTHERS = {
    "prefetch": "images",
    "_images_elsewhere": "slices",
    "slice_tokens": "slices",
    "next_on": "images",
    "_isolate": "sharing",
    "all_finite": "sharing",
    "open_image": "images",
}
"""Functions that only some steps need, and what for."""


def test_a_text_of_one_request_on_one_rank_takes_the_straight_way(tiny_text: Path) -> None:
    rank, renderer = trained(trainer(tiny_text), {"m": LORA}), make_renderer(tiny_text)
    batches = [cross_entropy([datum(prompt(words(17, seed)), renderer)]) for seed in range(2)]
    forward_backward(rank, "m", batches[0])
    calls: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS) and "<" not in code.co_name:
            calls.append(code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        forward_backward(rank, "m", batches[1])
    finally:
        sys.setprofile(before)
    until_forward = calls[: calls.index("Scorer.forward")]
    assert len(until_forward) <= CEILING, until_forward
    assert FOR_OTHERS.keys().isdisjoint(name.rpartition(".")[2] for name in calls)
