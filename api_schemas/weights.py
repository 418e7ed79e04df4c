"""Saving and loading weights (protocol sections 4.3 and 4.6)."""

import re
from typing import Any, Literal, NamedTuple

from pydantic import Field

from api_schemas.base import Request, Response
from api_schemas.training import OptimizerConfig

Kind = Literal["weights", "sampler_weights", "external_weights"]
_PATH = re.compile(r"tinker://(?P<run>[^/]+)/(?P<kind>weights|sampler_weights|external_weights)/(?P<name>[^/]+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class TinkerPath(NamedTuple):
    """`tinker://<training run>/<kind>/<name>`, the public name of saved weights."""

    run_id: str
    kind: Kind
    name: str

    @classmethod
    def parse(cls, path: str) -> "TinkerPath":
        """Raises ValueError with the grammar where `path` does not follow it."""
        match = _PATH.fullmatch(path)
        if match is None:
            raise ValueError(f"{path!r} is not tinker://<run>/<weights, sampler_weights or external_weights>/<name>")
        return cls(match["run"], match["kind"], match["name"])  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"


def check_name(name: str) -> str:
    """A checkpoint's name becomes a directory's: letters, digits, `.`, `_`, `-`, not starting with a dot."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            f"checkpoint name {name!r}: use 1 to 128 letters, digits, '.', '_' or '-', starting with a letter or digit"
        )
    return name


class SaveWeightsRequest(Request):
    """Save a training checkpoint: adapter, optimizer, step count."""

    type: Literal["save_weights"] = "save_weights"
    model_id: str
    seq_id: int
    path: str
    """Its name within the run."""
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class SaveWeightsResponse(Response):
    type: Literal["save_weights"] = "save_weights"
    path: str


class SaveWeightsForSamplerRequest(Request):
    """Save weights to sample from: under a name, or (no path) straight into a new sampling session."""

    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"
    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = Field(default=None, ge=0)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class SaveWeightsForSamplerResponse(Response):
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"
    path: str | None = None
    sampling_session_id: str | None = None


class SaveWeightsExternalRequest(Request):
    """Save the adapter in the forms that other programs read; it can be downloaded, not loaded or sampled from."""

    type: Literal["save_weights_external"] = "save_weights_external"
    model_id: str
    seq_id: int
    path: str
    """Its name within the run."""
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None
    age_encryption_recipients: list[str] | None = None
    """Every file is encrypted to these age or SSH public keys, and ends in `.age`."""


class SaveWeightsExternalResponse(Response):
    type: Literal["save_weights_external"] = "save_weights_external"
    path: str
    size_bytes: int


class LoadWeightsRequest(Request):
    """Create a model from a checkpoint (session_id, model_seq_id), or load one into a model (model_id, seq_id)."""

    type: Literal["load_weights"] = "load_weights"
    path: str
    optimizer: bool = False
    """Also restore the optimizer's state and step count."""
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0)
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None
    model_id: str | None = None
    seq_id: int | None = None


class LoadWeightsResponse(Response):
    type: Literal["load_weights"] = "load_weights"
    path: str
    model_id: str
