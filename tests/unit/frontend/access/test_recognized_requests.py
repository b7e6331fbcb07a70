"""The beginning of an HTTP request shows whether it has a valid key, before it is parsed."""

from __future__ import annotations

import pytest
from kvrouter.frontend.access.access import Access
from kvrouter.frontend.access.api_keys import ApiKeys
from kvrouter.frontend.access.caller import Caller
from kvrouter.frontend.access.key_file import KeyEntry, KeyFile, new_key
from kvrouter.frontend.access.quotas import LimitTable, Quotas
from kvrouter.frontend.access.refusals import CredentialRefused, RefusalReason, Refusals
from kvrouter.v1.errors import RateLimited
from prometheus_client import CollectorRegistry

KEY, HASH = new_key("client")
KEYS = ApiKeys(KeyFile([KeyEntry(id="client", hash=HASH)]))
ACCESS = Access(lambda: KEYS, None, Refusals(CollectorRegistry()), Quotas(LimitTable()))
LIMITED_KEY, LIMITED_HASH = new_key("limited")
TOKEN = "a.b.c"  # noqa: S105 - of no issuer
GENERATE, LIST_MODELS = (f"/kvrouter.v1.FrontendService/{name}" for name in ("Generate", "ListModels"))
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize("header", ["Authorization: Bearer KEY", "authorization: bearer  KEY", "X-API-Key:   KEY  "])
def test_a_valid_key_is_recognized(header: str) -> None:
    assert ACCESS.recognizes(f"{HEAD}{header}\r\nContent-Length: 5\r\n\r\nhello".replace("KEY", KEY).encode())


@pytest.mark.parametrize(
    "rest",
    [
        "\r\n",
        "Authorization: Basic KEY\r\n\r\n",
        "Authorization: Bearer KEYx\r\n\r\n",
        "Authorization: Bearer KEY\r\nX-API-Key: other\r\n\r\n",
        "X-Authorization: Bearer KEY\r\n\r\n",
        "Authorization: Bearer \xff\xfe\r\n\r\n",
        "Authorization:\r\n\r\n",
    ],
)
def test_everything_else_is_not(rest: str) -> None:
    encoded = rest.replace("KEY", KEY).encode("latin-1")
    assert not ACCESS.recognizes(HEAD.encode() + encoded)
    assert not ACCESS.recognizes(encoded)


class Verifier:
    """Accepts one token."""

    def __init__(self) -> None:
        self.known: list[str] = []

    def authenticate(self, token: str, _tenants: object) -> Caller:
        if token != TOKEN:
            raise CredentialRefused(RefusalReason.INVALID_TOKEN)
        self.known.append(token)
        return Caller("sub:a")

    def remembered(self, token: str, _tenants: object) -> Caller | None:
        return Caller("sub:a") if token in self.known else None


def test_a_token_is_recognized_once_it_was_verified() -> None:
    access = Access(lambda: KEYS, Verifier(), Refusals(CollectorRegistry()), Quotas(LimitTable()))
    head = f"{HEAD}Authorization: Bearer {TOKEN}\r\n\r\n".encode()
    assert not access.recognizes(head)
    with access.admit_http("POST", "/v1/completions", {"Authorization": f"Bearer {TOKEN}"}):
        assert access.recognizes(head)
    assert not access.recognizes(head.replace(TOKEN.encode(), b"a.b.d"))


def test_a_key_is_recognized_while_its_limits_leave_room() -> None:
    keys = ApiKeys(KeyFile([KeyEntry(id="limited", hash=LIMITED_HASH, requests_per_second=1.0)]))
    access = Access(lambda: keys, None, Refusals(CollectorRegistry()), Quotas(LimitTable(clock=lambda: 100.0)))
    headers = {"Authorization": f"Bearer {LIMITED_KEY}"}
    head = f"{HEAD}Authorization: Bearer {LIMITED_KEY}\r\n\r\n".encode()
    assert [access.recognizes(head) for _ in range(3)] == [True] * 3
    with access.admit_http("POST", "/v1/completions", headers):
        assert not access.recognizes(head)


def test_a_call_beyond_its_limits_is_refused_before_its_request_is_read() -> None:
    keys = ApiKeys(KeyFile([KeyEntry(id="limited", hash=LIMITED_HASH, concurrency=1)]))
    access = Access(lambda: keys, None, Refusals(CollectorRegistry()), Quotas(LimitTable()))
    metadata = (("authorization", f"Bearer {LIMITED_KEY}"),)
    access.check(GENERATE, metadata)
    with access.admit(GENERATE, metadata, 0):
        with pytest.raises(RateLimited, match="running requests"):
            access.check(GENERATE, metadata)
        access.check(LIST_MODELS, metadata)
    access.check(GENERATE, metadata)
