"""What the terminal of an operator shows of names that others chose."""

from __future__ import annotations

import io

import pytest
from kvrouter.cli.explain import candidates_table, summary
from kvrouter.cli.terminal import PlainConsole, visible
from kvrouter.cli.top.tables import decisions_table
from kvrouter.v1.common_pb2 import Rank
from kvrouter.v1.scheduler_pb2 import CandidateTerms, Decision
from rich.console import RenderableType
from rich.text import Text

HOSTILE = ["\x1b[31mred", "\x1b]0;title\x07", "\x9b2J", "\u202egnp.exe", "line\rover", "\u2028next", "\x00"]


def shown(renderable: RenderableType) -> str:
    out = io.StringIO()
    PlainConsole(160, file=out).print(renderable)
    return out.getvalue()


@pytest.mark.parametrize("name", [*HOSTILE, "[/closed]", "[red]", ":bomb:"])
def test_a_name_is_shown_without_effect(name: str) -> None:
    decision = Decision(request_id=name, mode=name, reason=name, chosen=Rank(worker_id=1))
    decision.candidates.append(CandidateTerms(rank=Rank(worker_id=1), formula=name))
    for renderable in (
        decisions_table([decision], several_components=True),
        "\n".join(summary(decision)),
        candidates_table(decision),
        name,
        Text(name),
    ):
        text = shown(renderable)
        assert all(each.isprintable() for each in text.split("\n"))
        # rich itself drops some of the characters that are replaced.
        assert visible(name).replace("\ufffd", "") in text.replace("\ufffd", "")


def test_line_ends_and_letters_of_every_language_stay() -> None:
    assert visible("模型\nmodèle") == "模型\nmodèle"
