"""Conversion of messages to tokens with the chat template of a tokenizer.

The spelling of a control token in a message, such as ``<|im_end|>``, is encoded as plain text. A template therefore gets a
placeholder for a message, which is replaced afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lightning_mhla.system.untrusted import time_limit
from mhla_tasks.language.encoding import control_tokens, encode_texts

TEMPLATE_SECONDS = 10.0
"""Time limit for rendering a chat template in seconds, far above the time of a well-behaved one."""

PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")
"""Pattern of the placeholder of a message in a rendered template, made of characters of the private use area."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Chat template in the format ChatML (https://github.com/openai/openai-python/blob/v0.28.1/chatml.md)."""

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
"""Control tokens of :data:`CHATML`."""


class ChatTemplate:
    """Chat template of a tokenizer.

    Args:
        tokenizer: tokenizer with a chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.control = tokenizer, control_tokens(tokenizer)

    def render(self, roles: Sequence[str], reply: bool = False) -> str:
        """Return the output of the template, with the placeholder of a message's number in place of its text.

        Args:
            roles: role of each message.
            reply: whether the output ends where the next reply of the model begins.

        Raises:
            ValueError: if the template rejects the messages.
        """
        return self.render_messages([(role, placeholder(number)) for number, role in enumerate(roles)], reply)

    def render_messages(self, messages: Sequence[tuple[str, str]], reply: bool = False) -> str:
        """Return the output of the template for messages themselves, given as role and text.

        Args:
            messages: role and text of each message.
            reply: whether the output ends where the next reply of the model begins.

        Raises:
            ValueError: if the template rejects the messages.
        """
        rows = [{"role": role, "content": content} for role, content in messages]
        try:
            with time_limit(TEMPLATE_SECONDS, "the chat template is not safe to use: its loops"):
                return str(self.tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=reply))
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"the chat template rejects the messages: {error}") from error

    def fill(self, rendered: str, contents: Sequence[str]) -> str:
        """Return the text in which messages replace the placeholders.

        Args:
            rendered: output of :meth:`render`, or a part of it.
            contents: texts of all messages.
        """
        return "".join(self._parts(rendered, contents))

    def encode(self, rendered: str, contents: Sequence[str]) -> list[int]:
        """Return the token indices of the text in which messages replace the placeholders.

        Args:
            rendered: output of :meth:`render`, or a part of it.
            contents: texts of all messages.

        Raises:
            ValueError: if the tokenizer fails on a text.
        """
        parts = self._parts(rendered, contents)
        if not self.spelled(parts[1::2]):  # encode all in one piece, as transformers does
            return encode_texts(self.tokenizer, ["".join(parts)], read_control_tokens=True)[0]
        ids: list[int] = []
        for number, text in enumerate(parts):
            if text:
                ids += encode_texts(self.tokenizer, [text], read_control_tokens=number % 2 == 0)[0]
        return ids

    def spelled(self, contents: Sequence[str]) -> bool:
        """Return whether a message spells a control token."""
        return any(token in text for text in contents for token in self.control.values() if token)

    def reply_ends(self, roles: Sequence[str]) -> set[int]:
        """Return a set with the index of the control token after a reply; empty if the template has none.

        Args:
            roles: roles of the messages before a user message and the reply to it.
        """
        rendered = self.render([*roles, "user", "assistant"])
        _, _, reply_end = rendered.rpartition(placeholder(len(roles) + 1))
        following = encode_texts(self.tokenizer, [reply_end.lstrip()], read_control_tokens=True)[0] if reply_end else []
        return {following[0]} if following and following[0] in self.control else set()

    def _parts(self, rendered: str, contents: Sequence[str]) -> list[str]:
        """Split a rendered template into its own texts and the messages, which alternate; the first is the template's."""
        parts = PLACEHOLDER.split(rendered)
        return [contents[int(part)] if number % 2 else part for number, part in enumerate(parts)]


def placeholder(number: int) -> str:
    """Return the characters that stand for the message with this number in a rendered template."""
    return f"\ue000{number}\ue001"
