"""A conversation as tokens: the model's chat template, cut so that each turn adds tokens to those before it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lightning_mhla.system.untrusted import time_limit
from mhla_tasks.language.encoding import begin_tokens, control_tokens, encode_texts

TEMPLATE_SECONDS = 10.0
"""Time to render a chat template, far above what an honest one takes."""

MARK = re.compile("\ue000(\\d+)\ue001")
"""Place of a message in a rendered template. Templates see marks of the private use area in place of what people wrote."""


class Conversation:
    """Messages and their tokens.

    A turn is encoded once: its tokens follow those of the turns before it, so that a model which has read these needs only the
    new ones. Letters of a control token that somebody types, such as ``<|im_end|>``, stay text. Without a chat template the
    messages follow each other as they are.

    Args:
        tokenizer: the model's tokenizer.
        system: what the system message says; None for none.

    Raises:
        ValueError: for a system message where there is no template or the template takes none.

    Attributes:
        ids: tokens of the conversation so far.
        stops: control tokens that end a reply in this template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.has_template = tokenizer.chat_template is not None
        if system is not None and not self.has_template:
            raise ValueError("the tokenizer has no chat template, so there is no place for a system message")
        self.control = control_tokens(tokenizer)
        self.roles: list[str] = []
        self.contents: list[str] = []
        self.ids: list[int] = []
        self._rendered = ""
        if system is not None:
            self._append("system", system)
        self.stops = self._stops()

    def ask(self, text: str) -> list[int]:
        """Add a message of the user.

        Args:
            text: the message.

        Returns:
            Tokens of the whole conversation, up to where the reply begins.

        Raises:
            ValueError: when the chat template rejects the messages.
        """
        self._append("user", text)
        if not self.has_template:
            self.ids += (begin_tokens(self.tokenizer) if not self.ids else []) + encode_texts(self.tokenizer, [text])[0]
            return self.ids
        rendered = self._render(reply=True)
        if self._rendered and rendered.startswith(self._rendered):
            self.ids = self.ids + self._encode(rendered[len(self._rendered) :])
        else:  # the first turn, or a template that changes earlier turns (it leaves out their reasoning, say)
            self.ids = self._encode(rendered)
        self._rendered = rendered
        return self.ids

    def reply(self, tokens: Sequence[int]) -> str:
        """Add the reply that the model wrote.

        Args:
            tokens: its tokens, without the one that ended it.

        Returns:
            The reply as text.
        """
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        self._append("assistant", text)
        self.ids = [*self.ids, *tokens]
        self._rendered += _mark(len(self.contents) - 1)
        return text

    def take_back(self) -> None:
        """Remove the last message of the user, which had no reply."""
        self.roles.pop()
        self.contents.pop()
        self._rendered, self.ids = "", []  # encoded again with the next one

    def _append(self, role: str, content: str) -> None:
        self.roles.append(role)
        self.contents.append(content)

    def _render(self, reply: bool) -> str:
        messages = [{"role": role, "content": _mark(number)} for number, role in enumerate(self.roles)]
        try:
            with time_limit(TEMPLATE_SECONDS, "the chat template is not safe to use: its loops"):
                return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=reply))
        except (TemplateError, OverflowError) as error:  # the second for a range that the sandbox rejects
            raise ValueError(f"the chat template rejects the messages: {error}") from error

    def _encode(self, rendered: str) -> list[int]:
        """Tokens of a part of the rendered template, with the messages in their places."""
        parts = MARK.split(rendered)  # text of the template and numbers of messages take turns
        texts = [self.contents[int(part)] if number % 2 else part for number, part in enumerate(parts)]
        spelled = any(token in text for text in texts[1::2] for token in self.control.values() if token)
        if not spelled:  # in one piece, as transformers encodes it
            return encode_texts(self.tokenizer, ["".join(texts)], read_control_tokens=True)[0]
        ids: list[int] = []
        for number, text in enumerate(texts):
            if text:
                ids += encode_texts(self.tokenizer, [text], read_control_tokens=number % 2 == 0)[0]
        return ids

    def _stops(self) -> set[int]:
        """The control token that the template puts behind a reply."""
        if not self.has_template:
            return set()
        roles = self.roles
        try:
            self.roles = [*roles, "user", "assistant"]
            rendered = self._render(reply=False)
        finally:
            self.roles = roles
        _, _, after = rendered.rpartition(_mark(len(roles) + 1))
        following = encode_texts(self.tokenizer, [after.lstrip()], read_control_tokens=True)[0] if after else []
        return {following[0]} if following and following[0] in self.control else set()


def _mark(number: int) -> str:
    return f"\ue000{number}\ue001"
