"""A rank decodes a body without the server's bounds, and whatever the bytes are, it computes on."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.factories import cross_entropy, datum, image, prompt, succeeded, words
from tests.trainers import LORA, together, trained, trainer
from tinker_server.backends.inputs.rendering import Renderer
from tinker_server.backends.protocol import BackendFailed, InvalidInput


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_answers_a_damaged_body_and_computes_the_next(tiny_vl: Path, renderer: Renderer, seed: int) -> None:
    rank = trained(trainer(tiny_vl), {"m": LORA})
    sound = cross_entropy([datum(prompt(words(5), image(64, 64), words(3)), renderer)])
    (expected,) = together(rank, [("m", sound)], backward=False)
    chance, refused = random.Random(seed), 0
    for _ in range(40):
        damaged = bytearray(sound.body)
        for _ in range(chance.randrange(1, 6)):
            damaged[chance.choice([0, 1, 2, 3, chance.randrange(len(damaged))])] ^= 1 << chance.randrange(8)
        del damaged[chance.choice([len(damaged), chance.randrange(len(damaged))]) :]
        (outcome,) = together(rank, [("m", replace(sound, body=bytes(damaged)))])
        refused += isinstance(outcome, InvalidInput | BackendFailed)
    assert refused > 20
    (output,) = together(rank, [("m", sound)], backward=False)
    for one, other in zip(succeeded(output).loss_fn_outputs, succeeded(expected).loss_fn_outputs, strict=True):
        np.testing.assert_array_equal(one["logprobs"], other["logprobs"])
