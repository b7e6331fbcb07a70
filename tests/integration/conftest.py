from __future__ import annotations

import pytest
from kvrouter.v1.names import ComponentName


@pytest.fixture
def component(namespace: str) -> ComponentName:
    """A component that no other test has."""
    return ComponentName(namespace, "decode")
