from __future__ import annotations

import pytest
from kvrouter.mocker.engine.block_pool import BlockPool
from kvrouter.mocker.engine.types import UNSCOPED


def test_reuse_takes_the_oldest_copy_there_is() -> None:
    pool = BlockPool(5)
    pool.take(3)
    copies = [block for _ in range(3) for block in pool.store([0, 1], [b"abcd"], 0, 1, UNSCOPED)]
    assert pool.find([0, 1], [b"abcd"], 1) == copies[:1]
    for block in copies:
        pool.release([block], 0)
    for left in (2, 1, 0):
        removed = pool.take(pool.free - left)  # the least recently used goes, and with it the oldest
        assert set(removed) == {1}
        assert pool.find([0, 1], [b"abcd"], 1) == (copies[-left:][:1] if left else [])


def test_content_in_use_is_not_cleared() -> None:
    pool = BlockPool(2)
    pool.take(1)
    with pytest.raises(RuntimeError):
        pool.clear()
    pool.release([], 1)
    pool.clear()
