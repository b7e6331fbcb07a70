"""Histograms count in the native core as in the reference."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from kvrouter.core import IMPLEMENTATIONS, Observations
from kvrouter.core.reference import Observations as Reference

pytestmark = pytest.mark.skipif(IMPLEMENTATIONS["Observations"] != "native", reason="the native core is not built")

_NUMBERS = st.one_of(st.integers(-3, 3), st.floats())


@given(
    st.lists(st.integers(-3, 3), unique=True).map(sorted),
    st.lists(st.tuples(_NUMBERS, st.integers(1, (1 << 32) - 1) | st.just(1))),
)
def test_observations_count_as_those_of_the_reference(bounds: list[int], observed: list[tuple[float, int]]) -> None:
    ours, reference = Observations(bounds), Reference(bounds)
    for total, count in observed:
        ours.observe(total, count)
        reference.observe(total, count)
    assert (ours.counts, repr(ours.sum)) == (reference.counts, repr(float(reference.sum)))
