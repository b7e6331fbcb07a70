"""Runs a call up to its first wait, so only waiting calls pay for their set-up."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any, Generic, TypeVar

_Result = TypeVar("_Result")


class FirstStep(Generic[_Result]):
    """The first step of a coroutine, which runs at once. ``result`` or ``rest`` must follow."""

    def __init__(self, call: Coroutine[Any, Any, _Result]) -> None:
        """Runs the step. Raises the coroutine's exceptions."""
        self._call = call
        self.waits = True
        """Whether the coroutine waits for something now."""
        try:
            self._waits_for: Any = call.send(None)
        except StopIteration as ended:
            self.waits = False
            self.result: _Result = ended.value
            """Its result, if it does not wait."""

    @coroutine
    def rest(self) -> Generator[Any, Any, _Result]:
        """Waits, and runs the other steps. Returns the coroutine's result."""
        call, waits_for = self._call, self._waits_for
        self._waits_for = None
        try:
            while True:
                failure: BaseException | None = None
                try:
                    received = yield waits_for
                except BaseException as error:  # cancellation included: the coroutine decides about it
                    failure = error
                try:
                    waits_for = call.send(received) if failure is None else call.throw(failure)
                except StopIteration as ended:
                    result: _Result = ended.value
                    return result
                finally:
                    del failure  # Its traceback refers to this frame.
        finally:
            del waits_for  # So does that of its exception.
