"""Tokenizes texts in slices where ``Cutter`` finds no cut, such as a word of megabytes.

A slice is tokenized with some characters after it, and cut between two of its tokens. The text after the cut is
tokenized next. The cut is exact if that begins with the token the first slice has after the cut:

- Between two words of the pre-tokenizer the slices have the words of the whole text.
- Within a word of a BPE model, every two neighbours among the tokens are then neighbours in the tokens of a slice. BPE
  merges the pair with the lowest rank first, so what it does with two neighbours does not depend on what is around
  them until a pair across their ends is merged. Such a pair would be merged in a slice, too. So no pair across the end
  of a token is ever merged, and the tokens are those of the whole word.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Generator, Iterator, Mapping, Sequence
from copy import copy
from itertools import islice
from typing import Any, NamedTuple

from kvrouter.frontend.text.client_work import SLICE
from kvrouter.frontend.text.token_caches import Cutter
from kvrouter.v1.errors import BadRequest
from tokenizers import Encoding, Tokenizer

MAX_UNCUT_CHARACTERS = 512 << 10
"""Longest text tokenized as one slice because no exact cut is found in it: some 0.5 s."""
LOCAL_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Replace", "Lowercase", "Sequence", "ByteLevel"})
"""Normalizers changing a text independently of what is before a space between two words, and after it."""
_LOCAL_PRE_TOKENIZERS = frozenset({"Split", "ByteLevel", "Sequence", "Digits", "Punctuation", "Metaspace"})
_AFTER_SLICE = 512
"""Characters tokenized with a slice besides those of the longest added token. Within them a word ends, unless
it is one without bounds, such as a run of letters."""
_TRIED_TOKENS = 512
"""Tokens of a slice at whose begin a cut is looked for, from the last one."""
_TRIED_CUTS = 3
_WINDOW = 32
"""Characters before and after a cut a normalizer may join."""


class _Slice(NamedTuple):
    """A part of a text, tokenized."""

    encoding: Encoding
    ids: list[int]
    """Its tokens. The library makes a new list each time it is asked for them."""
    end: int
    """Where it ends in the text."""
    is_cut: bool
    """Whether that is at the end of the text or a cut."""


class UncutText:
    """Tokenizes text without cuts."""

    def __init__(self, tokenizer: Tokenizer, definition: Mapping[str, Any], cutter: Cutter) -> None:
        """Finds out where texts may be cut.

        Args:
            tokenizer: The tokenizer.
            definition: Content of its tokenizer.json.
            cutter: Finds the cuts of other texts.
        """
        self._tokenizer = tokenizer
        self._cutter = cutter
        self._cuts_between_words = _is_local(definition)
        model = definition.get("model") or {}
        self._cuts_words = self._cuts_between_words and _is_plain_bpe(model) and _keeps_characters(definition, model)
        added = tokenizer.get_added_tokens_decoder().values()
        self._after = _AFTER_SLICE + max((len(token.content) for token in added), default=0)

    def of(self, tokenizer: Tokenizer) -> UncutText:
        """Returns the same for a copy of the tokenizer."""
        changed = copy(self)
        changed._tokenizer = tokenizer  # noqa: SLF001 - an object of this class
        return changed

    def encoded_parts(self, text: str, start: int, field: str) -> Generator[tuple[int, bytes], None, int]:
        """Yields size and tokens of the parts of a text up to its next cut, each a slice if it can be divided.

        Args:
            text: The text.
            start: Where to begin: its begin or a cut.
            field: The field of the request, for the error.

        Returns:
            Where the last part ends: at the end of the text or a cut.

        Raises:
            BadRequest: a part cannot be divided and is too long.
        """
        head = self._slice(text, start)
        while not head.is_cut:
            for index, place in islice(self._cuts(text, start, head), _TRIED_CUTS):
                following = self._slice(text, place)
                if following.ids[:1] == head.ids[index : index + 1]:
                    yield place - start, packed(head.ids[:index])
                    start, head = place, following
                    break
            else:
                head = self._longer_slice(text, start, head, field)
        yield head.end - start, packed(head.ids)
        return head.end

    def _slice(self, text: str, start: int) -> _Slice:
        """Returns the next slice."""
        end = min(start + SLICE + self._after, len(text))
        cut = self._cutter.next_cut(text, start, end)
        if cut is not None:
            end = cut
        return self._tokenized(text[start:end], end, is_cut=cut is not None or end == len(text))

    def _tokenized(self, text: str, end: int, *, is_cut: bool) -> _Slice:
        # Unlike ``encode``, the library gives up the GIL for a batch.
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return _Slice(encoding, encoding.ids, end, is_cut)

    def _longer_slice(self, text: str, start: int, head: _Slice, field: str) -> _Slice:
        """Returns all that lies before the next cut, of which ``head`` is the begin, as one slice.

        Raises:
            BadRequest: it is too long.
        """
        end = head.end
        cut: int | None = None
        while cut is None and end < len(text):
            if end - start > MAX_UNCUT_CHARACTERS:
                raise _indivisible(field)
            before = end
            end = min(end + SLICE, len(text))
            cut = self._cutter.next_cut(text, before - self._after, end)
        end = end if cut is None else cut
        whole = self._tokenized(text[start:end], end, is_cut=True)
        if head.ids and whole.ids[:1] != head.ids[:1]:
            raise _indivisible(field)  # The cut at its begin was exact only for a shorter text.
        return whole

    def _cuts(self, text: str, start: int, head: _Slice) -> Iterator[tuple[int, int]]:
        """Yields numbers of tokens of a slice before which the text may be cut, and these places in the text."""
        if not self._cuts_between_words or not head.ids:
            return
        last = head.end - self._after
        encoding, final_token = head.encoding, len(head.ids) - 1
        final_word = encoding.token_to_word(final_token)
        within_words: list[tuple[int, int]] = []
        tried = 0
        for index in range(final_token, 0, -1):
            before, after = encoding.token_to_chars(index - 1), encoding.token_to_chars(index)
            if before is None or after is None or start + after[0] > last:
                continue
            tried += 1
            if tried > _TRIED_TOKENS:
                break
            place = start + after[0]
            if before[1] != after[0] or not self._is_local_at(text, place):
                continue
            if encoding.token_to_word(index - 1) != encoding.token_to_word(index):
                yield index, place
            elif len(within_words) < _TRIED_CUTS and text[place : place + 1].strip():
                within_words.append((index, place))
        # Only a word that goes on to the end of the slice has no other cut near.
        if self._cuts_words:
            yield from (each for each in within_words if encoding.token_to_word(each[0]) == final_word)

    def _is_local_at(self, text: str, place: int) -> bool:
        """Returns whether neither white space nor the normalizer joins the characters before and after a place."""
        if text[place - 1].isspace():
            return False
        normalizer = self._tokenizer.normalizer
        if normalizer is None:
            return True
        before, after = text[max(0, place - _WINDOW) : place], text[place : place + _WINDOW]
        joined = normalizer.normalize_str(before + after)
        return bool(joined == normalizer.normalize_str(before) + normalizer.normalize_str(after))


def _indivisible(field: str) -> BadRequest:
    return BadRequest(
        f"{field}: the model's tokenizer cannot divide more than {MAX_UNCUT_CHARACTERS} characters of it",
        field=field,
        advice="Send words with spaces between them, or token ids.",
    )


def _is_local(definition: Mapping[str, Any]) -> bool:
    """Returns whether the words of a text are those of its parts, if it is divided between two words."""
    normalizers = types_of(definition.get("normalizer"), "normalizers")
    pre_tokenizer = definition.get("pre_tokenizer")
    if not (normalizers <= LOCAL_NORMALIZERS and types_of(pre_tokenizer, "pretokenizers") <= _LOCAL_PRE_TOKENIZERS):
        return False
    return all(map(_adds_nothing, _members(pre_tokenizer)))


def _adds_nothing(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Returns whether a pre-tokenizer adds no space before a text, and looks only forward."""
    pattern = str((pre_tokenizer.get("pattern") or {}).get("Regex", ""))
    looks_back = re.search(r"\(\?<[=!]|\\[bBAGK]|(?:^|[|(])\^", pattern) is not None
    prepends = pre_tokenizer.get("type") == "Metaspace" and pre_tokenizer.get("prepend_scheme", "always") != "never"
    return not (looks_back or prepends or pre_tokenizer.get("add_prefix_space"))


def _is_plain_bpe(model: Mapping[str, Any]) -> bool:
    """Returns whether the tokens of a word are those of merges alone."""
    changes = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    return model.get("type") == "BPE" and not any(model.get(name) for name in changes)


def _keeps_characters(definition: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """Returns whether every character has a token. The places of tokens behind a dropped one are wrong."""
    parts = types_of(definition.get("normalizer"), "normalizers") | types_of(
        definition.get("pre_tokenizer"), "pretokenizers"
    )
    return "ByteLevel" in parts or model.get("unk_token") is not None


def _members(pre_tokenizer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if not pre_tokenizer:
        return []
    return [pre_tokenizer] + [each for member in pre_tokenizer.get("pretokenizers", ()) for each in _members(member)]


def types_of(definition: Mapping[str, Any] | None, members: str) -> set[str]:
    """Returns the types of a part of a tokenizer and of its members."""
    if not definition:
        return set()
    found = {str(definition.get("type"))}
    for member in definition.get(members, ()):
        found |= types_of(member, members)
    return found


def packed(ids: Sequence[int]) -> bytes:
    """Returns token ids as a packed buffer."""
    return array("I", ids).tobytes()
