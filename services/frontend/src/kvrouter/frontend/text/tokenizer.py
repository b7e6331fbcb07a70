"""The tokenizer of a model, with a cache of prefixes."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import Any

from kvrouter.frontend.text.client_work import SLICE, Slices, completed
from kvrouter.frontend.text.token_caches import (
    LONG_PIECE_CHARACTERS,
    Cutter,
    PieceCache,
    TooManyNewWords,
    WordBudget,
    WordCache,
)
from kvrouter.frontend.text.uncut_text import LOCAL_NORMALIZERS, UncutText, packed, types_of
from kvrouter.v1.errors import PromptTooLong
from tokenizers import Tokenizer, models

# The threads of the library would take the event loop's core, and cost more than they save on pieces of this size.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_PRINTABLE = "".join(map(chr, range(ord("!"), ord("~") + 1)))
_LOCAL_PRE_TOKENIZERS = frozenset({"Split", "ByteLevel", "Sequence", "Digits", "Metaspace", "Punctuation"})
_MAX_CUT_TOKENS = 64
_WORD_SHARE = 8
"""Part of the cache's memory that is for words."""
_ISOLATED_SHARE = 16
"""Part of the cache's memory each isolation domain has, and number of domains that have caches at a time."""
AT_ONCE_CHARACTERS = 64 << 10
"""Longest prompt tokenized at once: looking up so many known pieces takes 0.15 ms."""
_AT_ONCE_SEARCHED = 1_024
"""Characters of a prompt searched for cuts at once: up to 1.5 µs each. Words are cut after about ten."""
_AT_ONCE_NEW_CHARACTERS = 16 << 10
"""Characters of a prompt in new pieces, whose words are looked up at once."""
_AT_ONCE_WORDS = 16
"""New words of a prompt tokenized at once. Each takes the library 2 to 5 µs, as much as 20 known ones."""
_SAMPLE = (
    "The quick brown fox jumps over the lazy dog. It isn't 12,345 or 6.7e8; naïve café — 你好 世界 🙂 "
    "def f(x):\n\treturn x  +  1\r\n\n   # a comment, don't ask WHY\nHTTPServer camelCase snake_case a b c I'm we'll "
)
"""Text on which the cuts of a tokenizer are checked."""
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
"""A byte in a vocabulary of characters."""


