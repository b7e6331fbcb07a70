"""Draws a text that keeps a constraint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from kvrouter.mocker.constrained.errors import Unsupported
from kvrouter.mocker.constrained.instance import draw_instance, draw_word
from kvrouter.mocker.constrained.pattern import draw_match


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an output must be. At most one of schema, regex and choice is set; without any it is a JSON object."""

    schema: Any = None
    """JSON schema, as parsed JSON."""
    regex: str | None = None
    choice: Sequence[str] | None = None

    def draw(self, seed: str) -> str:
        """Returns a text that keeps the constraint, the same for the same seed.

        Raises:
            Unsupported: the constraint is invalid, or has what the simulated engine does not know.
        """
        random = Random(seed)
        if self.choice is not None:
            return random.choice(self.choice)
        if self.regex is not None:
            return draw_match(self.regex, random)
        value = {draw_word(random): draw_word(random)} if self.schema is None else draw_instance(self.schema, random)
        return json.dumps(value, ensure_ascii=False)


def parse_schema(text: str) -> Any:
    """Returns a JSON schema.

    Raises:
        Unsupported: it is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unsupported(f"the schema is not JSON: {error}") from None
