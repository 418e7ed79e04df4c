"""The decisions of benchmarks/soak.py, on numbers whose slopes are known."""

import subprocess
import sys
from subprocess import PIPE

import numpy as np
import psutil
import pytest

from benchmarks.slopes import BLOCKS, Slope, slope
from benchmarks.soak_readings import DISK_SETTLES_S, Soak, of_processes, role
from tests.factories import present

TIMES_S = [10.0 * number for number in range(241)]


def swept(per_hour: float) -> list[float]:
    """A quantity that grows for five minutes, then is swept, and leaves so much an hour behind; with noise."""
    noise = np.random.default_rng(0).normal(0, 0.5, len(TIMES_S))
    return [50 + at_s % 300 / 30 + per_hour * at_s / 3600 + one for at_s, one in zip(TIMES_S, noise, strict=True)]


def test_a_straight_line_has_its_own_slope_and_no_error() -> None:
    found = slope(TIMES_S, [7 + 12 * at_s / 3600 for at_s in TIMES_S])
    assert found.per_hour == pytest.approx(12) and found.error_per_hour == pytest.approx(0, abs=1e-9)
    assert found.growth == pytest.approx(8) and found.mean == pytest.approx(11)


def test_the_error_is_that_of_the_least_squares_fit_of_the_means() -> None:
    """Against numpy's own covariance of a fit of a line."""
    times_s = [60.0 * number for number in range(BLOCKS)]
    values = np.random.default_rng(1).normal(size=BLOCKS)
    line, covariance = np.polyfit([at_s / 3600 for at_s in times_s], values, 1, cov=True)
    found = slope(times_s, values.tolist())
    assert found.per_hour == pytest.approx(line[0]) and found.error_per_hour == pytest.approx(covariance[0, 0] ** 0.5)


def test_what_is_swept_is_steady_and_what_stays_behind_grows() -> None:
    assert not slope(TIMES_S, swept(0)).grows(resolution=1)
    assert slope(TIMES_S, swept(20)).grows(resolution=1)
    assert not slope(TIMES_S, swept(-20)).grows(resolution=1)


def test_growth_below_one_unit_is_nothing() -> None:
    found = slope(TIMES_S, [3 + at_s / TIMES_S[-1] for at_s in TIMES_S])
    assert found.grows(resolution=0.9) and not found.grows(resolution=1.1)


def test_a_time_without_values_is_an_error() -> None:
    with pytest.raises(ValueError, match="each of the 12 parts of the time needs a value"):
        slope([0.0, 1.0, 3600.0], [1.0, 1.0, 1.0])


GROWING = Slope(mean=10, per_hour=100, error_per_hour=1, growth=60)


@pytest.mark.parametrize(
    ("name", "settle_s", "said"),
    [
        (("trainer", "memory, MiB"), 0, "GROWS"),
        (("trainer", "files"), 0, "GROWS"),
        (("checkpoints", "MiB"), DISK_SETTLES_S, "GROWS"),
        (("checkpoints", "MiB"), DISK_SETTLES_S - 1, "not settled"),
        (("futures", "rows"), DISK_SETTLES_S, "by design"),
        (("images", "rows"), DISK_SETTLES_S, "GROWS"),
    ],
)
def test_what_is_kept_by_design_or_has_not_settled_is_not_judged(
    name: tuple[str, str], settle_s: int, said: str
) -> None:
    assert Soak(settle_s).verdict(name, GROWING) == said
    steady = Slope(mean=10, per_hour=1, error_per_hour=1, growth=60)
    assert Soak(DISK_SETTLES_S).verdict(("images", "rows"), steady) == "steady"


def test_slopes_begin_where_the_settling_ends_and_what_is_missing_is_0() -> None:
    soak = Soak(settle_s=600)
    for at_s in TIMES_S:
        settling = {("sampler", "files"): 500.0 if at_s < 600 else 7.0}
        soak.rows.append((at_s, settling if at_s < 1500 else {**settling, ("engine", "files"): 3.0}))
    found = soak.slopes()
    assert found["sampler", "files"].mean == 7.0 and found["sampler", "files"].per_hour == pytest.approx(0, abs=1e-9)
    assert found["engine", "files"].mean == pytest.approx(1.5, abs=0.05) and found["engine", "files"].per_hour > 0


HOLDER = """
import sys
print(flush=True)
for line in sys.stdin:
    held = b"1" * int(line)
    print(flush=True)
"""


def test_a_process_is_read_with_its_memory_files_and_threads() -> None:
    """In this process threads of other tests take memory and give it back, at any time; that one only waits."""
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=PIPE, stdout=PIPE, text=True) as holder:
        requests, answers = present(holder.stdin), present(holder.stdout)
        answers.readline()
        process = psutil.Process(holder.pid)
        values, roles = of_processes(process)
        name = role(process)
        assert roles == {holder.pid: name}
        assert values[name, "processes"] == 1 and values[name, "threads"] == 1 and values[name, "files"] >= 3
        print(40 << 20, file=requests, flush=True)
        answers.readline()
        grown, _ = of_processes(process)
        assert grown[name, "memory, MiB"] - values[name, "memory, MiB"] == pytest.approx(40, abs=1)
        requests.close()
