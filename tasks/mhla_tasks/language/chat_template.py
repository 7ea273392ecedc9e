"""Conversion of messages to tokens with the chat template of a tokenizer.

The spelling of a control token in a message, such as ``<|im_end|>``, is encoded as plain text. To tell such a spelling from the
control tokens of the template, the template is rendered with placeholders, which the messages replace afterwards.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from lightning_mhla.system.untrusted import time_limit
from mhla_tasks.language.encoding import control_tokens, encode_texts, encode_with_offsets
from mhla_tasks.language.targets import UnknownRepliesError, tokens_of_characters

log = logging.getLogger(__name__)

Output = TypeVar("Output")

TEMPLATE_SECONDS = 10.0
"""Time limit for rendering a chat template in seconds, far above the time of a well-behaved one."""

PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")
"""Pattern of the placeholder of a message in a rendered template, made of characters of the private use area."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Chat template in the format ChatML (https://github.com/openai/openai-python/blob/v0.28.1/chatml.md)."""

ASSISTANT = "assistant"
"""Role of the messages that the model writes, in every chat template."""

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Pattern of the tag that begins text written by the model in a chat template, as defined by transformers."""

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
"""Control tokens of :data:`CHATML`."""


class ChatTemplate:
    """Chat template of a tokenizer, with methods to render messages, to encode them, and to find the replies in the output.

    Args:
        tokenizer: tokenizer with a chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.control = tokenizer, control_tokens(tokenizer)

    def render(self, roles: Sequence[str], reply: bool = False) -> str:
        """Render the template with a numbered placeholder in place of the text of each message, and return the output.

        Args:
            roles: role of each message.
            reply: whether to end the output with the prompt for a reply of the model.

        Raises:
            ValueError: if the template rejects the messages.
        """
        return self.render_messages([(role, placeholder(number)) for number, role in enumerate(roles)], reply)

    def render_messages(self, messages: Sequence[tuple[str, str]], reply: bool = False) -> str:
        """Render the template with the texts of messages, and return the output.

        Args:
            messages: role and text of each message.
            reply: whether to end the output with the prompt for a reply of the model.

        Raises:
            ValueError: if the template rejects the messages.
        """
        rows = _rows(messages)
        return _guarded(
            lambda: str(self.tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=reply))
        )

    def reply_ranges(self, messages: Sequence[tuple[str, str]], rendered: str) -> list[tuple[int, int]]:
        """Return the ranges of characters that the model writes in the output of the template.

        A template may mark them with the tag ``generation``, as for transformers' ``return_assistant_tokens_mask``. Without the
        tag, a reply begins after the text that the model reads before it in a chat: the output for the earlier messages,
        followed by the prompt for a reply. If there are no earlier messages, it begins after the first such prompt in the
        output. The reply ends with the control token that ends replies. If the template does not have such a token, the reply
        ends where the output for all messages up to the reply ends.

        Args:
            messages: role and text of each message.
            rendered: output of :meth:`render_messages` for these messages.

        Returns:
            Index of the first character of each range, and index after its last one, in ascending order.

        Raises:
            UnknownRepliesError: if the template does not mark replies, and its output does not show where a reply begins and
                ends.
        """
        if self._marks_replies:
            return self._marked_ranges(messages)
        ranges: list[tuple[int, int]] = []
        for number, (role, _) in enumerate(messages):
            if role != ASSISTANT:
                continue
            start = self._prefix(messages[:number], rendered, True, number) if number else self._first_start(rendered)
            stop = rendered.find(self._reply_end, start) if self._reply_end else -1
            end = stop + len(self._reply_end)
            if stop < 0:
                end = self._prefix(messages[: number + 1], rendered, False, number)
            # With placeholders for messages, it shows whether a range contains its own message and no other one.
            contains_others = {*PLACEHOLDER.findall(rendered[start:end])} - {str(number)}
            if start > end or contains_others or (ranges and start < ranges[-1][1]):
                raise _unknown(number)
            ranges.append((start, end))
        return ranges

    def _prefix(self, messages: Sequence[tuple[str, str]], rendered: str, reply: bool, number: int) -> int:
        """Return the number of characters in the output for the first messages, with which the complete output must begin.

        Args:
            messages: messages at the beginning of the conversation, as role and text.
            rendered: output for all messages.
            reply: whether the output for ``messages`` ends with the prompt for a reply.
            number: index of the reply, for the error message.

        Raises:
            UnknownRepliesError: if the output for all messages begins differently, or the template rejects the messages.
        """
        try:
            prefix = self.render_messages(messages, reply)
        except ValueError as error:
            raise _unknown(number) from error
        if not rendered.startswith(prefix):
            raise _unknown(number)
        return len(prefix)

    def _first_start(self, rendered: str) -> int:
        """Return the index of the character at which the reply begins in the output for a dialogue that begins with a reply.

        The reply begins after the first prompt for a reply. The output for an empty conversation cannot be used instead,
        because a template may reject it, or may write its own system message before the first message.

        Args:
            rendered: output for all messages.

        Raises:
            UnknownRepliesError: if the output does not contain a prompt for a reply, or the template rejects a user message.
        """
        try:
            question, prompted = (self.render(["user"], reply) for reply in (False, True))
        except ValueError as error:
            raise _unknown(0) from error
        prompt = prompted.removeprefix(question)
        start = rendered.find(prompt)
        if not prompt or start < 0:  # a template without a prompt does not show where the reply begins
            raise _unknown(0)
        return start + len(prompt)

    @cached_property
    def _marks_replies(self) -> bool:
        return MARKED.search(self.tokenizer.get_chat_template()) is not None

    def _marked_ranges(self, messages: Sequence[tuple[str, str]]) -> list[tuple[int, int]]:
        """Render messages, and return the ranges of characters that the template marks with the tag ``generation``.

        Each range consists of the index of its first character and the index after its last one. Empty ranges are omitted.
        """
        _, ranges = _guarded(
            lambda: render_jinja_template(  # what apply_chat_template calls, which returns no ranges of characters
                conversations=[_rows(messages)],
                chat_template=self.tokenizer.get_chat_template(),
                return_assistant_tokens_mask=True,
                add_generation_prompt=False,
                **self.tokenizer.special_tokens_map,
            )
        )
        return [(start, end) for start, end in ranges[0] if start < end]

    @cached_property
    def _reply_end(self) -> str:
        """Spelling of the control token that ends a reply; empty if the template has none."""
        try:
            return next((self.control[token] for token in self.reply_ends([])), "")
        except ValueError:
            return ""

    def fill(self, rendered: str, contents: Sequence[str]) -> str:
        """Replace the placeholders in a rendered template with the texts of messages, and return the result.

        Args:
            rendered: output of :meth:`render`, or a part of it.
            contents: texts of all messages, in order.
        """
        return "".join(self._parts(rendered, contents))

    def encode(self, rendered: str, contents: Sequence[str]) -> list[int]:
        """Replace the placeholders in a rendered template with the texts of messages, and return the token indices.

        The spelling of a control token in a message is encoded as plain text.

        Args:
            rendered: output of :meth:`render`, or a part of it.
            contents: texts of all messages, in order.

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

    def encode_with_replies(
        self, rendered: str, contents: Sequence[str], ranges: list[tuple[int, int]]
    ) -> tuple[list[int], np.ndarray]:
        """Encode a dialogue in which a message spells a control token, and mark the tokens that the model writes.

        The token indices are the same as those from :meth:`encode`.

        Args:
            rendered: output of :meth:`render`.
            contents: texts of all messages, in order. At least one of them spells a control token.
            ranges: ranges of characters of ``rendered`` that the model writes.

        Returns:
            A tuple of the n token indices and the mask of the tokens that the model writes, ``[n]`` bool.

        Raises:
            UnknownRepliesError: if the tokenizer does not report which characters a token stands for.
            ValueError: if the tokenizer fails on a text.
        """
        ids: list[int] = []
        masks: list[np.ndarray] = [np.zeros(0, dtype=bool)]
        position = 0
        for number, part in enumerate(PLACEHOLDER.split(rendered)):
            if number % 2:
                tokens = encode_texts(self.tokenizer, [contents[int(part)]])[0] if contents[int(part)] else []
                mask = np.full(len(tokens), any(start <= position < end for start, end in ranges))
                position += len(placeholder(int(part)))
            elif part:
                tokens, offsets = encode_with_offsets(self.tokenizer, [part])[0]
                mask = tokens_of_characters(offsets + position, ranges)
                position += len(part)
            else:
                continue
            ids += tokens
            masks.append(mask)
        return ids, np.concatenate(masks)

    def spelled(self, contents: Sequence[str]) -> bool:
        """Return whether one of the texts contains the spelling of a control token, such as ``<|im_end|>``."""
        return any(token in text for text in contents for token in self.control.values() if token)

    def reply_ends(self, roles: Sequence[str]) -> set[int]:
        """Return a set with the index of the control token that the template writes after a reply; empty if it writes none.

        The template is rendered for messages of the given roles, followed by a user message and the reply to it.

        Args:
            roles: roles of the messages at the beginning of the conversation, such as ``system``.
        """
        rendered = self.render([*roles, "user", "assistant"])
        _, _, reply_end = rendered.rpartition(placeholder(len(roles) + 1))
        following = encode_texts(self.tokenizer, [reply_end.lstrip()], read_control_tokens=True)[0] if reply_end else []
        return {following[0]} if following and following[0] in self.control else set()

    def _parts(self, rendered: str, contents: Sequence[str]) -> list[str]:
        """Split the output of the template at its placeholders, and insert the messages.

        Texts of the template and messages alternate in the result. The first text, which may be empty, is the template's.
        """
        parts = PLACEHOLDER.split(rendered)
        return [contents[int(part)] if number % 2 else part for number, part in enumerate(parts)]


def reply_end_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return a set with the index of the control token that ends a reply in the chat template of a tokenizer.

    The set is empty if the tokenizer has no chat template, or one that ends replies with text or cannot be rendered.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return set()
    try:
        return ChatTemplate(tokenizer).reply_ends([])
    except ValueError as error:  # models can be trained with such a tokenizer, but `lightning chat` reports the error
        log.info("the end of replies is not known: %s", error)
        return set()


def placeholder(number: int) -> str:
    """Return the placeholder of the message with the index ``number`` in a rendered template."""
    return f"\ue000{number}\ue001"


def _rows(messages: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


def _guarded(render: Callable[[], Output]) -> Output:
    """Run a function that renders a chat template, with a time limit of 10 seconds, and return its result.

    Raises:
        ValueError: if the template fails, or exceeds the time limit.
    """
    try:
        with time_limit(TEMPLATE_SECONDS, "the chat template is not safe to use: its loops"):
            return render()
    except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"the chat template rejects the messages: {error}") from error


def _unknown(number: int) -> UnknownRepliesError:
    return UnknownRepliesError(
        f"the chat template does not show which text the model writes: the text before message {number + 1} ({ASSISTANT}) is "
        "not the one that a chat has when the reply begins; put {% generation %} and {% endgeneration %} around the "
        "replies in the template, or use a different one"
    )
