"""Samples and datums on disk, where they survive a restart: the newest that fit."""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tinker_server.api_schemas.inputs import ModelInput
from tinker_server.api_schemas.sampling import SampledSequence, SamplingParams
from tinker_server.backends.files import write_private
from tinker_server.observability.gallery import Item
from tinker_server.observability.kept_datums import KeptBatch, KeptDatum
from tinker_server.observability.recent_samples import Drawn, Shown

log = logging.getLogger(__name__)


class SampleFiles:
    """A file for each sample or batch, readable by the server's user alone. A power failure may lose the latest."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._held: Counter[str] = Counter()
        """Bytes of the files by owner."""

    async def held_bytes(self, owner: str) -> int:
        """Return the bytes of an owner's samples that are saved."""
        return self._held[owner]

    def save(self, items: Sequence[Item]) -> None:
        """Write the items, newest first, that are not there yet and fit; delete all other files."""
        if not items and not self._folder.exists():
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sizes = {path.name: path.stat().st_size for path in self._folder.iterdir()}
        kept, left_bytes, held = set[str](), self._max_bytes, Counter[str]()
        for item in items:
            name = f"{item.sample_id}.json"
            content = None if name in sizes else _encode(item)
            size_bytes = sizes[name] if content is None else len(content)
            left_bytes -= size_bytes
            if left_bytes < 0:
                break
            kept.add(name)
            held[item.owner] += size_bytes
            if content is not None:
                write_private(self._folder / name, content, durable=False)
        for name in sizes.keys() - kept:
            (self._folder / name).unlink(missing_ok=True)
        self._held = held

    def load(self) -> list[Item]:
        """Return the saved items, newest first; those that cannot be read are logged and left out."""
        found: list[Item] = []
        for path in self._folder.glob("*.json") if self._folder.is_dir() else ():
            try:
                content = path.read_bytes()
                found.append(_decode(content))
                self._held[found[-1].owner] += len(content)
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("the sample in %s cannot be read: %s", path.name, error)
        return sorted(found, key=lambda item: item.at, reverse=True)


_ARRAYS = {"tokens": np.int32, "logprobs": np.float32, "push": np.float32}
_DATUMS = ("largest", "group")
_PLAIN = ("owner", "sampler_id", "of", "num_samples", "size_bytes", "at", "sample_id", "step")


def _encode(item: Item) -> bytes:
    if isinstance(item, Shown):
        return json.dumps(_sample_fields(item)).encode()
    fields: dict[str, Any] = dict(vars(item))
    fields["prompts"] = {number: prompt.model_dump(mode="json") for number, prompt in item.prompts.items()}
    for name in _DATUMS:
        datums: list[KeptDatum] = fields[name]
        fields[name] = [vars(datum) | {key: getattr(datum, key).tolist() for key in _ARRAYS} for datum in datums]
    return json.dumps(fields).encode()


def _sample_fields(shown: Shown) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(shown, name) for name in _PLAIN}
    fields["prompt"] = shown.prompt.model_dump(mode="json")
    fields["params"] = shown.params.model_dump(mode="json")
    fields["sequences"] = [
        {
            "stop_reason": sequence.stop_reason,
            "tokens": sequence.tokens.tolist(),
            "logprobs": sequence.logprobs.tolist(),
        }
        for sequence in shown.sequences
    ]
    return fields


def _decode(content: bytes) -> Item:
    fields: dict[str, Any] = json.loads(content)
    return _batch(fields) if "prompts" in fields else _sample(fields)


def _batch(fields: dict[str, Any]) -> KeptBatch:
    fields["prompts"] = {int(key): ModelInput.model_validate(prompt) for key, prompt in fields["prompts"].items()}
    for name in _DATUMS:
        for datum in fields[name]:
            datum |= {key: np.array(datum[key], dtype) for key, dtype in _ARRAYS.items()}
        fields[name] = [KeptDatum(**datum) for datum in fields[name]]
    return KeptBatch(**fields)


def _sample(fields: dict[str, Any]) -> Shown:
    sequences = [
        SampledSequence(
            stop_reason=field["stop_reason"],
            tokens=np.array(field["tokens"], np.int32),
            logprobs=np.array(field["logprobs"], np.float32),
        )
        for field in fields["sequences"]
    ]
    prompt, params = ModelInput.model_validate(fields["prompt"]), SamplingParams.model_validate(fields["params"])
    fields.setdefault("step", None)  # of a server that did not write it
    rebuilt = {"of": Drawn(*fields["of"]), "prompt": prompt, "params": params, "sequences": sequences}
    return Shown(**{name: fields[name] for name in _PLAIN} | rebuilt)
