"""When reported cached tokens differ from predictions for longer."""

from __future__ import annotations

import pytest
from kvrouter.scheduler.load.cache_hits import MIN_REQUESTS, WINDOW_SECONDS, Difference, PredictionCheck


class Requests:
    """Requests of 100 tokens at a clock of their own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.check = PredictionCheck(lambda: self.now)

    def window(self, predicted: int, reported: int, requests: int = MIN_REQUESTS) -> Difference | None:
        """Adds the requests of a window, then one of the next; what is found then."""
        results = [self._add(predicted, reported) for _ in range(requests - 1)]
        self.now += WINDOW_SECONDS
        results.append(self._add(predicted, reported))
        found = [each for each in results if each is not None]
        assert len(found) <= 1
        return found[0] if found else None

    def _add(self, predicted: int, reported: int) -> Difference | None:
        return self.check.add(prompt_tokens=100, predicted_tokens=predicted, reported_tokens=reported)


@pytest.mark.parametrize(
    ("predicted", "reported", "word"), [(80, 10, "kvrouter index verify"), (0, 60, "chat template")]
)
def test_a_difference_of_two_windows_is_found_once_for_each_further_window(
    predicted: int, reported: int, word: str
) -> None:
    requests = Requests()
    requests.window(predicted, reported, MIN_REQUESTS + 1)
    for _ in range(3):
        found = requests.window(predicted, reported)
        assert found is not None
        assert (found.predicted, found.reported) == (predicted / 100, reported / 100)
        assert word in found.advice


def test_what_is_within_the_tolerance_or_passes_is_not_found() -> None:
    requests = Requests()
    found = [
        requests.window(*shares, MIN_REQUESTS + 1) for shares in ((50, 45), (80, 10), (50, 50), (10, 80), (80, 10))
    ]
    assert found == [None] * 5


def test_the_measured_share_counts_while_workers_reuse_less_than_predicted() -> None:
    requests = Requests()
    ratios = []
    for reported in (20, 20, 40, 75, 20, 20, 0, 0):
        requests.window(80, reported, MIN_REQUESTS + 1)
        ratios.append(requests.check.reuse_ratio)
    assert ratios == pytest.approx([1, 0.25, 0.5, 1, 1, 0.25, 0, 0], abs=0.05)


def test_workers_that_reuse_more_than_predicted_change_no_decision() -> None:
    requests = Requests()
    for _ in range(3):
        requests.window(10, 80)
    assert requests.check.reuse_ratio == 1


def test_few_requests_have_no_result() -> None:
    requests = Requests()
    assert [requests.window(80, 10, MIN_REQUESTS // 2) for _ in range(5)] == [None] * 5
