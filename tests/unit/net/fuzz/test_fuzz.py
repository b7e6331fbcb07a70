"""Both sides of HTTP/2 and of call streams, with fixed seeds and the corpus."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from .call_streams import fuzz_client_stream, fuzz_server_stream
from .http2_client import fuzz_client, run_script
from .http2_scripts import corpus, cut
from .http2_server import fuzz_server


@pytest.mark.parametrize("fuzz", [fuzz_client, fuzz_server, fuzz_client_stream, fuzz_server_stream])
def test_fixed_seeds(fuzz: Callable[[int], None]) -> None:
    for seed in range(200):
        try:
            fuzz(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("sent", corpus("http2").values(), ids=corpus("http2"))
def test_the_corpus_cut_anywhere(sent: bytes) -> None:
    for seed in range(5):
        run_script(list(cut(random.Random(seed), sent)), 2)
