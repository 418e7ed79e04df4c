"""What `soak.py` reads of a server, and what it decides about each quantity. Needs neither the SDK nor torch.

Memory is what no file backs: anonymous, shared and swapped; a page that several processes share is divided among them.
Rows that are kept by design (BY_DESIGN) are shown, and not judged.
"""

import os
import re
import sqlite3
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.slopes import Slope, slope

MIB = 1 << 20
DISK_SETTLES_S = 12 * 60
"""Weights that were just in use are kept for 10 minutes, whatever the settings; the sweep comes within a minute."""
RESOLUTION = {"memory, MiB": 2.0, "files": 1.0, "threads": 1.0, "processes": 1.0, "MiB": 1.0, "rows": 20.0}
"""Growth over the measured time that is nothing: below a unit, or what malloc rounds."""
ON_DISK = ("MiB", "rows")
RECORDS = ("sessions", "training_runs", "sampling_sessions", "futures", "usage", "audit", "machine_loads")
BY_DESIGN = (*RECORDS, "database", "log")
"""Records that are kept for a day, a week (a result's tombstone) or for ever, and the files that have them."""
_EXPIRED = "(status = 'expired' AND position IS NULL)"
_NOT_OF_FILES = re.compile(r"^(?:Pss_Anon|Pss_Shmem|SwapPss):\s+(\d+) kB", re.MULTILINE)

Values = dict[tuple[str, str], float]
"""By part and measure, such as ("sampler", "files")."""


def role(process: psutil.Process) -> str:
    """Return what a process of the server is: its module, or the name that it gives itself."""
    command = " ".join(process.cmdline()).split()  # a fork has its title in one piece
    if command[1:2] == ["-m"]:
        return command[2].removesuffix(".process").removeprefix("tinker_server.backends.")
    if any("resource_tracker" in word for word in command):
        return "resource tracker"
    return {"sh": "guard"}.get(process.name(), process.name())


def of_processes(server: psutil.Process) -> tuple[Values, dict[int, str]]:
    """Return the sums of each role, and the role of each process by its number."""
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    roles: dict[int, str] = {}
    for process in [server, *server.children(recursive=True)]:
        try:
            with process.oneshot():
                name, files, threads = role(process), process.num_fds(), process.num_threads()
            memory_kib = sum(map(int, _NOT_OF_FILES.findall(Path(f"/proc/{process.pid}/smaps_rollup").read_text())))
        except (psutil.NoSuchProcess, psutil.ZombieProcess, ProcessLookupError, FileNotFoundError):
            continue  # it has just ended
        roles[process.pid] = name
        for measure, value in (("memory, MiB", memory_kib / 1024), ("files", files), ("threads", threads)):
            found[name, measure] += value
        found[name, "processes"] += 1
    return dict(found), roles


def of_disk(data_dir: Path) -> Values:
    """Return the MiB of each folder of the data directory, of the database's files and of the log."""
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for folder, _, names in os.walk(data_dir):  # passes over folders that have just been deleted
        for path in [Path(folder), *(Path(folder, name) for name in names)]:
            try:
                size_bytes = path.lstat().st_blocks * 512
            except FileNotFoundError:
                continue
            top = data_dir.joinpath(*path.relative_to(data_dir).parts[:1])
            part = (
                top.name if top.is_dir() else "database" if top.name.startswith("tinker-server.db") else "other files"
            )
            found[part, "MiB"] += size_bytes / MIB
    found["log", "MiB"] = data_dir.with_suffix(".log").stat().st_size / MIB
    return dict(found)


def of_database(data_dir: Path) -> Values:
    """Return the rows of each table and of results that can be fetched, and the MiB that expired operations have."""
    file = (data_dir / "tinker-server.db").absolute().as_uri()
    with closing(sqlite3.connect(f"{file}?mode=ro", uri=True, timeout=30)) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        tables = [name for name in tables if name not in ("alembic_version", "lease")]  # one row each
        found = {(name, "rows"): _number(database, f'SELECT count(*) FROM "{name}"') for name in tables}
        found["fetchable results", "rows"] = _number(database, f"SELECT count(*) FROM futures WHERE NOT {_EXPIRED}")
        found["expired bodies", "MiB"] = _number(
            database, f"SELECT total(length(request)) FROM futures WHERE {_EXPIRED}"
        )
        found["expired bodies", "MiB"] /= MIB
    return found


def _number(database: sqlite3.Connection, query: str) -> float:
    return float(database.execute(query).fetchone()[0])


@dataclass
class Soak:
    """All values that were read, with their times, and the processes that were there after the settling."""

    settle_s: float
    rows: list[tuple[float, Values]] = field(default_factory=list)
    settled: dict[int, str] = field(default_factory=dict)
    """Roles by process number."""
    replaced: set[str] = field(default_factory=set)
    """Roles of settled processes that have ended since."""

    def read(self, at_s: float, server: psutil.Process, data_dir: Path) -> None:
        """Read everything once."""
        values, roles = of_processes(server)
        self.rows.append((at_s, {**values, **of_disk(data_dir), **of_database(data_dir)}))
        if at_s >= self.settle_s:
            self.settled = self.settled or roles
            self.replaced |= {name for pid, name in self.settled.items() if pid not in roles}

    def slopes(self) -> dict[tuple[str, str], Slope]:
        """Fit every quantity from the end of the settling on; what is not there counts as 0."""
        rows = [(at_s, values) for at_s, values in self.rows if at_s >= self.settle_s]
        names = sorted({name for _, values in rows for name in values}, key=lambda name: (name[1], name[0]))
        times_s = [at_s for at_s, _ in rows]
        return {name: slope(times_s, [values.get(name, 0.0) for _, values in rows]) for name in names}

    def verdict(self, name: tuple[str, str], found: Slope) -> str:
        """Return the decision about one quantity."""
        part, measure = name
        if part in BY_DESIGN:
            return "by design"
        if measure in ON_DISK and self.settle_s < DISK_SETTLES_S:
            return "not settled"
        return "GROWS" if found.grows(RESOLUTION[measure]) else "steady"
