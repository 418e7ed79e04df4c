"""Fields shared by several requests and answers, each described once."""

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from tinker_server.api_schemas.base import NOTED
from tinker_server.api_schemas.ids import OWNER_URN, owner_of


def _number_validator(kind: str) -> BeforeValidator:
    """Refuse values that pydantic would convert to a number: "2", true."""

    def check(value: object) -> object:
        if value is None:
            text = "must be {kind}: null is what the SDK sends for NaN and infinities; leave it out for the default"
            raise PydanticCustomError("no_number", text, {"kind": kind})
        if isinstance(value, bool | str):
            raise PydanticCustomError("no_number", "must be {kind}", {"kind": kind})
        return value

    return BeforeValidator(check)


Integer = Annotated[int, _number_validator("an integer")]
"""An integer that a client must send as an integer."""
Real = Annotated[float, _number_validator("a number")]
"""A number that a client must send as a number."""

SessionId = Annotated[str, Field(description="A session, which is one client.")]
ModelId = Annotated[
    str, Field(description="A model, which is also its training run: `{session_id}:train:{model_seq_id}`.")
]
SamplingSessionId = Annotated[
    str, Field(description="A sampling session: `{session_id}:sample:{sampling_session_seq_id}`.")
]
RequestId = Annotated[str, Field(description="Id of an operation, whose result is fetched with retrieve_future.")]
BaseModelName = Annotated[str, Field(description="Public name of a served base model.")]
TinkerPathText = Annotated[
    str, Field(description="`tinker://<training run>/<kind>/<name>`, the public name of saved weights.")
]
OwnerUrn = Annotated[
    str, Field(description=f"An owner, which is the name of API keys behind `{OWNER_URN}`.", pattern=f"^{OWNER_URN}")
]
NamedOwner = Annotated[
    str, AfterValidator(owner_of), Field(description=f"An owner's name, with or without `{OWNER_URN}` before it.")
]
ProjectId = Annotated[str, Field(description="A project, which is only a name here.")]
SeqId = Annotated[
    Integer,
    Field(description="Sequence number of the operation, from 1 per model. A repeat is the same operation."),
]
ModelSeqId = Annotated[Integer, Field(description="The client's number of the model in its session.")]
CheckpointName = Annotated[str, Field(description="Name of the saved weights within their training run.")]
Overwrite = Annotated[bool, Field(description="Replace weights of this name. If false, a name in use fails the save.")]
TtlSeconds = Annotated[
    Integer | None, Field(description="Seconds until the weights are deleted, counted from now; null: they are kept.")
]
ClientMetadata = Annotated[
    dict[str, object] | None,
    NOTED,
    Field(description="Free-form notes of the client. They are listed, and have no effect."),
]
AccessToken = Annotated[
    str | None, Field(description="An API key of the weights' owner; needed to read unpublished weights.")
]
