from __future__ import annotations

import random

from hypothesis import given, strategies as st
from kvrouter.net.backoff import Backoff


@given(st.integers(0, 1000), st.integers(1, 2000))
def test_pauses_double_up_to_the_bound_and_restart_after_a_success(seed: int, failures: int) -> None:
    backoff = Backoff(0.1, 5.0, random.Random(seed))
    pauses = [backoff.failed() for _ in range(failures)]
    for number, pause in enumerate(pauses):
        expected = min(5.0, 0.1 * 2.0 ** min(number, 32))
        assert 0.5 * expected <= pause <= 1.5 * expected
    assert backoff.succeeded() == failures
    assert backoff.succeeded() == 0
    assert backoff.failed() <= 0.15
