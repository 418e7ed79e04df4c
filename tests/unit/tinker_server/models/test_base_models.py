"""What the server asks of the models that it serves."""

from types import SimpleNamespace
from typing import Any

import pytest

from tinker_server.models.base_models import BaseModels


@pytest.mark.parametrize(
    ("numerics", "wanted"),
    [({}, 1), ({"ranks": "4"}, 4), ({"ranks": "6 on 3 machines, float32 between them"}, 6)],
)
def test_ranks_are_counted_on_all_machines(numerics: dict[str, str], wanted: int) -> None:
    served: Any = SimpleNamespace(info=SimpleNamespace(numerics=numerics))
    bases = BaseModels({"tiny": served})
    assert bases.ranks("tiny") == wanted and bases.ranks("no longer served") == 1
