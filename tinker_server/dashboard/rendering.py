"""Rendering of templates, and formats of numbers, sizes and times."""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tinker_server.dashboard.code import Code
from tinker_server.release import release
from tinker_server.web.prefix import prefix_of

FOLDER = Path(__file__).parent
HUGE = 1e15
"""Numbers from here on have an exponent: not all of their digits are shown."""


def number(value: float | None, digits: int = 4) -> str:
    """Format with a few significant digits; a dash if the value is unknown."""
    if value is None:
        return "–"
    shown = f"{value:.{digits}g}"
    is_whole = float(value).is_integer() or abs(float(shown)) >= 10**digits
    return f"{value:,.0f}" if is_whole and abs(value) < HUGE else shown


def amount(value: float | None) -> str:
    """Format a large number shortly, such as 12.3 M."""
    if value is None:
        return "–"
    rounded = float(f"{value:.3g}")
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 1e4 and rounded >= size:
            return f"{number(rounded / size, 3)} {unit}"
    return f"{value:,.0f}"


def size(value: float | None) -> str:
    """Format bytes in units of 1024."""
    if value is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def span(seconds: float | None) -> str:
    """Format a duration."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} d"


def ago(at: float | None) -> str:
    """Format a time relative to now, past or future."""
    if at is None:
        return "–"
    seconds = time.time() - at
    return f"{span(max(1.0, seconds))} ago" if seconds >= 0 else f"in {span(-seconds)}"


def moment(at: float) -> str:
    """Format a time in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def short(run_id: str) -> str:
    """Shorten a run's id for display."""
    session, separator, last = run_id.partition(":")
    return f"{session[:8]}{separator}{last}"


def polyline(values: Sequence[float], width: int, height: int) -> str:
    """Return the points of a line through values, within a picture of this size."""
    low, high, margin = min(values), max(values), 2
    scale = (height - 2 * margin) / (high - low) if high > low else 0.0
    return " ".join(
        f"{number * width / (len(values) - 1):.1f},{height - margin - (value - low) * scale:.1f}"
        for number, value in enumerate(values)
    )


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(FOLDER / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)
_ENVIRONMENT.filters |= {
    "number": number,
    "amount": amount,
    "size": size,
    "span": span,
    "ago": ago,
    "moment": moment,
    "short": short,
    "polyline": polyline,
}


def base_of(request: Request) -> str:
    """Return the path prefix that a proxy removes, which every link needs."""
    return prefix_of(request.headers)


def page(request: Request, template: str, values: Mapping[str, object], status: int = 200) -> HTMLResponse:
    """Render a page or a part of one. The template's `viewer` is the person signed in, or None."""
    viewer, base = getattr(request.state, "viewer", None), base_of(request)
    code = Code(f"{str(request.base_url).rstrip('/')}{base}", viewer is not None and viewer.has_signed_in)
    common = {"base": base, "viewer": viewer, "path": request.url.path, "release": release(), "code": code}
    text = _ENVIRONMENT.get_template(template).render({**common, **values})
    return HTMLResponse(text, status)
