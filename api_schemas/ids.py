"""Ids of a session's models and sampling sessions."""


def model_id(session_id: str, model_seq_id: int) -> str:
    """Return the id of a model, which is also its training run's."""
    return f"{session_id}:train:{model_seq_id}"


def sampling_session_id(session_id: str, sampling_session_seq_id: int) -> str:
    """Return the id of a sampling session."""
    return f"{session_id}:sample:{sampling_session_seq_id}"
