"""An hour of mixed work with retention at minutes: memory, files, threads or rows that stay behind.

    python benchmarks/soak.py OUT [--minutes 60] [--settle-minutes 20]

A server with the small model that comes with it, four owners, six tenants (`soak_load.py`). Every SAMPLE_S it reads
each kind of process (memory, open files, threads, number), the data directory (MiB) and the database (rows). It writes
OUT.csv (all values) and OUT.md (slopes with their standard errors, from the end of the settling on), prints the table,
and exits with 1 if a judged quantity grows, a process was replaced, or a tenant met an error.
"""

import argparse
import csv
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.soak_load import Tenants
from benchmarks.soak_readings import MIB, Soak
from tests.servers import MODEL, Server
from tinker_server.auth import keys
from tinker_server.embedded import DIRECTORIES, TINY_VL

SAMPLE_S = 10.0
RETENTION: dict[str, Any] = {
    "results_kept_s": 60,
    "session_timeout_s": 60,
    "unnamed_kept_s": 60,
    "steps_kept_s": 60,
    "snapshot_every_s": 30,
    "backend__image_cache_bytes": 16 * MIB,  # so that it is full when the settling ends
    "samples_disk_bytes": MIB,
}


def table(soak: Soak) -> list[str]:
    """Return the lines of the table, in Markdown."""
    lines = ["| measure | of | mean | slope an hour | its error | verdict |", "|---|---|---|---|---|---|"]
    for name, found in soak.slopes().items():
        figures = f"{found.mean:.1f} | {found.per_hour:+z.2f} | {found.error_per_hour:.2f}"
        lines.append(f"| {name[1]} | {name[0]} | {figures} | {soak.verdict(name, found)} |")
    return lines


def write_values(path: Path, soak: Soak) -> None:
    """Write all values, a line for each time."""
    names = sorted({name for _, values in soak.rows for name in values})
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["second", *(f"{part}: {measure}" for part, measure in names)])
        for at_s, values in soak.rows:
            writer.writerow([round(at_s), *(round(values.get(name, 0.0), 3) for name in names)])


def run(soak: Soak, data_dir: Path, minutes: float) -> list[str]:
    """Start the server, have the tenants work, and read; return the lines that say how much was done."""
    keys_file = data_dir.with_name("keys")
    tenants_keys = [keys.add(keys_file, name) for name in ("alice", "bob", "carol", "dan")]
    server = Server(data_dir, {MODEL: DIRECTORIES[TINY_VL]}, keys_file=keys_file, **RETENTION).start()
    api, began = psutil.Process(server.process.pid), time.monotonic()
    try:
        with Tenants(server.base_url, tenants_keys) as tenants:
            while (at_s := time.monotonic() - began) < 60 * minutes:
                soak.read(at_s, api, data_dir)
                tenants.raise_errors()
                time.sleep(SAMPLE_S)
    finally:
        code = server.stop()
    tenants.raise_errors()
    assert code == 0, f"the server ended with {code}:\n{server.log.read_text()[-4000:]}"
    turns = ", ".join(f"{name} {number}" for name, number in tenants.num_turns.items())
    return [f"{minutes:g} minutes, slopes after {soak.settle_s / 60:g}; {tenants.num_operations} operations.", turns]


def main() -> None:
    """Soak, write, print and decide."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--settle-minutes", type=float, default=20)
    given = parser.parse_args()
    if given.minutes - given.settle_minutes < 3:
        parser.error("--minutes must be at least 3 more than --settle-minutes")
    soak = Soak(60 * given.settle_minutes)
    try:
        with tempfile.TemporaryDirectory() as folder:
            said = run(soak, Path(folder) / "data", given.minutes)
    finally:
        write_values(given.out.with_suffix(".csv"), soak)
    lines = [*said, "", *table(soak)]
    given.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    growing = [name for name, found in soak.slopes().items() if soak.verdict(name, found) == "GROWS"]
    print(f"grows: {growing}; replaced: {sorted(soak.replaced)}" if growing or soak.replaced else "nothing grows")
    sys.exit(bool(growing or soak.replaced))


if __name__ == "__main__":
    main()