def _byte_characters() -> dict[str, int]:
    """Returns the bytes by the characters with which byte-level vocabularies write them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_characters()


class InvalidTokenizer(ValueError):
    """A tokenizer cannot be used."""


class ModelTokenizer:
    """Tokenizes the prompts of one model. Its methods may be called in several threads."""

    def __init__(self, definition: bytes, *, cache_bytes: int) -> None:
        """Loads a tokenizer, which takes up to seconds.

        Args:
            definition: Content of tokenizer.json.
            cache_bytes: Memory of the cache.

        Raises:
            InvalidTokenizer: it cannot be loaded.
        """
        try:
            parsed = json.loads(definition)
            self._tokenizer = Tokenizer.from_buffer(definition)
        except Exception as error:
            # The library raises Exception itself.
            raise InvalidTokenizer(f"tokenizer.json cannot be loaded: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._cache_bytes = cache_bytes
        tokens = self._tokenizer.get_vocab()
        self.vocabulary_size = max(tokens.values(), default=-1) + 1
        """Number of token ids, those included that were added, and any between that have no token."""
        self._before, self._after = self._template()
        self._longest_token = max(map(len, tokens), default=1)
        self._cutter = self._checked_cutter(parsed)
        self._uncut = UncutText(self._tokenizer, parsed, self._cutter)
        self._is_byte_level = "ByteLevel" in types_of(parsed.get("decoder"), "decoders")
        self._isolated: OrderedDict[str, ModelTokenizer] = OrderedDict()
        self._isolating = threading.Lock()
        self._uncached: Tokenizer | None = None
        self._begin_caches(cache_bytes)

    @property
    def library(self) -> Tokenizer:
        """The tokenizer of the library ``tokenizers``."""
        return self._tokenizer

    def of_known_domain(self, domain: str) -> ModelTokenizer | None:
        """Returns the tokenizer with the caches of an isolation domain; None if it has none."""
        with self._isolating:
            found = self._isolated.get(domain)
            if found is not None:
                self._isolated.move_to_end(domain)
            return found

    def of_domain(self, domain: str) -> ModelTokenizer:
        """Returns the tokenizer with the caches of an isolation domain, of which those used last keep theirs.

        The first call takes up to seconds: the library's own cache is shared by all who use its object.
        """
        found = self.of_known_domain(domain)
        if found is not None:
            return found
        with self._isolating:
            if self._uncached is None:
                self._uncached = Tokenizer.from_str(self._tokenizer.to_str())
                if isinstance(self._uncached.model, models.BPE | models.Unigram):
                    self._uncached.model._resize_cache(0)  # noqa: SLF001 - the library has no public call
            made = copy(self)
            made._tokenizer = self._uncached  # noqa: SLF001 - an object of this class
            made._uncut = self._uncut.of(self._uncached)  # noqa: SLF001 - an object of this class
            made._begin_caches(self._cache_bytes // _ISOLATED_SHARE)  # noqa: SLF001 - an object of this class
            found = self._isolated.setdefault(domain, made)
            if len(self._isolated) > _ISOLATED_SHARE:
                self._isolated.popitem(last=False)
            return found

    def _begin_caches(self, max_bytes: int) -> None:
        gap = self._cutter.gap
        self._cache = PieceCache(max_bytes - max_bytes // _WORD_SHARE)
        self._words = None if gap is None else WordCache(gap, self._encode, max_bytes // _WORD_SHARE)

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token; None if there is no such token."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def bytes_of(self, token: int) -> bytes:
        """Returns the bytes of a token, which may be a part of a character."""
        written = self._tokenizer.id_to_token(token) or ""
        if self._is_byte_level and all(character in _BYTES for character in written):
            return bytes(map(_BYTES.__getitem__, written))
        if byte := _FALLBACK.fullmatch(written):
            return bytes.fromhex(byte[1])
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text.encode()

    def encode(self, text: str, *, special_tokens: bool, limit: int, field: str = "prompt") -> Slices[bytes]:
        """Tokenizes a text in slices, and returns its tokens as a packed buffer.

        Args:
            text: The text. Special tokens in it become these tokens.
            special_tokens: Whether to add the tokenizer's special tokens, such as one for the begin.
            limit: Maximum number of tokens; tokenization stops beyond it.
            field: The field of the request, for the error.

        Raises:
            PromptTooLong: there are more tokens than the limit.
            BadRequest: a part of the text cannot be cut, and is too long to be tokenized at once.
        """
        return self._encode_text(text, special_tokens, limit, field, None)

    def encode_at_once(self, text: str, *, special_tokens: bool, limit: int, field: str = "prompt") -> bytes | None:
        """Returns the same as ``encode`` if that takes a fraction of a millisecond, since nearly everything is known.

        Returns None otherwise, so the caller tokenizes the text in a thread.

        Raises:
            PromptTooLong: there are more tokens than the limit.
        """
        if len(text) > AT_ONCE_CHARACTERS or self._words is None:
            return None
        budget = WordBudget(_AT_ONCE_SEARCHED, _AT_ONCE_NEW_CHARACTERS, _AT_ONCE_WORDS)
        try:
            return completed(self._encode_text(text, special_tokens, limit, field, budget))
        except TooManyNewWords:
            return None

    def _encode_text(
        self, text: str, special_tokens: bool, limit: int, field: str, budget: WordBudget | None
    ) -> Slices[bytes]:
        if len(text) > limit * self._longest_token:
            raise PromptTooLong(len(text) // self._longest_token, limit, field=field)
        parts = [self._before] if special_tokens else []
        tokens = characters = 0
        for size, encoded in self._encoded_parts(text, field, budget):
            parts.append(encoded)
            tokens += len(encoded) // 4
            if tokens > limit:
                raise PromptTooLong(tokens, limit, field=field)
            characters += size
            if characters >= SLICE:
                characters = 0
                yield
        if special_tokens:
            parts.append(self._after)
        whole = b"".join(parts)
        if len(whole) // 4 > limit:
            raise PromptTooLong(len(whole) // 4, limit, field=field)
        return whole

    def encode_whole(self, text: str) -> bytes:
        """Returns the tokens of a text without cuts and without the cache, as a packed buffer."""
        return packed(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _encoded_parts(self, text: str, field: str, budget: WordBudget | None) -> Iterator[tuple[int, bytes]]:
        """Yields size and tokens of each part of a text, in order.

        Raises:
            BadRequest, TooManyNewWords.
        """
        start = 0
        while start < len(text):
            bound = min(start + SLICE, len(text))
            cut = self._cutter.next_cut(text, start, bound, LONG_PIECE_CHARACTERS, budget)
            if cut is None:
                cut = self._cutter.next_cut(text, start, bound, budget=budget)
            end = len(text) if cut is None else cut
            if end - start <= SLICE:
                yield end - start, self._encode_piece(text[start:end], cut is not None, budget)
            elif budget is not None:
                raise TooManyNewWords
            else:
                end = yield from self._uncut.encoded_parts(text, start, field)
            start = end

    def _encode_piece(self, piece: str, is_cut: bool, budget: WordBudget | None) -> bytes:
        """Returns the tokens of a piece. One that does not end at a cut is not kept: it is rarely shared."""
        tokens = self._cache.get(piece)
        if tokens is None:
            pieces = self._cutter.pieces(piece, budget) if len(piece) >= LONG_PIECE_CHARACTERS else (piece,)
            if len(pieces) > 1:
                tokens = b"".join(self._encode_piece(each, True, budget) for each in pieces)
            else:
                tokens = self._encode([piece])[0] if self._words is None else self._words.encode(piece, budget)
            if is_cut:
                self._cache.put(piece, tokens)
        return tokens

    def _encode(self, texts: Sequence[str]) -> list[bytes]:
        """Returns the tokens of each text as a packed buffer."""
        batch = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [packed(encoding.ids) for encoding in batch]

    def _template(self) -> tuple[bytes, bytes]:
        """Returns the tokens the tokenizer adds before and after a prompt."""
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return packed(whole[:start]), packed(whole[start + len(bare) :])
        raise InvalidTokenizer("its post-processor changes the tokens of a text: expected one that adds tokens only")

    def _checked_cutter(self, definition: dict[str, Any]) -> Cutter:
        added = self._tokenizer.get_added_tokens_decoder().values()
        names = [token.content for token in added]
        marks = [
            token.content
            for token in added
            if token.special
            and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
            and len(token.content) > 2
            and not any(token.content in name and token.content != name for name in names)
        ][:_MAX_CUT_TOKENS]
        after = _ends_of_words(definition, added)
        for cutter in (Cutter(after=after, before=marks), Cutter(after="", before=marks)):
            if self._is_exact(cutter, marks):
                return cutter
        return Cutter(after="", before=())

    def _is_exact(self, cutter: Cutter, marks: Sequence[str]) -> bool:
        """Returns whether texts have the same tokens with the cuts as without."""
        separators = ["", " ", "\n", *marks[:4]]
        text = "".join(_SAMPLE[shift:] + separators[shift % len(separators)] for shift in range(0, 160, 7))
        for shift in range(8):
            sample = text[shift * 37 :]
            whole = self.encode_whole(sample)
            if any(b"".join(map(self.encode_whole, parts)) != whole for parts in _divided(sample, cutter)):
                return False
        return True


def _divided(text: str, cutter: Cutter) -> Iterable[list[str]]:
    """Yields a text in pieces, and with all cuts between words."""
    yield cutter.pieces(text)
    if cutter.gap is not None:
        first, *rest = cutter.gap.split(text)
        yield [first, *(f" {word}" for word in rest)]


def _ends_of_words(definition: dict[str, Any], added: Iterable[Any]) -> str:
    """Returns the characters no token and no rule can join to a space after them and what follows it.

    Merges of a BPE model make tokens of the vocabulary only. If no token has a character with a space after it, a text
    has the same tokens when it is divided at such a place, if its normalizer and pre-tokenizer work locally too.
    """
    model = definition.get("model") or {}
    if model.get("type") != "BPE" or model.get("dropout"):
        return ""
    normalizers = types_of(definition.get("normalizer"), "normalizers")
    pre_tokenizers = types_of(definition.get("pre_tokenizer"), "pretokenizers")
    if not (normalizers <= LOCAL_NORMALIZERS and pre_tokenizers <= _LOCAL_PRE_TOKENIZERS):
        return ""
    space = "Ġ" if "ByteLevel" in normalizers | pre_tokenizers else "▁"
    joined = re.compile(f"([!-~])[ {space}]")
    found = {each for token in model.get("vocab", ()) for each in joined.findall(token)}
    for token in added:
        found.update(joined.findall(token.content), token.content[-1:] if token.rstrip else "")
    return "".join(each for each in _PRINTABLE if each not in found)
