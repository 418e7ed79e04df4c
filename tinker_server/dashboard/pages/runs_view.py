"""What the viewer chose of the table of runs, as the address has it: search, order, columns, trend, groups."""

from collections.abc import Sequence
from typing import Annotated
from urllib.parse import urlencode

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from tinker_server.dashboard.pages.curves import IMPORTANT
from tinker_server.store.run_metrics import CLIENTS, MAX_NAME, RECORDED

MAX_COLUMNS, MAX_TICKED = 12, 50
PLAIN = ("steps", "tokens", "tokens_per_s", "loss")
TITLES = {
    "steps": "Steps",
    "tokens": "Tokens",
    "tokens_per_s": "Tokens/s",
    "loss": "Last loss",
    "grad_norm": "Gradient norm",
    "learning_rate": "Learning rate",
    "advantage": "Mean advantage",
    "sampler_gap": "Sampler gap",
    "divergence": "KL (k3)",
    "clip_fraction": "Clip fraction",
}
OFFERED = tuple(RECORDED)
Name = Annotated[str, Field(max_length=MAX_NAME + len(CLIENTS))]


class RunsView(BaseModel):
    """A view of the table. Its fields are the parameters of the address."""

    model_config = ConfigDict(frozen=True)

    q: Annotated[str, Field(max_length=200)] = ""
    page: Annotated[int, Field(ge=1, le=10**6)] = 1
    sort: Annotated[str, Field(max_length=MAX_NAME + len(CLIENTS) + 1)] = ""
    """Name of a metric, with "-" before it for the largest first; empty: the newest first."""
    col: Annotated[list[Name], Field(max_length=MAX_COLUMNS + 1)] = []
    """Columns that were chosen; an empty name says that they were, even if there is none. Empty: the usual columns."""
    trend: Name = ""
    group: Name = ""
    """Key that runs are grouped by."""
    member: Annotated[str, Field(alias="in", max_length=20_000)] = ""
    """A value of `group`: only its runs are shown, each on its own."""
    only: bool = False
    """Whether `member` counts: the value may be empty."""
    archived: bool = False
    run: Annotated[list[str], Field(max_length=MAX_TICKED)] = []
    """Runs that are ticked. They are not in the address."""

    def query(self, **changes: object) -> str:
        """Return the address's query of this view with some fields changed; empty for the plain view."""
        changed = self.model_dump(exclude={"run"}) | changes
        fields = {("in" if name == "member" else name): value for name, value in changed.items()}
        given = [(name, value) for name, value in fields.items() if value not in ("", [], False, 1) or value is True]
        query = urlencode([(name, "true" if value is True else value) for name, value in given], doseq=True)
        return f"?{query}" if query else ""

    def sort_query(self, name: str) -> str:
        """Return the query of the same view sorted by a column; by the column again: the other way round."""
        return self.query(sort=name if self.sort == f"-{name}" else f"-{name}", page=1)


Asked = Annotated[RunsView, Query()]


def column_title(name: str) -> str:
    """Return the heading of a column."""
    return TITLES.get(name, name.removeprefix(CLIENTS))


def offer_names(reported: Sequence[str]) -> list[str]:
    """Return the names by which reported metrics are chosen."""
    return [f"{CLIENTS}{name}" if name in RECORDED else name for name in reported]


def columns_of(view: RunsView, reported: Sequence[str]) -> list[str]:
    """Return the columns of metrics: those chosen, else the usual and the most telling that the runs reported."""
    if view.col:
        return list(dict.fromkeys(filter(None, view.col)))[:MAX_COLUMNS]
    telling = [name for pattern in IMPORTANT for name in reported if pattern.search(name)]
    return [*PLAIN, *offer_names(list(dict.fromkeys(telling))[:2])]
