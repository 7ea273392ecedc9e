"""Encoding of documents as tokens, with an exact count of the bytes of their text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from mhla_tasks.language.chat_template import ChatTemplate, placeholder
from mhla_tasks.language.dialogues import Dialogue, Document
from mhla_tasks.language.encoding import control_tokens, encode_texts, encode_with_offsets
from mhla_tasks.language.targets import UnknownRepliesError, tokens_of_characters
from mhla_tasks.language.tokenizer import token_bytes


class EncodedDocuments(NamedTuple):
    """Tokens of several documents, one document after the other.

    Attributes:
        tokens: token indices of all documents, ``[n]`` int64.
        starts: index of the first token of each document, ``[documents]`` int64.
        missing: length of each document's text in bytes minus the number of bytes that its tokens stand for, ``[documents]``
            int64; negative if the tokens stand for more.
        targets: mask of the tokens that the loss counts, ``[n]`` bool; None if it counts all.
    """

    tokens: np.ndarray
    starts: np.ndarray
    missing: np.ndarray
    targets: np.ndarray | None = None


class EncodedDocument(NamedTuple):
    """Tokens of one document.

    Attributes:
        tokens: token indices, ``[n]`` int64.
        missing: length of the text in bytes minus the number of bytes that the tokens stand for; negative if the tokens
            stand for more.
        targets: mask of the tokens that the loss counts, ``[n]`` bool; None if it counts all.
    """

    tokens: np.ndarray
    missing: int
    targets: np.ndarray | None = None


class DocumentEncoder:
    """Callable that encodes texts and dialogues as tokens, all of which count toward the loss.

    A text gets the special tokens that begin and end it. A dialogue gets the tokens of the chat template and no others, as with
    transformers' ``apply_chat_template``. If a message spells a control token, the spelling is encoded as text.

    For each document, the result has the number of missing bytes: the length of the text in bytes minus the number of bytes
    that its tokens stand for. This number differs from 0 if the tokenizer changes a text before splitting it. A control token
    inside a document stands for the bytes of its spelling, so it adds nothing to the difference.

    Args:
        tokenizer: tokenizer with a special token for the beginning or the end of a text; for dialogues, with a chat template.
        read_control_tokens: whether the spelling of a control token in a text, such as ``<|endoftext|>``, becomes that token.
            In the messages of a dialogue it always remains text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, read_control_tokens: bool = False) -> None:
        self.tokenizer, self.read_control_tokens = tokenizer, read_control_tokens
        self.sizes = token_bytes(tokenizer)
        for index, token in control_tokens(tokenizer).items():
            self.sizes[index] = len(token.encode())
        self.template = ChatTemplate(tokenizer)
        self._rendered: dict[tuple[str, ...], str] = {}  # output of the chat template with placeholders, by roles

    def __call__(self, documents: Sequence[Document]) -> EncodedDocuments:
        """Encode documents, one after the other.

        Args:
            documents: texts and dialogues.

        Returns:
            The tokens of all documents in their order, with the start and the number of missing bytes of each document.

        Raises:
            ValueError: if the tokenizer has no special token that begins or ends a text, fails on a text, or has no chat
                template for a dialogue, or the template leaves out a message.
        """
        rows = self._encode_each(documents)
        starts = np.cumsum([0, *(len(row.tokens) for row in rows[:-1])], dtype=np.int64)
        missing = np.array([row.missing for row in rows], dtype=np.int64)
        masks = [row.targets for row in rows if row.targets is not None]
        targets = np.concatenate(masks) if masks else None
        return EncodedDocuments(np.concatenate([row.tokens for row in rows]), starts, missing, targets)

    def one(self, document: Document) -> EncodedDocument:
        """Encode a single document, in the same way as :meth:`__call__` encodes several."""
        return self._encode_each([document])[0]

    def _encode_each(self, documents: Sequence[Document]) -> list[EncodedDocument]:
        dialogues = [document for document in documents if isinstance(document, Dialogue)]
        plain = [document for document in documents if isinstance(document, str)]
        encoded_dialogues = iter(self._dialogues(dialogues))
        encoded_texts = zip(plain, encode_texts(self.tokenizer, plain, self.read_control_tokens), strict=True)
        rows = []
        for document in documents:
            targets = None
            if isinstance(document, Dialogue):
                text, ids, targets = next(encoded_dialogues)
                tokens = np.array(ids, dtype=np.int64)
            else:
                text, ids = next(encoded_texts)
                tokens = encode_document(ids, self.tokenizer)
            rows.append(EncodedDocument(tokens, len(text.encode()) - int(self.sizes[ids].sum()), targets))
        return rows

    def _dialogues(self, dialogues: Sequence[Dialogue]) -> list[tuple[str, list[int], np.ndarray | None]]:
        """Encode dialogues with the chat template.

        Returns:
            For each dialogue, a tuple of the text that the template produces, its n token indices, and the mask of the tokens
            that the loss counts, ``[n]`` bool; None if it counts all.
        """
        if not dialogues:
            return []
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"{dialogues[0].place}: the text is a dialogue, and the tokenizer has no chat template; use the tokenizer of a "
                "chat model, or make one with lightning prepare tokenizer --chat"
            )
        texts: list[str] = []
        rows: dict[int, tuple[list[int], np.ndarray | None]] = {}
        plain_numbers: list[int] = []  # of the dialogues in which no message spells a control token
        for number, dialogue in enumerate(dialogues):
            contents = [content for _, content in dialogue.messages]
            with _named(dialogue):
                # Also needed if no message spells a control token: it checks that the template leaves out no message.
                rendered = self._with_placeholders(tuple(role for role, _ in dialogue.messages))
                if self.template.spelled(contents):
                    texts.append(self.template.fill(rendered, contents))
                    rows[number] = self._encode_spelled(dialogue, rendered)
                else:
                    texts.append(self.template.render_messages(dialogue.messages))
                    plain_numbers.append(number)
        encoded = self._encode_rendered(
            [dialogues[number] for number in plain_numbers], [texts[number] for number in plain_numbers]
        )
        rows |= dict(zip(plain_numbers, encoded, strict=True))
        for number, dialogue in enumerate(dialogues):
            if not rows[number][0]:
                raise ValueError(f"{dialogue.place}: the chat template gives a text without tokens")
        return [(text, *rows[number]) for number, text in enumerate(texts)]

    def _encode_spelled(self, dialogue: Dialogue, rendered: str) -> tuple[list[int], np.ndarray | None]:
        """Encode a dialogue in which a message spells a control token.

        Args:
            dialogue: dialogue to encode.
            rendered: output of the chat template, with placeholders for the messages.

        Returns:
            A tuple of the n token indices and the mask of the tokens that the loss counts, ``[n]`` bool; None if it counts all.
        """
        return self.template.encode(rendered, [content for _, content in dialogue.messages]), None

    def _encode_rendered(
        self, dialogues: Sequence[Dialogue], texts: list[str]
    ) -> list[tuple[list[int], np.ndarray | None]]:
        """Encode dialogues in which no message spells a control token.

        Args:
            dialogues: dialogues to encode.
            texts: output of the chat template for each dialogue.

        Returns:
            For each dialogue, a tuple of its n token indices and the mask of the tokens that the loss counts, ``[n]`` bool;
            None if it counts all.
        """
        return [(ids, None) for ids in encode_texts(self.tokenizer, texts, read_control_tokens=True)]

    def _with_placeholders(self, roles: tuple[str, ...]) -> str:
        """Return the output of the template with placeholders for the messages, after checking that none is missing.

        Args:
            roles: role of each message.

        Raises:
            ValueError: if the template leaves out a message.
        """
        if roles not in self._rendered:
            rendered = self.template.render(roles)
            for number, role in enumerate(roles):
                if placeholder(number) not in rendered:
                    raise ValueError(
                        f"the chat template leaves out message {number + 1} ({role}) of {len(roles)}; use a different "
                        "template, or remove such messages"
                    )
            self._rendered[roles] = rendered
        return self._rendered[roles]


