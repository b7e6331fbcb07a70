"""Tenant and salt travel together as an engine's salt."""

from __future__ import annotations

from hypothesis import given, strategies as st
from kvrouter.engines.fields import engine_salt, split_salt
from kvrouter.v1.common_pb2 import BlockScope

TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(["tenant:", "tenant:a:b", ":", "%3A"])


@given(TEXTS, TEXTS)
def test_an_engines_salt_stands_for_one_tenant_and_salt(tenant: str, salt: str) -> None:
    assert split_salt(engine_salt(BlockScope(tenant=tenant, cache_salt=salt))) == (tenant, salt)


def test_a_salt_without_a_tenant_is_that_of_the_client() -> None:
    assert engine_salt(BlockScope(cache_salt="s")) == "s"
    assert engine_salt(BlockScope()) == ""


def test_a_client_cannot_choose_a_tenant_by_its_salt() -> None:
    assert engine_salt(BlockScope(cache_salt="tenant:a:s")) != engine_salt(BlockScope(tenant="a", cache_salt="s"))


def test_other_salts_with_the_prefix_are_salts() -> None:
    assert split_salt("tenant:a") == ("", "tenant:a")
