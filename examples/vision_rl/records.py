"""Records of questions with pictures, in two shapes. Columns that no shape names are ignored.

Geometry-3K as it is published (`hiyouga/geometry3k`):

    {"images": [{"bytes": ..., "path": ...}], "problem": "<image>Find x.", "answer": "12"}

and as environments keep it, which this module writes too:

    {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,..."}},
                                             {"type": "text", "text": "..."}]}],
     "env_class": "geometry3k",
     "reward_spec": {"method": "rule", "ground_truth": "12"}}

Read from .jsonl (the second shape) or .parquet. Any number of pictures, anywhere in any message; a message may be a
plain text. An environment that draws its own pictures gets a stub prompt: the record's text without one. If it also
computes its own reward, the record has no reward_spec.
"""

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from tinker_cookbook.renderers import Message

DATA_URI = "data:image/jpeg;base64,"
JPEG_QUALITY = 90
PUBLISHED = {"images", "problem", "answer"}
"""Columns of a published record."""
PLACE = "<image>"
"""Where a published problem has a picture."""
PUBLISHED_ENV = "geometry3k"
"""Environment of published records, which do not name one."""
ROLES = ("system", "user", "assistant")


class BadRecord(ValueError):
    """A record of another shape; the text says where and what is expected."""


@dataclass(frozen=True)
class Record:
    """One question."""

    messages: list[Message]
    """With decoded pictures."""
    env_class: str
    method: str | None
    ground_truth: str | None
    """Like `method` None if the record has no reward_spec."""


def data_uri(image: Image.Image) -> str:
    """A picture as the records hold it."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "JPEG", quality=JPEG_QUALITY)
    return DATA_URI + base64.b64encode(buffer.getvalue()).decode()


def make_row(image: Image.Image | None, text: str, env_class: str, ground_truth: str) -> dict[str, Any]:
    """A record of one user message; no picture: a stub prompt."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if image is not None:
        parts.insert(0, {"type": "image_url", "image_url": {"url": data_uri(image)}})
    return {
        "prompt": [{"role": "user", "content": parts}],
        "env_class": env_class,
        "reward_spec": {"method": "rule", "ground_truth": ground_truth},
    }


def read_records(path: Path) -> list[Record]:
    """All records of a file. Raises BadRecord naming the file, the row and the field."""
    return [parse(row, f"{path.name} row {number}") for number, row in enumerate(_rows(path))]


def _rows(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        yield from pyarrow.parquet.read_table(path).to_pylist()
    elif path.suffix == ".jsonl":
        with path.open() as lines:
            yield from map(json.loads, lines)
    else:
        raise BadRecord(f"{path.name}: records are read from .jsonl and .parquet")


def parse(row: Any, where: str) -> Record:
    """Raises BadRecord for a row of another shape."""
    _require(isinstance(row, dict), where, "a record is an object")
    if set(row) >= PUBLISHED:
        return _published(row, where)
    _require(set(row) >= {"prompt", "env_class"}, where, "it has prompt, env_class and, for most, reward_spec")
    _require(isinstance(row["env_class"], str), where, "env_class is a text")
    _require(isinstance(row["prompt"], list) and row["prompt"], where, "prompt is a list of messages")
    messages = [_message(message, f"{where} prompt[{i}]") for i, message in enumerate(row["prompt"])]
    return Record(messages, row["env_class"], *_reward(row.get("reward_spec"), where))


def _reward(spec: Any, where: str) -> tuple[str | None, str | None]:
    """Return method and ground truth; Parquet gives a row without a reward_spec a null."""
    if spec is None:
        return None, None
    is_whole = isinstance(spec, dict) and set(spec) >= {"method", "ground_truth"}
    _require(is_whole, where, "reward_spec has method and ground_truth")
    for name in ("method", "ground_truth"):
        _require(isinstance(spec[name], str), where, f"reward_spec.{name} is a text")
    return spec["method"], spec["ground_truth"]


def _published(row: dict[str, Any], where: str) -> Record:
    problem, answer, images = row["problem"], row["answer"], row["images"]
    _require(isinstance(problem, str) and isinstance(answer, str), where, "problem and answer are texts")
    _require(isinstance(images, list), where, "images is a list")
    texts = problem.split(PLACE)
    _require(len(texts) == len(images) + 1, where, f"the problem has {PLACE} once for each of its {len(images)} images")
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        if number:
            image = images[number - 1]
            data = image.get("bytes") if isinstance(image, dict) else None
            _require(isinstance(data, bytes), where, f"images[{number - 1}] has the bytes of its file")
            assert isinstance(data, bytes)
            parts.append({"type": "image", "image": _decoded(data, where)})
        if text.strip():
            parts.append({"type": "text", "text": text.strip()})
    return Record([{"role": "user", "content": parts}], PUBLISHED_ENV, "rule", answer)


def _message(message: Any, where: str) -> Message:
    _require(isinstance(message, dict) and message.get("role") in ROLES, where, f"role is one of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, str):
        return {"role": message["role"], "content": content}
    _require(isinstance(content, list) and content, where, "content is a text or a list of parts")
    parts = [_part(part, f"{where} content[{i}]") for i, part in enumerate(content)]
    return {"role": message["role"], "content": parts}


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    # Parquet gives every part all columns: those of the other kind are null.
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    url = (part.get("image_url") or {}).get("url") if kind == "image_url" else None
    _require(isinstance(url, str), where, 'a part is {"type": "text"} or {"type": "image_url"} with its content')
    assert isinstance(url, str)
    _require(url.startswith("data:image/") and ";base64," in url, where, "image_url.url is a data URI in base64")
    try:
        data = base64.b64decode(url.partition(";base64,")[2], validate=True)
    except ValueError as error:
        raise BadRecord(f"{where}: the picture does not decode: {error}") from None
    return {"type": "image", "image": _decoded(data, where)}


def _decoded(data: bytes, where: str) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    except (ValueError, OSError) as error:
        raise BadRecord(f"{where}: the picture does not decode: {error}") from None
    return image


def _require(holds: object, where: str, expected: str) -> None:
    if not holds:
        raise BadRecord(f"{where}: {expected}")
