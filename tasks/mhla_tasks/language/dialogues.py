"""Documents for training: texts, and dialogues that the chat template of the tokenizer turns into text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

ROLE = re.compile(r"[\w-]+")
"""Pattern of a role. Chat templates write it between control tokens, so it must not spell any."""


@dataclass(frozen=True)
class Dialogue:
    """Dialogue from a row of a table. The chat template of a tokenizer converts it to text.

    Attributes:
        messages: role and text of each message.
        place: location of the row, for error messages.
    """

    messages: tuple[tuple[str, str], ...]
    place: str = field(default="a dialogue", compare=False)


Document = str | Dialogue
"""Text, or dialogue."""


def as_document(value: Any, source: str) -> Document | None:
    """Convert the value of a table cell to a document: a string, or a :class:`Dialogue`; None for a null.

    Args:
        value: a string, None, or a list of messages. A message is a dict with the strings ``role`` and ``content``; other keys
            are ignored, except those of tool calls.
        source: location of the value, for the error message.

    Raises:
        ValueError: if the value has a different type, or a message lacks ``role`` or ``content``, has a role that is not a
            single word, or calls tools.
    """
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise ValueError(
            f"{source}: {str(value)[:60]!r} is {type(value).__name__}, not text; choose a different column"
        )
    messages = tuple(_message(message, f"{source}: message {number}") for number, message in enumerate(value, 1))
    return Dialogue(messages, source)


def text_of(document: Document) -> str:
    """Return the text of a document; for a dialogue, the texts of its messages, each on a new line, without the roles."""
    return document if isinstance(document, str) else "\n".join(content for _, content in document.messages)


def _message(message: dict[str, Any], source: str) -> tuple[str, str]:
    if not {"role", "content"} <= message.keys():
        raise ValueError(
            f"{source} has the keys {sorted(message)}; a dialogue is a list of objects with 'role' and 'content'"
        )
    if message.get("tool_calls"):
        raise ValueError(f"{source} has tool_calls, which are not supported; leave such dialogues out")
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f"{source}: role {str(role)[:60]!r} and content {str(content)[:60]!r} must be text")
    if not ROLE.fullmatch(role):
        raise ValueError(f"{source}: the role {role[:60]!r} must be a word, such as user or assistant")
    return role, content
