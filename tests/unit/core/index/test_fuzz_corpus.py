"""What the fuzzer of the native core found worth keeping (core/rust/fuzz), on every core, as it is and spoilt."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvrouter.core import reference
from kvrouter.core.interface import InvalidDump

from ..batches import said
from ..conftest import implementation

CORPUS = Path(__file__).parents[4] / "core/rust/fuzz/corpus"
BATCHES, DUMPS = (sorted((CORPUS / kind).iterdir()) for kind in ("batches", "dumps"))
SPOILT = 30


def messages(data: bytes) -> list[bytes]:
    """The messages of an input: each behind its length, in two bytes."""
    found = []
    while len(data) >= 2:
        length = int.from_bytes(data[:2], "little")
        found.append(data[2 : 2 + length])
        data = data[2 + length :]
    return found


def variants(path: Path) -> Iterator[bytes]:
    """An input, and what becomes of it where bytes are changed, doubled or lost."""
    data, draw = path.read_bytes(), random.Random(path.name)
    yield data
    for _ in range(SPOILT if data else 0):
        spoilt = bytearray(data)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(spoilt))
            match draw.randrange(4):
                case 0:
                    spoilt[at] = draw.choice([0, 0x7F, 0x80, 0xFF, draw.randrange(256)])
                case 1:
                    spoilt[at:at] = spoilt[at : at + draw.randrange(1, 20)]
                case 2:
                    del spoilt[at : at + draw.randrange(1, 20)]
                case _:
                    spoilt[at : at + 8] = b"\\xff" * 8
            spoilt = spoilt or bytearray(1)
        yield bytes(spoilt)


@pytest.mark.parametrize("path", BATCHES, ids=lambda path: path.name)
def test_batches(path: Path) -> None:
    native = implementation("native", "PrefixIndex").PrefixIndex
    for data in variants(path):
        index, oracle = native(max_blocks=1 << 16), reference.PrefixIndex(max_blocks=1 << 16)
        for message in messages(data):
            assert said(index.apply(message)) == said(oracle.apply(message)), message.hex()
            prompt = message[: len(message) // 8 * 8]
            assert index.find_matches(prompt) == oracle.find_matches(prompt)
            for info in oracle.ranks():
                assert index.digest(info[:2]) == oracle.digest(info[:2])


@pytest.mark.parametrize("path", DUMPS, ids=lambda path: path.name)
def test_dumps(path: Path) -> None:
    native = implementation("native", "PrefixIndex").PrefixIndex
    for data in variants(path):
        index, oracle = native(), reference.PrefixIndex()
        loaded = []
        for one in (index, oracle):
            try:
                loaded.append(one.load_rank(messages(data)))
            except InvalidDump:
                loaded.append(None)
        assert loaded[0] == loaded[1], data.hex()
        assert [info[:5] for info in index.ranks()] == [info[:5] for info in oracle.ranks()]
        for info in oracle.ranks():
            assert index.digest(info[:2]) == oracle.digest(info[:2])
