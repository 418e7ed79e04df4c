"""`python -m tinker_server.cookbook MODULE ...` runs a recipe of the cookbook as `python -m MODULE ...` does, and its
`ml_log` has one logger more: it sends the metrics to the page of the run. It is for clients."""

import functools
import logging
import math
import numbers
import runpy
import sys
from collections.abc import Callable, Mapping
from typing import Any

import tinker
from tinker_cookbook.utils import ml_log

from tinker_server.client_metrics import Metrics

logger = logging.getLogger(__name__)
Row = tuple[int | None, dict[str, float]]


class RunLogger(ml_log.Logger):  # type: ignore[misc] # the cookbook's names are Any where it is not installed
    """Sends the numbers among the logged values. Rows that come before the training client are kept until it exists."""

    def __init__(self, newest_run: Callable[[], str | None], base_url: str | None = None) -> None:
        """`newest_run` returns the id of the run that is trained, once there is one."""
        self._newest_run = newest_run
        self._base_url = base_url
        self._metrics: Metrics | None = None
        self._rows: list[Row] = []

    def log_hparams(self, config: Any) -> None:
        """Do nothing: the run's page has the settings of each step."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Send a row. What the server refuses is a warning, since training goes on without it."""
        self._rows.append((step, _numbers(metrics)))
        if self._metrics is None and (run_id := self._newest_run()) is not None:
            self._metrics = Metrics(run_id, self._base_url)
        if self._metrics is None:
            return
        rows, self._rows = self._rows, []
        for of_step, values in rows:
            try:
                self._metrics.log(values, step=of_step)
            except (ValueError, TimeoutError) as error:
                logger.warning("metrics of step %s were not sent: %s", of_step, error)

    def close(self) -> None:
        """Close the connection."""
        if self._metrics is not None:
            self._metrics.close()


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a row; texts and truth values belong to other loggers."""
    found = {name: value for name, value in metrics.items() if isinstance(value, numbers.Real)}
    return {name: float(value) for name, value in found.items() if not isinstance(value, bool) and math.isfinite(value)}


def add_logger() -> None:
    """Have every later `ml_log.setup_logging` of this process add a RunLogger.

    It is the logger of the first training client that is made after it.
    """
    run_ids: list[str] = []
    construct = tinker.TrainingClient.__init__
    set_up = ml_log.setup_logging

    @functools.wraps(construct)
    def construct_and_note(self: tinker.TrainingClient, *arguments: Any, **named: Any) -> None:
        construct(self, *arguments, **named)
        run_ids.append(self.model_id)

    @functools.wraps(set_up)
    def set_up_and_add(*arguments: Any, **named: Any) -> Any:
        made = set_up(*arguments, **named)
        before = len(run_ids)
        base_url = getattr(named.get("config"), "base_url", None)
        made.loggers.append(RunLogger(lambda: run_ids[before] if len(run_ids) > before else None, base_url))
        return made

    tinker.TrainingClient.__init__ = construct_and_note  # type: ignore[method-assign]
    ml_log.setup_logging = set_up_and_add


def main() -> None:
    """Run a module with its arguments."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m tinker_server.cookbook MODULE [ARGUMENT ...], with a recipe's module")
    add_logger()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
