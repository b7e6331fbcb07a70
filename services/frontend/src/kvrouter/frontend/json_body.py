"""Reading the JSON bodies of the HTTP API."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvrouter.runtime.errors import BadRequest
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

M = TypeVar("M", bound=BaseModel)


def read_body(model: type[M], body: bytes, advice: Callable[[ErrorDetails], str]) -> M:
    """What a body says; ``advice`` tells what to do about the first thing that is wrong with it.

    Raises:
        BadRequest: it is not JSON, or a field is missing, unknown or out of range; the error names it.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{field or 'body'}: {first['msg']}", field=field, advice=advice(first)) from None
