from __future__ import annotations

from typing import Any

import pytest
from kvrouter.mocker.tools import asked_tool

TOOLS: list[dict[str, Any]] = [{"name": "get_weather"}, {"name": "searchFlights"}]


@pytest.mark.parametrize(
    ("text", "called"),
    [
        ("What is the Weather in Paris?", "get_weather"),
        ("Are there flights to Rome?", "searchFlights"),
        ("Tell me a story", None),
        ("", None),
    ],
)
def test_a_message_asks_for_the_tool_whose_name_has_one_of_its_words(text: str, called: str | None) -> None:
    tool = asked_tool(text, TOOLS)
    assert (tool and tool["name"]) == called
