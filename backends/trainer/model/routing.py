"""What experts the sampler chose for the datums of a request, found before they are planned and computed.

A beginning has one routing: datums share it as far as theirs is the same. The routing of an image is the same as a
whole or not at all.

T tokens of a datum, L layers of the decoder, K experts of a token
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from tinker_server.api_schemas.inputs import Datum
from tinker_server.backends.inputs.rendering import Layout, Rendered, Renderer, images_of
from tinker_server.backends.protocol import InvalidInput
from tinker_server.backends.trainer.model.router_replay import UNKNOWN, RouterReplay

Experts = Callable[[int], np.ndarray | None]
"""Finds [T, L, K] of a datum, as `RouterReplay.find`."""


def find_experts(
    replay: RouterReplay, names: tuple[str, str], index: int, datum: Datum, rendered: Rendered
) -> np.ndarray | None:
    """Return [T, L, K] of a datum of the user and the model of these names, as `RouterReplay.find`."""
    try:
        return replay.find(*names, rendered, datum.model_input_spans)
    except InvalidInput as error:
        raise InvalidInput(f"datum {index}: {error}") from None


def experts_of(
    replay: RouterReplay, renderer: Renderer, names: tuple[str, str], data: Sequence[Datum], layouts: Sequence[Layout]
) -> Experts:
    """Return what finds the experts of a request's datums, without decoding images."""

    def find(index: int) -> np.ndarray | None:
        model_input, layout = data[index].model_input, layouts[index]
        known = {name for name, _, _ in images_of(model_input, layout)}
        rendered = renderer.render(model_input, f"datum {index}", known, layout)
        return find_experts(replay, names, index, data[index], rendered)

    return find


def identify_with_routing(
    identities: Sequence[np.ndarray], layouts: Sequence[Layout], experts: Experts
) -> list[np.ndarray]:
    """Return [T] int64 for each input, equal where both its identity and its routing are, negative at images."""
    numbers: dict[tuple[int, bytes], int] = {}
    found = []
    for index, (tokens_T, layout) in enumerate(zip(identities, layouts, strict=True)):
        routes = _routes(experts(index), layout)
        keys = zip(tokens_T.tolist(), routes, strict=True)
        number_T = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
        found.append(np.where(tokens_T < 0, -1 - number_T, number_T))
    return found


def _routes(experts_TLK: np.ndarray | None, layout: Layout) -> list[bytes]:
    """Return for each token what its experts are known by, empty where they are not known; for an image's, those of the
    whole image."""
    if experts_TLK is None:
        return [b""] * layout.num_tokens
    known_T = (experts_TLK != UNKNOWN).any(axis=(1, 2))
    routes = [_digest(row) if known else b"" for row, known in zip(experts_TLK, known_T, strict=True)]
    for span in layout.spans:
        tokens = slice(span.offset, span.offset + span.num_tokens)
        routes[tokens] = [_digest(experts_TLK[tokens]) if known_T[tokens].any() else b""] * span.num_tokens
    return routes


def _digest(experts: np.ndarray) -> bytes:
    """Return 16 bytes in place of the kilobytes that a token of many layers has: those of a whole batch are kept."""
    return hashlib.blake2b(experts.tobytes(), digest_size=16).digest()
