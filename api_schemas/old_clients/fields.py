"""Conversion of fields that older SDKs send in other forms."""

_KEY_OF_CHUNK = {"data": "image", "location": "image_asset_pointer", "dmel": "dmel", "tokens": "encoded_text"}


def image_fields(data: object) -> object:
    """Rename the token count of an image chunk to `expected_tokens`."""
    if not isinstance(data, dict) or "tokens" not in data or "expected_tokens" in data:
        return data
    return {"expected_tokens" if key == "tokens" else key: value for key, value in data.items()}


def chunk_type(chunk: dict[str, object]) -> str | None:
    """Infer the type of an untyped chunk from its keys; None if they match no chunk."""
    return next((kind for key, kind in _KEY_OF_CHUNK.items() if key in chunk), None)
