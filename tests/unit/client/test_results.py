"""Pieces of the output as the client shows them."""

from __future__ import annotations

import pytest
from kvrouter.client.results import output_of
from kvrouter.frontend.edge.frame import FINISH_REASONS
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateResponse
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput


@pytest.mark.parametrize("reason", FinishReason.values())
def test_every_finish_reason_has_the_name_that_the_http_api_gives_it(reason: FinishReason) -> None:
    piece = output_of(FrontendServiceGenerateResponse(output=GenerateOutput(finish_reason=reason)))
    assert piece.finish_reason == FINISH_REASONS[reason]
