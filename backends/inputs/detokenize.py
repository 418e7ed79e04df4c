"""Give the text that each token id adds, for people to read. Nothing is computed from it."""

import functools
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

_MAX_TOKENS_OF_A_CHARACTER = 4
"""UTF-8 has at most this many bytes per character."""
_BROKEN = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """The tokenizer of a base model, read when it is first needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer | None:
        path = self._directory / "tokenizer.json"
        return Tokenizer.from_file(str(path)) if path.is_file() else None

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that stand for no text, such as the end of a turn."""
        added = {} if self._tokenizer is None else self._tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds; a character of several tokens is given to the last."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return [f"<{token_id}>" for token_id in token_ids]
        texts: list[str] = []
        pending: list[int] = []
        for token_id in token_ids:
            pending.append(token_id)
            text = tokenizer.decode(pending, skip_special_tokens=False)
            if text.endswith(_BROKEN) and len(pending) < _MAX_TOKENS_OF_A_CHARACTER:
                texts.append("")
                continue
            texts.append(text)
            pending.clear()
        if pending and texts:
            texts[-1] = tokenizer.decode(pending, skip_special_tokens=False)
        return texts
