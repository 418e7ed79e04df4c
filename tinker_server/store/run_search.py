"""Search of runs by words."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, SQLColumnExpression, Text, case, cast, func, or_

from tinker_server.errors import BadRequest
from tinker_server.store.database import can_be_searched, require_searchable
from tinker_server.store.notes import NOTES
from tinker_server.store.run_metrics import comparison
from tinker_server.store.tables import SessionRow, TrainingRunRow

NOTED = (*NOTES[TrainingRunRow], *NOTES[SessionRow])
"""Texts of a run that its client or owner wrote."""
BASE_MODEL = "base_model"
MAX_WORDS = 16
"""Different words of a search: each is looked for in every text of every entry."""


@dataclass(frozen=True)
class Group:
    """Runs with the same value of a key: `base_model`, or a key of the metadata."""

    key: str
    value: str


def group_key(key: str) -> ColumnElement[str]:
    """Return a run's value of a key that runs are grouped by; empty if it has none. Raises BadRequest."""
    if key == BASE_MODEL:
        return cast(TrainingRunRow.base_model, Text)
    require_searchable([key])
    of_run, of_session = (row.user_metadata[key].as_string() for row in (TrainingRunRow, SessionRow))
    return func.coalesce(of_run, of_session, "")


@dataclass(frozen=True)
class RunSearch:
    """Words (`words_of`) that a run has in its id, name, base model, state, tags, notes or metadata.

    A word `key=value` is looked for in the metadata of this key. A word such as `reward>0.5` compares the latest value
    of a metric.
    """

    words: Sequence[str]
    states: Mapping[str, str]
    """State of a run by its status."""
    at_work: Mapping[str, Sequence[str]]
    """Ids, by their state, of runs whose state is not their status's."""
    archived: bool | None = None
    """Only runs that are archived, or only runs that are not; None: all."""
    group: Group | None = None
    """Only the runs of this group."""


def words_of(field: str, text: str) -> list[str]:
    """Split what is searched for into its words, each once. Raises BadRequest, which names the field."""
    words = list(dict.fromkeys(text.split()))
    if len(words) > MAX_WORDS:
        raise BadRequest(f"{field}: {len(words)} different words are searched for; {MAX_WORDS} are allowed")
    return words


def has_words(search: RunSearch) -> Iterator[ColumnElement[bool]]:
    """Yield a condition for each word."""
    states: list[tuple[ColumnElement[bool], str]] = [
        (TrainingRunRow.model_id.in_(run_ids), state) for state, run_ids in search.at_work.items()
    ]
    states += [(TrainingRunRow.status == status, state) for status, state in search.states.items()]
    names = (TrainingRunRow.model_id, TrainingRunRow.base_model, case(*states, else_=""), *NOTED)
    if search.archived is not None:
        yield TrainingRunRow.archived_at.is_not(None) if search.archived else TrainingRunRow.archived_at.is_(None)
    if search.group is not None:
        yield group_key(search.group.key) == search.group.value
    for word in search.words:
        if (compared := comparison(word)) is not None:
            yield compared
            continue
        either = [_contains(name, word) for name in names]
        key, is_pair, value = word.partition("=")
        if is_pair and can_be_searched(key):
            of_key = (TrainingRunRow.user_metadata[key].as_string(), SessionRow.user_metadata[key].as_string())
            either += [_contains(column, value) for column in of_key]
        yield or_(*either)


def _contains(value: SQLColumnExpression[object], word: str) -> ColumnElement[bool]:
    """Return the condition that a text, or a JSON value as text, contains the word in any case."""
    return func.lower(cast(value, Text)).contains(word.lower(), autoescape=True)
