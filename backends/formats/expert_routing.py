"""Files of expert routing: the sampler writes which experts tokens went to, and the trainer sends them to the same.

Rounding alone sends some of a mixture's tokens to other experts in the trainer than in the engine, and changes their
log probabilities. Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers",
arXiv:2510.11370, train on sampled tokens with the experts that sampled them. The wire carries no routing, so a file is
found by the sampled sequence that a datum names, else by a model's name and the tokens themselves.

S tokens of a sequence with its prompt, T tokens, L layers of the decoder, K experts of a token
"""

import contextlib
import hashlib
import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinker_server.backends.inputs.rendering import Rendered

log = logging.getLogger(__name__)
_MAX_BYTES = 4 << 30
"""Bytes of all files of an engine. A decoder of 48 layers with 8 experts per token takes 384 bytes a token."""
_ASIDE = "aside"
"""How the name of a file begins while it is written."""


def routing_name(owner: str, model_id: str, rendered: Rendered, sampled: Iterable[int] = ()) -> str:
    """Name the file of an input of a user's model, perhaps followed by tokens that were sampled after it."""
    digest = hashlib.sha256()
    for text in (owner, model_id, *(image.hash for image in rendered.images)):
        digest.update(len(text.encode()).to_bytes(4, "big") + text.encode())
    digest.update(rendered.token_ids_T.astype(np.int64).tobytes())
    digest.update(np.fromiter(sampled, np.int64).tobytes())
    return digest.hexdigest()


def sequence_name(owner: str, sequence_id: str) -> str:
    """Name the file of a sampled sequence."""
    digest = hashlib.sha256()
    for text in (owner, sequence_id):
        digest.update(len(text.encode()).to_bytes(4, "big") + text.encode())
    return f"sequence-{digest.hexdigest()}"


def identities(rendered: Rendered, sampled: Iterable[int] = ()) -> np.ndarray:
    """Return [S] int64, equal for inputs that a model sees alike: tokens, and for those of an image a negative number
    made of its hash."""
    tokens_T = rendered.token_ids_T.astype(np.int64)
    for span, image in zip(rendered.spans, rendered.images, strict=True):
        number = int.from_bytes(hashlib.sha256(image.hash.encode()).digest()[:7], "big")
        tokens_T[span.offset : span.offset + span.num_tokens] = -1 - number
    return np.append(tokens_T, np.fromiter(sampled, np.int64))


@dataclass(frozen=True)
class NamedSequence:
    """A sampled sequence behind its prompt."""

    name: str
    tokens_S: np.ndarray
    """Its `identities`."""
    num_prompt: int
    """Those of them that are the prompt's."""


class RoutingFiles:
    """Writes routing files, in one process; it finds the files of an earlier one again. Several processes may write to
    one directory, each under its own `writer`."""

    def __init__(self, directory: Path, max_bytes: int = _MAX_BYTES, writer: str = "") -> None:
        """Beyond `max_bytes` the oldest files are deleted, of this writer and of those that were there. Of these, the
        oldest count that make `max_bytes`: newer ones may be those of writers that live."""
        self._directory = directory
        self._left_bytes = max_bytes
        self._sizes: dict[str, int] = {}
        """Bytes by name, the oldest first."""
        self._writing = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True)
        self._aside = directory / f"{_ASIDE}{writer}"
        self._aside.unlink(missing_ok=True)
        for _, name, size in sorted(_files(directory)):
            if size > self._left_bytes:
                break
            self._count(name, size)

    def write(self, name: str, experts_TLK: np.ndarray, sequence: NamedSequence | None = None) -> None:
        """Write or replace the file of this name, and that of the sequence which has these experts. From any thread."""
        with self._writing:
            self._aside.unlink(missing_ok=True)
            with self._aside.open("wb") as file:
                np.save(file, experts_TLK, allow_pickle=False)
                if sequence is not None:
                    np.save(file, sequence.tokens_S, allow_pickle=False)
                    np.save(file, np.int64(sequence.num_prompt), allow_pickle=False)
            self._put(name if sequence is None else sequence.name)
            if sequence is not None:
                self._aside.symlink_to(sequence.name)
                self._put(name)

    def _put(self, name: str) -> None:
        self._count(name, self._aside.lstat().st_size)
        self._aside.replace(self._directory / name)

    def _count(self, name: str, size: int) -> None:
        self._left_bytes += self._sizes.pop(name, 0) - size
        while self._left_bytes < 0 and self._sizes:
            oldest = next(iter(self._sizes))
            self._left_bytes += self._sizes.pop(oldest)
            (self._directory / oldest).unlink(missing_ok=True)
        self._sizes[name] = size


def _files(directory: Path) -> Iterator[tuple[int, str, int]]:
    """Yield time of writing, name and size of each whole file; other writers may delete some meanwhile."""
    for file in directory.iterdir():
        if not file.name.startswith(_ASIDE):
            with contextlib.suppress(FileNotFoundError):
                state = file.lstat()
                yield state.st_mtime_ns, file.name, state.st_size


def read_routing(directory: Path, name: str) -> np.ndarray | None:
    """Read [T, L, K] unsigned integers; None if there is no such file, or it is not whole."""
    arrays = _read(directory / name, 1)
    return None if arrays is None else arrays[0]


def read_sequence(directory: Path, name: str) -> tuple[np.ndarray, NamedSequence] | None:
    """Read a sequence and its experts [T, L, K], of all of its tokens but the last; None as `read_routing`."""
    arrays = _read(directory / name, 3)
    return None if arrays is None else (arrays[0], NamedSequence(name, arrays[1], int(arrays[2])))


def _read(path: Path, count: int) -> list[np.ndarray] | None:
    try:
        with path.open("rb") as file:
            return [np.load(file, allow_pickle=False) for _ in range(count)]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:  # as after a power loss: these files are not durable
        log.warning("cannot read a file of expert routing: %s", error)
        return None
