"""Printing of text while its tokens are generated, with the same result as decoding all tokens at the end."""

from __future__ import annotations

import re
import sys

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
"""Pattern of tokens that stand for one byte. Consecutive bytes that are not valid UTF-8 all become U+FFFD."""

WINDOW, OVERLAP = 256, 64
"""Maximum number of tokens that are decoded together, and number of these that the next window keeps."""


class TextPrinter(BaseStreamer):
    """Streamer that prints text to standard output while transformers' ``generate`` produces its tokens.

    transformers' own ``TextStreamer`` decodes each line separately, so SentencePiece tokenizers lose the spaces at the start of
    the line. This class decodes each token together with those before it. Trailing spaces, and bytes of an incomplete
    character, are held back until the next token.

    Args:
        tokenizer: tokenizer of the model.
        skip_prompt: whether to omit the prompt, which ``generate`` passes first.

    Attributes:
        tokens: indices of the tokens generated so far, without the prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_prompt: bool) -> None:
        self.tokenizer = tokenizer
        self.skip_prompt = skip_prompt
        self.tokens: list[int] = []
        self._window: list[int] = []
        self._printed = 0  # number of characters of the window's text that are printed
        self._prompt_comes = True

    def put(self, value: Tensor) -> None:
        """Receive token indices from ``generate``: first the prompt ``[1, N]``, then one new token ``[1]`` at a time."""
        new = value.flatten().tolist()
        self._window += new
        if self._prompt_comes:
            self._prompt_comes = False
            self._printed = len(self._text()) if self.skip_prompt else 0
        else:
            self.tokens += new
        text = self._text().rstrip()
        # U+FFFD at the end is an incomplete character: later bytes may complete it.
        if not text.endswith("\ufffd") and not self._waits(new[-1]):
            self._print(text)
        if len(self._window) > WINDOW:
            self._move_window()

    def end(self) -> None:
        """Print the text that was held back, and end the line."""
        self._print(self._text())
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _waits(self, token: int) -> bool:
        """Return whether a token is a single byte or a special token, after which the text so far may still change."""
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
        """Shorten the list of tokens that are decoded together by dropping the oldest ones.

        Nothing is dropped if the text of the other tokens would change.
        """
        waiting = self._text()[self._printed :]
        window = self._window
        cuts = (cut for cut in range(len(window) - OVERLAP, len(window)) if not self._waits(window[cut]))
        self._window = window[next(cuts, 0) :]
        text = self._text()
        if text.endswith(waiting):
            self._printed = len(text) - len(waiting)
        else:  # without the dropped tokens, the others have a different text: try again later
            self._window = window
