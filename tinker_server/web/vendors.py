"""The paths that speak another vendor's protocol, and the form of refusals there."""

from typing import Literal

Vendor = Literal["openai", "anthropic"]

OPENAI = ("/oai/api/v1", "/v1")
"""Ends of the base_url of OpenAI's clients; their paths follow."""
ANTHROPIC = ("/anthropic/api/v1", "/anthropic/api/v1/v1", "/v1")
"""Anthropic's client adds /v1/messages to its base_url: to .../anthropic/api, or to .../anthropic/api/v1."""
LARGE = {f"{prefix}/{name}" for prefix in OPENAI for name in ("chat/completions", "completions", "responses")} | {
    f"{prefix}/{name}" for prefix in ANTHROPIC for name in ("messages", "messages/count_tokens")
}
"""Paths of conversations with images."""

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = _OPENAI_TYPES | {413: "request_too_large"}
_CODES = {
    "Unauthenticated": "invalid_api_key",
    "UnknownBaseModel": "model_not_found",
    "UnknownCheckpoint": "model_not_found",
    "Busy": "rate_limit_exceeded",
}


def vendor_of(path: str) -> Vendor | None:
    """Return the vendor whose protocol a path speaks; None for this server's own."""
    if path.startswith(("/anthropic/", "/v1/messages")):
        return "anthropic"
    return "openai" if path.startswith(tuple(f"{prefix}/" for prefix in OPENAI)) else None


def error_body(vendor: Vendor, status: int, error: Exception, text: str, field: str | None = None) -> dict[str, object]:
    """Make a refusal as the vendor's clients read it; `field` is the field it is about."""
    server_fault = status >= 500
    if vendor == "anthropic":
        kind = "api_error" if server_fault else _ANTHROPIC_TYPES.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": text}}
    kind = "server_error" if server_fault else _OPENAI_TYPES.get(status, "invalid_request_error")
    code = _CODES.get(type(error).__name__)
    return {"error": {"message": text, "type": kind, "param": field, "code": code}}
