"""Incremental encoding of conversations with the model's chat template: normally, only new turns are encoded."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from mhla_tasks.language.chat_template import ChatTemplate, placeholder
from mhla_tasks.language.encoding import begin_tokens, encode_texts


class Conversation:
    """Conversation between a user and a model, stored both as messages and as tokens.

    Normally, a turn is encoded once and appended to the tokens of earlier turns, so that a model that keeps its state reads
    only the new tokens. All turns are encoded again if the chat template changes earlier ones, for example by omitting their
    reasoning.

    If a message spells a control token, such as ``<|im_end|>``, the spelling is encoded as plain text. The template then gets
    placeholders in place of all messages, so it cannot omit parts of them, such as reasoning. Without a chat template, messages
    are concatenated.

    Args:
        tokenizer: tokenizer of the model.
        system: text of the system message; None for no system message.

    Raises:
        ValueError: if there is a system message but no chat template, or the template rejects or ignores the message.

    Attributes:
        ids: token indices of the conversation so far.
        stops: indices of the control tokens that end a reply in the chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.has_template = tokenizer.chat_template is not None
        if system is not None and not self.has_template:
            raise ValueError("the tokenizer has no chat template, so there is no place for a system message")
        self._template = ChatTemplate(tokenizer)
        self.roles: list[str] = []
        self.contents: list[str] = []
        self.ids: list[int] = []
        self._rendered = ""
        if system is not None:
            self._append("system", system)
            if placeholder(0) not in self._template.render(["system", "user"]):
                raise ValueError("the chat template ignores system messages; write it into the first message")
        self.stops = self._template.reply_ends(self.roles) if self.has_template else set()

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
        rendered = self._template.render(self.roles, reply=True)
        if (changed := self._changed(rendered)) is not None:
            self.ids = encode_texts(self.tokenizer, [changed], read_control_tokens=True)[0]
            self._rendered = ""  # the next message encodes the conversation again
            return self.ids
        if self._rendered and rendered.startswith(self._rendered):
            self.ids = self.ids + self._template.encode(rendered[len(self._rendered) :], self.contents)
        else:  # the first turn, or a template that changes earlier turns by their roles
            self.ids = self._template.encode(rendered, self.contents)
        self._rendered = rendered
        return self.ids

    def _changed(self, rendered: str) -> str | None:
        """Return the template's output for the messages if the template changes their text, for example by omitting reasoning.

        Spaces that a template removes around a message do not count, so that a model need not read earlier turns again.

        Args:
            rendered: output of the template with placeholders for messages.

        Returns:
            The output; None if the template leaves the messages unchanged, or one of them spells a control token.
        """
        if self._template.spelled(self.contents):
            return None
        messages = list(zip(self.roles, self.contents, strict=True))
        output = self._template.render_messages(messages, reply=True)
        filled = self._template.fill(rendered, self.contents)
        return None if "".join(output.split()) == "".join(filled.split()) else output

    def reply(self, tokens: Sequence[int]) -> None:
        """Add a reply of the model to the conversation.

        Args:
            tokens: token indices of the reply, without the token that ended it.
        """
        self._append("assistant", self.tokenizer.decode(list(tokens), skip_special_tokens=True))
        self.ids = [*self.ids, *tokens]
        if self._rendered:
            self._rendered += placeholder(len(self.contents) - 1)

    def take_back(self) -> None:
        """Remove the last user message, which must not have a reply yet."""
        self.roles.pop()
        self.contents.pop()
        self._rendered, self.ids = "", []  # the next message encodes the conversation again

    def _append(self, role: str, content: str) -> None:
        self.roles.append(role)
        self.contents.append(content)
