"""Log probabilities of tokens that are parts of a character have the token's own bytes."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from kvrouter.frontend.edge.frame import Piece, ResponseFrame
from kvrouter.frontend.edge.text_request import SharedFields, TextRequest
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.net.model_files import read_model_files
from kvrouter.v1.worker_pb2 import TopLogprobs
from tokenizers import Tokenizer, decoders, models

from ....byte_tokenizer import write_byte_tokenizer


def write_byte_fallback(directory: Path) -> Path:
    """Writes a tokenizer like Llama's, which writes the bytes of unknown characters as tokens such as <0xC3>."""
    vocabulary = {"<unk>": 0, "▁": 1, "a": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))  # noqa: S106
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("write", [write_byte_tokenizer, write_byte_fallback])
def test_the_bytes_of_all_tokens_are_those_of_the_text(write: Callable[[Path], Path], tmp_path: Path) -> None:
    model = ModelText(read_model_files(write(tmp_path)), cache_bytes=1 << 20)
    tokens = array("I", model.tokenizer.encode_whole("é🙂"))
    assert len(tokens) == 6, "a token for each byte"
    request = TextRequest(SharedFields(model="m"), [], None, is_chat=True, logprobs=True, top_logprobs=1)
    frame = ResponseFrame(request, model, [])
    top = [TopLogprobs(token_ids=[token], logprobs=[-0.5]) for token in tokens]
    output = Piece("", tokens, [-0.5] * 6, top, None, None)
    shown = frame.logprobs(output, 0)
    assert shown is not None
    for entries in (shown["content"], [each["top_logprobs"][0] for each in shown["content"]]):
        assert bytes(byte for each in entries for byte in each["bytes"]) == "é🙂".encode()
        assert {len(each["bytes"]) for each in entries} == {1}
