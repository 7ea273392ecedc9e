"""Text that is printed as its tokens come, the same as if it were decoded at the end."""

from __future__ import annotations

import re
import sys

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
"""Tokens of one byte. A row of them becomes characters together, or none of them does."""

WINDOW, OVERLAP = 256, 64
"""Tokens that are decoded together at most, and those of them that the next window begins with."""


class TextPrinter(BaseStreamer):
    """Print a text on standard output while ``generate`` draws its tokens.

    transformers' ``TextStreamer`` decodes each line alone, so that tokenizers of the SentencePiece kind lose the spaces at its
    beginning. Here each token is decoded with those before it. A space at the end, or bytes that are not a
    character yet, wait for the next token.

    Args:
        tokenizer: tokenizer of the tokens.
        skip_prompt: whether the prompt, which ``generate`` hands over first, is left out.

    Attributes:
        tokens: tokens so far, without the prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_prompt: bool) -> None:
        self.tokenizer = tokenizer
        self.skip_prompt = skip_prompt
        self.tokens: list[int] = []
        self._window: list[int] = []
        self._printed = 0  # characters of the window's text
        self._prompt_comes = True

    def put(self, value: Tensor) -> None:
        """Take the prompt ``[1, N]``, then a token ``[1]`` at a time."""
        new = value.flatten().tolist()
        self._window += new
        if self._prompt_comes:
            self._prompt_comes = False
            self._printed = len(self._text()) if self.skip_prompt else 0
        else:
            self.tokens += new
        text = self._text().rstrip()
        if not text.endswith("\ufffd") and not self._waits(new[-1]):
            self._print(text)
        if len(self._window) > WINDOW:
            self._move_window()

    def end(self) -> None:
        """Print what waits, and end the line."""
        self._print(self._text())
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _waits(self, token: int) -> bool:
        """Whether a token is a byte, or has no text: more bytes may follow, which change the characters before them."""
        name = str(self.tokenizer.convert_ids_to_tokens(token))
        return token in self.tokenizer.all_special_ids or BYTE.fullmatch(name) is not None

    def _text(self) -> str:
        return str(self.tokenizer.decode(self._window, skip_special_tokens=True))

    def _print(self, text: str) -> None:
        if len(text) > self._printed:
            sys.stdout.write(text[self._printed :])
            sys.stdout.flush()
            self._printed = len(text)

    def _move_window(self) -> None:
        """Forget tokens whose text no longer changes what follows."""
        waiting = self._text()[self._printed :]
        window = self._window
        cuts = (cut for cut in range(len(window) - OVERLAP, len(window)) if not self._waits(window[cut]))
        self._window = window[next(cuts, 0) :]
        text = self._text()
        if text.endswith(waiting):
            self._printed = len(text) - len(waiting)
        else:  # the tokens cannot be cut here
            self._window = window
