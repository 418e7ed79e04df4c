"""Fields that many requests and answers share, each described once."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from api_schemas.base import NOTED


def _sent_as_number(kind: str) -> BeforeValidator:
    """Raises for what pydantic would turn into a number that nobody sent: "2", true."""

    def check(value: Any) -> Any:
        if isinstance(value, bool | str):
            raise PydanticCustomError("no_number", "must be {kind}", {"kind": kind})
        return value

    return BeforeValidator(check)


Integer = Annotated[int, _sent_as_number("an integer")]
"""An integer that a client has to send as one."""
Real = Annotated[float, _sent_as_number("a number")]
"""A number that a client has to send as one."""

SessionId = Annotated[str, Field(description="A session, which is one client.")]
ModelId = Annotated[
    str, Field(description="A model, which is also its training run: `{session_id}:train:{model_seq_id}`.")
]
SamplingSessionId = Annotated[
    str, Field(description="What a client samples from: `{session_id}:sample:{sampling_session_seq_id}`.")
]
RequestId = Annotated[str, Field(description="Names an operation. Its result is fetched with retrieve_future.")]
BaseModelName = Annotated[str, Field(description="Public name of a served base model.")]
TinkerPathText = Annotated[
    str, Field(description="`tinker://<training run>/<kind>/<name>`, the public name of saved weights.")
]
ProjectId = Annotated[str, Field(description="A project, which is a mere name here.")]
SeqId = Annotated[
    Integer,
    Field(description="Number of the operation; a client counts a model's from 1. A repeat is the same operation."),
]
ModelSeqId = Annotated[Integer, Field(description="The client's number of the model in its session.")]
CheckpointName = Annotated[str, Field(description="Name of the saved weights within their training run.")]
Overwrite = Annotated[
    bool, Field(description="Replace weights of this name. Without it, a name in use fails the save.")
]
TtlSeconds = Annotated[
    Integer | None, Field(description="Seconds until the weights are deleted, counted from now; null: they are kept.")
]
ClientMetadata = Annotated[
    dict[str, Any] | None,
    NOTED,
    Field(description="Whatever the client wants to note. It is listed, and means nothing here."),
]
AccessToken = Annotated[
    str | None, Field(description="An API key of the weights' owner, to read what is not published.")
]
