"""Encoding of conversations with the model's chat template, turn by turn, without encoding earlier turns again."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lightning_mhla.system.untrusted import time_limit
from mhla_tasks.language.encoding import begin_tokens, control_tokens, encode_texts

TEMPLATE_SECONDS = 10.0
"""Time limit for rendering a chat template in seconds, far above the time of a well-behaved one."""

MARK = re.compile("\ue000(\\d+)\ue001")
"""Pattern of the placeholder of a message in a rendered template, made of characters of the private use area. Templates never
see the messages, so control tokens that a message spells out remain distinguishable from those of the template."""


class Conversation:
    """Conversation between a user and a model, stored both as messages and as tokens.

    A turn is encoded once and appended to the tokens of earlier turns, so that a model that keeps its state reads only the new
    tokens. All turns are encoded again if the chat template changes earlier ones. The spelling of a control token in a message,
    such as ``<|im_end|>``, is encoded as plain text. Without a chat template, messages are concatenated.

    Args:
        tokenizer: tokenizer of the model.
        system: text of the system message; None for no system message.

    Raises:
        ValueError: if there is a system message but no chat template, or the template rejects the message.

    Attributes:
        ids: token indices of the conversation so far.
        stops: indices of the control tokens that end a reply in the chat template.
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
        """Add a user message to the conversation, and encode it.

        Args:
            text: text of the message.

        Returns:
            Token indices of the full conversation, up to the point where the reply begins.

        Raises:
            ValueError: if the chat template rejects the messages.
        """
        self._append("user", text)
        if not self.has_template:
            self.ids += (begin_tokens(self.tokenizer) if not self.ids else []) + encode_texts(self.tokenizer, [text])[0]
            return self.ids
        rendered = self._render(reply=True)
        if self._rendered and rendered.startswith(self._rendered):
            self.ids = self.ids + self._encode(rendered[len(self._rendered) :])
        else:  # the first turn, or a template that changes earlier turns, for example by omitting their reasoning
            self.ids = self._encode(rendered)
        self._rendered = rendered
        return self.ids

    def reply(self, tokens: Sequence[int]) -> str:
        """Add a reply of the model to the conversation.

        Args:
            tokens: token indices of the reply, without the token that ended it.

        Returns:
            Text of the reply.
        """
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        self._append("assistant", text)
        self.ids = [*self.ids, *tokens]
        self._rendered += _mark(len(self.contents) - 1)
        return text

    def take_back(self) -> None:
        """Remove the last user message, which must not have a reply yet."""
        self.roles.pop()
        self.contents.pop()
        self._rendered, self.ids = "", []  # the next message encodes the conversation again

    def _append(self, role: str, content: str) -> None:
        self.roles.append(role)
        self.contents.append(content)

    def _render(self, reply: bool) -> str:
        messages = [{"role": role, "content": _mark(number)} for number, role in enumerate(self.roles)]
        try:
            with time_limit(TEMPLATE_SECONDS, "the chat template is not safe to use: its loops"):
                return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=reply))
        except (TemplateError, OverflowError) as error:  # OverflowError: a range that the sandbox rejects
            raise ValueError(f"the chat template rejects the messages: {error}") from error

    def _encode(self, rendered: str) -> list[int]:
        """Replace the placeholders in a rendered chat template with the messages, and encode the result.

        Args:
            rendered: output of the template, in which a placeholder stands for each message.
        """
        parts = MARK.split(rendered)  # text of the template and numbers of messages alternate
        texts = [self.contents[int(part)] if number % 2 else part for number, part in enumerate(parts)]
        spelled = any(token in text for text in texts[1::2] for token in self.control.values() if token)
        if not spelled:  # no message spells a control token: encode all in one piece, as transformers does
            return encode_texts(self.tokenizer, ["".join(texts)], read_control_tokens=True)[0]
        ids: list[int] = []
        for number, text in enumerate(texts):
            if text:
                ids += encode_texts(self.tokenizer, [text], read_control_tokens=number % 2 == 0)[0]
        return ids

    def _stops(self) -> set[int]:
        """Return a set with the index of the control token that ends a reply in the chat template; empty if there is none."""
        if not self.has_template:
            return set()
        roles = self.roles
        try:
            self.roles = [*roles, "user", "assistant"]
            rendered = self._render(reply=False)
        finally:
            self.roles = roles
        _, _, reply_end = rendered.rpartition(_mark(len(roles) + 1))
        following = encode_texts(self.tokenizer, [reply_end.lstrip()], read_control_tokens=True)[0] if reply_end else []
        return {following[0]} if following and following[0] in self.control else set()


def _mark(number: int) -> str:
    return f"\ue000{number}\ue001"
