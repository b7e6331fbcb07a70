"""Block and sequence hashes, for every implementation."""

from __future__ import annotations

import importlib.resources
import json
import struct
from array import array
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from kvrouter.core import multimodal_hash
from kvrouter.core.interface import Scope
from kvrouter.core.reference.hashing import scope_seed
from xxhash import xxh3_64_intdigest

from .batches import digest_of, packed, unpacked

VECTORS = json.loads((importlib.resources.files("kvrouter.core") / "hash_vectors.json").read_text())
TOKENS = [1, 2, 3, 4, 500, 60_000, (1 << 32) - 1, 0]


def numbers(hexadecimal: list[str]) -> bytes:
    return packed(int(one, 16) for one in hexadecimal)


def test_the_library_computes_xxh3() -> None:
    assert xxh3_64_intdigest(b"", 0) == 0x2D06800538D394C2  # from XXH3's own test suite


@pytest.mark.parametrize("vector", VECTORS["hashes"], ids=lambda vector: vector["name"])
def test_vectors(hashing: ModuleType, vector: dict[str, Any]) -> None:
    multimodal = [(block, int(content, 16)) for block, content in vector["multimodal"]]
    local = hashing.local_hashes(vector["token_ids"], vector["block_size"], Scope(**vector["scope"]), multimodal)
    assert local == numbers(vector["local_hashes"])
    assert hashing.sequence_hashes(local) == numbers(vector["sequence_hashes"])


@pytest.mark.parametrize("vector", VECTORS["seeds"], ids=lambda vector: str(vector["scope"]))
def test_seed_vectors(vector: dict[str, Any]) -> None:
    assert scope_seed(Scope(**vector["scope"])) == int(vector["seed"], 16)


@pytest.mark.parametrize("vector", VECTORS["multimodal_ids"], ids=str)
def test_vectors_of_multimodal_ids(vector: dict[str, str]) -> None:
    content = bytes.fromhex(vector["hex"]) if "hex" in vector else vector["text"]
    assert multimodal_hash(content) == int(vector["hash"], 16)
    assert multimodal_hash(int(vector["hash"], 16)) == int(vector["hash"], 16)


