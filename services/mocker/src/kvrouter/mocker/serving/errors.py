"""Errors of the HTTP APIs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvrouter.mocker.constrained.errors import Unsupported
from kvrouter.mocker.engine.types import DuplicateRequest, PromptTooLong, RequestRefused
from kvrouter.mocker.serving.service import NoSuchRank


class ApiError(Exception):
    """A request fails with an HTTP status; each server has its own body for it."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    @property
    def type(self) -> str:
        """The type that vLLM gives errors with this status."""
        return _TYPES.get(self.status, "InternalServerError")


_TYPES = {
    400: "BadRequestError",
    403: "ForbiddenError",
    404: "NotFoundError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


@contextmanager
def refusals() -> Iterator[None]:
    """Turns what an engine refuses in the body into an ApiError."""
    try:
        yield
    except (PromptTooLong, DuplicateRequest, NoSuchRank) as error:
        raise ApiError(400, str(error)) from None
    except Unsupported as error:
        raise ApiError(400, str(error)) from None
    except RequestRefused as error:
        raise ApiError(503, str(error)) from None
    except (ValueError, OverflowError) as error:
        raise ApiError(400, f"{error}: expected token ids of 32 bits", param="prompt") from None
