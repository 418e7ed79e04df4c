"""Lists of names in errors."""

from collections.abc import Sequence


def join_names(names: Sequence[str], most: int = 5) -> str:
    """Join the first `most` names, and say how many more there are; empty if there are none."""
    others = f" and {len(names) - most} others" if len(names) > most else ""
    return ", ".join(names[:most]) + others