@pytest.mark.parametrize(("content", "error"), [(None, TypeError), (1.5, TypeError), (-1, OverflowError)])
def test_what_names_no_multimodal_content(content: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        multimodal_hash(content)


@pytest.mark.parametrize("vector", VECTORS["digests"], ids=lambda vector: vector["name"])
def test_digest_vectors(vector: dict[str, Any]) -> None:
    terms = [
        (int(e["engine_hash"], 16), int(e["sequence_hash"], 16), e["tier"], e["copies"]) for e in vector["entries"]
    ]
    assert digest_of(*terms) == int(vector["digest"], 16)


def test_definition(hashing: ModuleType) -> None:
    """The definition of the design, spelled out here once more with nothing but the hash function."""
    local = unpacked(hashing.local_hashes(TOKENS, 4))
    assert local == tuple(xxh3_64_intdigest(struct.pack("<4I", *TOKENS[at : at + 4]), 1337) for at in (0, 4))
    chained = xxh3_64_intdigest(struct.pack("<2Q", local[0], local[1]), 1337)
    assert unpacked(hashing.sequence_hashes(packed(local))) == (local[0], chained)


def test_lora_seed_is_dynamos(hashing: ModuleType) -> None:
    seed = (1337 + xxh3_64_intdigest(b"adapter", 0)) % (1 << 64)
    one = xxh3_64_intdigest(struct.pack("<2I", 8, 9), seed)
    assert unpacked(hashing.local_hashes([8, 9], 2, Scope(lora_name="adapter"))) == (one,)


def test_every_form_of_tokens_gives_the_same_hashes(hashing: ModuleType) -> None:
    expected = hashing.local_hashes(TOKENS, 4)
    as_bytes = struct.pack("<8I", *TOKENS)
    strided = memoryview(array("I", [one for token in TOKENS for one in (token, 77)]))[::2]
    forms = [
        tuple(TOKENS),
        array("I", TOKENS),
        array("q", TOKENS),
        as_bytes,
        bytearray(as_bytes),
        memoryview(as_bytes),
        memoryview(array("I", TOKENS)),
        strided,
        np.array(TOKENS, np.uint32),
        np.array(TOKENS, np.int64),
        np.array(TOKENS, ">u4"),
        np.repeat(np.array(TOKENS, np.uint32), 2)[::2],
    ]
    for form in forms:
        assert hashing.local_hashes(form, 4) == expected, form
    signed = [token for token in TOKENS if token < 1 << 31][:4]
    for form in (array("i", signed), np.array(signed, np.int32)):
        assert hashing.local_hashes(form, 4) == hashing.local_hashes(signed, 4)


def test_a_long_prompt_hashes_alike_from_every_form(hashing: ModuleType) -> None:
    """Long enough that the GIL is given up."""
    tokens = np.arange(40_000, dtype=np.uint32)
    expected = hashing.local_hashes(tokens.tobytes(), 16)
    assert expected == b"".join(hashing.local_hashes(tokens[at : at + 16], 16) for at in range(0, len(tokens), 16))
    for form in (tokens, bytearray(tokens), tokens.tolist(), tokens.astype(np.int32)):
        assert hashing.local_hashes(form, 16) == expected


@pytest.mark.parametrize(
    "bad", [[-1, 2], [1, 1 << 32], [1, 1 << 64], array("i", [-1, 2]), array("q", [-1, 2])], ids=str
)
def test_token_ids_outside_u32_are_refused(hashing: ModuleType, bad: Any) -> None:
    with pytest.raises(OverflowError):
        hashing.local_hashes(bad, 2)


@pytest.mark.parametrize("bad", [[1.5, 2], ["1", "2"], [None, 1], array("d", [1.0, 2.0]), "text", 5, None], ids=str)
def test_what_is_no_token_is_refused(hashing: ModuleType, bad: Any) -> None:
    with pytest.raises(TypeError):
        hashing.local_hashes(bad, 2)


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_a_token_past_the_last_full_block_is_checked_too(hashing: ModuleType, token: int) -> None:
    with pytest.raises(OverflowError):
        hashing.local_hashes([1, 2, token], 2)


def test_bytes_that_are_no_whole_number_are_refused(hashing: ModuleType) -> None:
    with pytest.raises(ValueError):
        hashing.local_hashes(b"12345", 1)
    with pytest.raises(ValueError):
        hashing.sequence_hashes(b"123456789")


def test_every_form_of_packed_hashes_gives_the_same(hashing: ModuleType) -> None:
    hashes = np.arange(1, 6000, dtype=np.uint64)
    expected = hashing.sequence_hashes(hashes.tobytes())
    unaligned = memoryview(b"x" + hashes.tobytes())[1:]
    words = array("Q", hashes.tolist())
    for form in (bytearray(hashes), unaligned, hashes, words, memoryview(words), np.frombuffer(hashes, np.uint8)):
        assert hashing.sequence_hashes(form) == expected
    assert hashing.sequence_hashes(b"") == b""


NOT_PACKED = [[1], (1,), array("q", [1]), array("I", [1, 2]), array("d", [1.0]), np.array([1.0]), "12345678", 8]


@pytest.mark.parametrize("bad", NOT_PACKED, ids=repr)
def test_what_is_not_packed_is_refused(core: ModuleType, bad: Any) -> None:
    index, predicted, sequences = core.PrefixIndex(), core.PredictedIndex(), core.ActiveSequences(16)
    sequences.add_rank((1, 0))
    calls: list[Callable[[Any], Any]] = [
        core.sequence_hashes,
        index.overlaps,
        index.find_matches,
        lambda hashes: predicted.record((1, 0), hashes, 0.0),
        lambda hashes: predicted.overlaps(hashes, 0.0),
        sequences.loads,
        lambda hashes: sequences.book(("r", 0, 1), (1, 0), hashes, 16, 0),
    ]
    for call in calls:
        with pytest.raises(TypeError):
            call(bad)
        with pytest.raises(ValueError):
            call(np.arange(8, dtype=np.uint64)[::2])
        with pytest.raises(ValueError):
            call(b"123456789")


@pytest.mark.parametrize("block_size", [0, -1])
def test_block_size_must_be_positive(hashing: ModuleType, block_size: int) -> None:
    with pytest.raises((ValueError, OverflowError)):
        hashing.local_hashes([1, 2], block_size)


@pytest.mark.parametrize("multimodal", [[(-1, 5)], [(1 << 32, 5)], [(0, -1)], [(0, 1 << 64)]], ids=str)
def test_multimodal_hashes_out_of_range_are_refused(hashing: ModuleType, multimodal: list[tuple[int, int]]) -> None:
    with pytest.raises(OverflowError):
        hashing.local_hashes([1, 2], 2, Scope(), multimodal)


def test_scopes_never_share(hashing: ModuleType) -> None:
    """Equal tokens in scopes that differ, also where their texts concatenate alike or swap places."""
    texts = ("", "a", "b", "ab")
    scopes = [Scope(lora, salt, tenant) for lora in texts for salt in texts for tenant in texts]
    hashes = {hashing.local_hashes([1, 2], 2, scope) for scope in scopes}
    assert len(hashes) == len(scopes)


@given(
    tokens=st.lists(st.integers(0, (1 << 32) - 1), max_size=600),
    block_size=st.integers(1, 100),
    scope=st.builds(Scope, st.text(max_size=8), st.text(max_size=8), st.text(max_size=8)),
    multimodal=st.lists(st.tuples(st.integers(0, 20), st.integers(0, (1 << 64) - 1)), max_size=6),
)
def test_agreement_and_prefixes(
    hashing: ModuleType, tokens: list[int], block_size: int, scope: Scope, multimodal: list[tuple[int, int]]
) -> None:
    from kvrouter.core import reference

    local = hashing.local_hashes(tokens, block_size, scope, multimodal)
    sequence = hashing.sequence_hashes(local)
    assert len(local) == 8 * (len(tokens) // block_size)
    assert local == reference.local_hashes(tokens, block_size, scope, multimodal)
    assert sequence == reference.sequence_hashes(local)
    # Hashes of a prefix are a prefix of the hashes.
    half = len(tokens) // 2
    shorter = hashing.local_hashes(tokens[:half], block_size, scope, multimodal)
    assert local.startswith(shorter)
    assert sequence.startswith(hashing.sequence_hashes(shorter))