class ReplyEncoder(DocumentEncoder):
    """Callable that encodes texts and dialogues, and marks the tokens that count toward a loss on replies.

    All tokens of a text count. In a dialogue, the tokens of the assistant's messages count, including the control token that
    ends a message, as with transformers' ``return_assistant_tokens_mask``. The constructor takes the arguments of
    :class:`DocumentEncoder`. Calls raise :class:`UnknownRepliesError` if the chat template or the tokenizer does not show which
    tokens the model writes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, read_control_tokens: bool = False) -> None:
        super().__init__(tokenizer, read_control_tokens)
        self._ranges: dict[tuple[str, ...], list[tuple[int, int]]] = {}  # ranges of the replies, by roles

    @override
    def _encode_each(self, documents: Sequence[Document]) -> list[EncodedDocument]:
        rows = super()._encode_each(documents)
        return [
            row if row.targets is not None else row._replace(targets=np.ones(len(row.tokens), dtype=bool))
            for row in rows
        ]

    @override
    def _encode_spelled(self, dialogue: Dialogue, rendered: str) -> tuple[list[int], np.ndarray | None]:
        roles, contents = zip(*dialogue.messages, strict=True)
        if roles not in self._ranges:
            messages = [(role, placeholder(number)) for number, role in enumerate(roles)]
            self._ranges[roles] = self.template.reply_ranges(messages, rendered)
        return self.template.encode_with_replies(rendered, list(contents), self._ranges[roles])

    @override
    def _encode_rendered(
        self, dialogues: Sequence[Dialogue], texts: list[str]
    ) -> list[tuple[list[int], np.ndarray | None]]:
        ranges = []
        for dialogue, text in zip(dialogues, texts, strict=True):
            with _named(dialogue):
                ranges.append(self.template.reply_ranges(dialogue.messages, text))
        encoded = encode_with_offsets(self.tokenizer, texts)
        return [
            (ids, tokens_of_characters(offsets, part)) for (ids, offsets), part in zip(encoded, ranges, strict=True)
        ]


@contextmanager
def _named(dialogue: Dialogue) -> Iterator[None]:
    """Context manager that begins the message of a ValueError with the place of a dialogue, such as its file and line."""
    try:
        yield
    except UnknownRepliesError as error:
        raise UnknownRepliesError(f"{dialogue.place}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{dialogue.place}: {error}") from error


def encode_document(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Add the special tokens that begin and end a document to the tokens of its text.

    If the tokenizer has only one such token, or the same token for both, it is added at the start only.

    Args:
        ids: token indices of the text.
        tokenizer: tokenizer of the text.

    Returns:
        Token indices of the document, ``[n]`` int64.

    Raises:
        ValueError: if the tokenizer has neither of the two tokens.
    """
    end = tokenizer.eos_token_id
    begin = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if begin is None:
        raise ValueError(
            "the tokenizer has neither a bos nor an eos token, so documents could not be distinguished; add one, for "
            "example by tokenizer.add_special_tokens({'eos_token': '<|endoftext|>'}) and tokenizer.save_pretrained"
        )
    return np.array([begin, *ids, *([] if end in (None, begin) else [end])], dtype=np.int64)
