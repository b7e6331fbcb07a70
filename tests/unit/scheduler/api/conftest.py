"""How the tests of sessions reach a Scheduler."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["object", "rpc", "call stream"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)
