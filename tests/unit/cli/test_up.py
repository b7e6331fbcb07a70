"""What `kvrouter up` prints to paste."""

from __future__ import annotations

from pathlib import Path

from kvrouter.devcommands.up import first_request

_ROOT = Path(__file__).parents[3]


def test_the_readme_and_getting_started_have_the_request_that_up_prints_within_80_columns() -> None:
    request = first_request("http://127.0.0.1:8000")
    assert all(len(line) <= 78 for line in request.splitlines())
    for page in ("README.md", "docs/guides/getting-started.md"):
        assert request in (_ROOT / page).read_text(encoding="utf-8"), page
