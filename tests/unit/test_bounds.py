"""Every bound is in the reference, and no queue is without one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Only a simulated engine is left out.
PATHS = [path for part in ("services", "net") for path in (ROOT / part).rglob("*.py") if "mocker" not in path.parts]
SOURCES = {path: path.read_text(encoding="utf-8") for path in PATHS}
PAGE = (ROOT / "docs/reference/bounds.md").read_text(encoding="utf-8")


def test_the_reference_has_every_bound_by_name() -> None:
    names = {name for text in SOURCES.values() for name in re.findall(r"\badd\(\s*\"([a-z_]+)\",", text)}
    ports = ("frontend", "ops", "queries")
    names |= {f"{port}_http_{what}" for port in ports for what in ("connections", "waiting_bytes")}
    assert len(names) > 15
    third_column = "".join(re.findall(r"^\|[^|]*\|[^|]*\|([^|(]*)", PAGE, re.MULTILINE))
    assert names == set(re.findall(r"`(\w+)`", third_column))


def test_no_queue_of_asyncio_is_unbounded() -> None:
    unbounded = [str(path) for path, text in SOURCES.items() if re.search(r"asyncio\.\w*Queue\(\)", text)]
    assert not unbounded
