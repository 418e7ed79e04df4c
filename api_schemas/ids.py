"""Ids of a session's models and sampling sessions, of sampled sequences and of owners."""

OWNER_URN = "tml:organization_user:"
"""Precedes an owner's name where the SDK shows a user. No name has a colon."""


def model_id(session_id: str, model_seq_id: int) -> str:
    """Return the id of a model, which is also its training run's."""
    return f"{session_id}:train:{model_seq_id}"


def sampling_session_id(session_id: str, sampling_session_seq_id: int) -> str:
    """Return the id of a sampling session."""
    return f"{session_id}:sample:{sampling_session_seq_id}"


def sequence_id(request_id: str, index: int) -> str:
    """Return the id of a continuation of a sample."""
    return f"{request_id}:{index}"


def owner_urn(owner: str) -> str:
    """Return the id of an owner."""
    return OWNER_URN + owner


def owner_of(urn: str) -> str:
    """Return the owner with an id, or of a name."""
    return urn.removeprefix(OWNER_URN)
