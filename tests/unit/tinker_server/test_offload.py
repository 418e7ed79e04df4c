"""All work for owners takes turns; `asyncio.to_thread` is left for the disk, and for the server's own work."""

from pathlib import Path

ROOT = Path(__file__).parents[3] / "tinker_server"
ELSEWHERE = {
    "app.py": "the start",
    "auth/key_uses.py": "housekeeping writes a file",
    "observability/tracing/exporter.py": "the end",
    "routes/files.py": "a look at the disk",
    "routes/health.py": "a thread of its own",
    "routes/machine_loads.py": "measures every minute",
    "store/database.py": "the start",
    "store/directories.py": "reads and writes the disk",
    "store/holdings.py": "reads sizes of files",
    "store/uploads.py": "reads and writes the disk",
    "web/fixed_page.py": "makes a page once",
    "weights/uploads.py": "reads small files",
}


def test_work_for_owners_takes_turns() -> None:
    users = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if any(word in path.read_text() for word in ("to_thread(", "run_in_executor(", "ThreadPoolExecutor("))
    }
    assert {user for user in users if not user.startswith("commands/")} == set(ELSEWHERE)
