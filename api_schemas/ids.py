"""Ids that are made of others: a session's models and sampling sessions."""


def model_id(session_id: str, model_seq_id: int) -> str:
    """Of a model, and of its training run."""
    return f"{session_id}:train:{model_seq_id}"


def sampling_session_id(session_id: str, sampling_session_seq_id: int) -> str:
    """Of what a client samples from."""
    return f"{session_id}:sample:{sampling_session_seq_id}"
