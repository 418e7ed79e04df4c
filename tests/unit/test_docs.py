"""The documentation is a whole site: no link of it leads nowhere, and the README is one screen."""

import csv
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.browser.documented import DOCUMENTED, MOST_BYTES
from tinker_server.command_line import parse, read_settings

ROOT = Path(__file__).parents[2]


@pytest.mark.heavy
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Broken links, anchors, and pages that the navigation leaves out are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {page.relative_to(tmp_path).name for page in tmp_path.glob("*.html")}
    assert {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")} <= pages
    fetched = re.compile(r"<(?:link|script|img)[^>]+(?:href|src)=\"https?://(?!127\.0\.0\.1)")
    assert [page.name for page in tmp_path.glob("*.html") if fetched.search(page.read_text())] == []


def test_the_readme_is_one_screen_and_its_links_lead_somewhere() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 50
    links = [link for link in re.findall(r"\]\(([^)]+)\)", readme) if not link.startswith("http")]
    assert len(links) > 10 and [link for link in links if not (ROOT / link).exists()] == []


def test_every_picture_of_the_dashboard_is_taken_by_the_test_shown_and_small() -> None:
    pictures = {path.stem: path for path in (ROOT / "docs/pictures").iterdir()}
    assert set(pictures) == set(DOCUMENTED)
    shown = re.findall(r"!\[[^\]]+\]\(pictures/([\w-]+)\.png\)", (ROOT / "docs/dashboard.md").read_text())
    assert sorted(shown) == sorted(DOCUMENTED)
    assert {name: size for name, path in pictures.items() if (size := path.stat().st_size) > MOST_BYTES} == {}


def test_the_readme_names_every_page() -> None:
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)\)", (ROOT / "README.md").read_text()))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_links_of_pages_outside_the_site_lead_somewhere() -> None:
    """To files of the repository, and to sections of its pages; those inside the site are the site's own check."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    pages = [ROOT / name for name in listed.split() if not name.startswith("docs/")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    inside = [(page, *link.partition("#")[::2]) for page, link in links if "://" not in link]
    dead = [(page.name, path) for page, path, _ in inside if path and not (page.parent / path).exists()]
    dead += [
        (page.name, f"{path}#{section}")
        for page, path, section in inside
        if section and section not in sections(page.parent / path if path else page)
    ]
    assert len(inside) > 30 and dead == []


def sections(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


QUICKSTART, GUIDE, CODE = "tests/e2e/test_quickstart.py", "tests/e2e/test_operating.py", "tests/e2e/test_docs.py"
SETTINGS, HERE = "tests/unit/tinker_server/test_settings.py", "tests/unit/test_docs.py"
RUN = {
    ("README.md", ""): "tests/e2e/test_demo.py",
    ("docs/chat.md", "bash"): CODE,
    ("docs/chat.md", "python"): CODE,
    ("docs/cluster.md", "console"): HERE,
    ("docs/curl.md", "bash"): CODE,
    ("docs/dashboard.md", "python"): CODE,
    ("docs/dashboard.md", "yaml"): HERE,
    ("docs/index.md", "console"): QUICKSTART,
    ("docs/index.md", "python"): QUICKSTART,
    ("docs/operating.md", "console"): GUIDE,
    ("docs/own-data.md", "python"): CODE,
    ("docs/rl.md", "python"): CODE,
    ("docs/settings.md", "toml"): SETTINGS,
    ("docs/training.md", "python"): CODE,
    ("docs/vision.md", "python"): CODE,
}
"""The test that follows the blocks of a page, by their language."""
NOT_RUN = {
    ("docs/caltech101.md", "console"): "the recipe takes minutes; `make acceptance` runs it with fewer photographs",
    ("docs/cookbook.md", ""): "needs the cookbook; `make acceptance` runs its recipes",
    ("docs/dashboard.md", ""): "needs the cookbook",
    ("docs/operating.md", ""): "the configuration of a proxy, which needs a name in DNS",
}


def test_every_block_of_the_pages_is_followed_by_a_test_or_says_why_not() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")]
    found = {
        (str(page.relative_to(ROOT)), language)
        for page in pages
        for language, _ in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    }
    assert found == RUN.keys() | NOT_RUN.keys() and RUN.keys().isdisjoint(NOT_RUN)
    for (page, _), test in RUN.items():
        assert test == "tests/e2e/test_demo.py" or test == CODE or Path(page).name in (ROOT / test).read_text(), page


def test_the_figures_of_caltech101_at_the_defaults_are_those_of_its_csv() -> None:
    page = (ROOT / "docs/caltech101.md").read_text()
    with (ROOT / "docs/caltech101-defaults.csv").open() as file:
        rows = list(csv.DictReader(file))
    nll, measured = [float(row["train_nll"]) for row in rows], [row for row in rows if row["accuracy"]]
    first, last = sum(nll[:5]) / 5, sum(nll[-5:]) / 5
    assert f"| steps | {len(rows)} of 32 |" in page and f"| {first:.2f}, {last:.2g} |" in page
    steps, accuracies = (", ".join(row["step"] for row in measured), [float(row["accuracy"]) for row in measured])
    assert f"at steps {steps} | {', '.join(f'{one:.3f}' for one in accuracies)} |" in page


def test_the_commands_of_the_page_on_several_machines_are_understood() -> None:
    text = (ROOT / "docs/cluster.md").read_text().replace("NAME=DIRECTORY", "tinker-server/tiny-vl")
    commands = [shlex.split(one) for one in re.findall(r"^\$ tinker-server (.*)$", text, re.MULTILINE)]
    commands += [shlex.split(one) for one in re.findall(r"`tinker-server (leave .*?)`", text)]
    assert [one[0] for one in commands] == ["serve", "join", "leave"]
    serve, join, leave = map(parse, commands)
    assert read_settings(serve).backend.cluster_address == "10.0.0.1"
    assert (join.address, join.token_file, join.model) == (leave.address, leave.token_file, ["NAME"])


def test_the_scrape_of_the_page_on_metrics_has_the_fields_of_the_deployed_one() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/dashboard.md").read_text(), re.DOTALL)
    deployed = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    (job,), (known,) = yaml.safe_load(block)["scrape_configs"], deployed["scrape_configs"]
    assert job.keys() <= known.keys() and job["authorization"].keys() <= known["authorization"].keys()


def test_every_extra_that_is_installed_somewhere_exists_and_no_package_is_named_that_no_index_has() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    suffixes = (".md", ".py", ".service", ".yaml", ".toml")
    texts = {name: (ROOT / name).read_text() for name in listed if name.endswith(suffixes) or name == "Dockerfile"}
    named = {
        (name, extra)
        for name, text in texts.items()
        for found in re.findall(r"['\"]?\.\[([a-z0-9,]+)\]|install\.sh \S+ ([a-z,]+)", text)
        for extra in ",".join(filter(None, found)).split(",")
    }
    assert len(named) > 5 and {(name, extra) for name, extra in named if extra not in extras} == set()
    assert [name for name, text in texts.items() if re.search(r"pip install '?tinker-server\b", text)] == []
