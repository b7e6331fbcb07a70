"""Release notes."""

from __future__ import annotations

import re


def notes(changelog: str, version: str) -> str:
    """Returns a version's section of the changelog, or that of what is unreleased while the version has none.

    Raises:
        ValueError: there is neither.
    """
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    for title in (version, "Unreleased"):
        for section in sections:
            heading, _, text = section.partition("\n")
            if re.match(rf"\[?{re.escape(title)}\]?(?:\s|$)", heading):
                return f"# kvrouter {version}\n\n{text.strip()}\n"
    raise ValueError(f"expected a section {version} or Unreleased in CHANGELOG.md")
