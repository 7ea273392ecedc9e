"""Encoding of documents as tokens, with an exact count of the bytes of their text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from mhla_tasks.language.chat_template import ChatTemplate, placeholder
from mhla_tasks.language.dialogues import Dialogue, Document
from mhla_tasks.language.encoding import control_tokens, encode_texts, encode_with_offsets
from mhla_tasks.language.targets import UnknownRepliesError, tokens_of_characters
from mhla_tasks.language.tokenizer import token_bytes


class EncodedDocuments(NamedTuple):
    """Tokens of documents, one after the other.

    Attributes:
        tokens: token indices of all documents, ``[n]`` int64.
        starts: index of the first token of each document, ``[documents]`` int64.
        missing: length of each document's text in bytes minus the number of bytes that its tokens stand for, ``[documents]``
            int64; negative if the tokens stand for more.
    """

    tokens: np.ndarray
    starts: np.ndarray
    missing: np.ndarray


class EncodedDocument(NamedTuple):
    """Tokens of one document.

    Attributes:
        tokens: token indices, ``[n]`` int64.
        missing: length of the text in bytes minus the number of bytes that the tokens stand for; negative if these are more.
        targets: mask of the tokens that the loss counts, ``[n]`` bool; None if it counts all.
    """

    tokens: np.ndarray
    missing: int
    targets: np.ndarray | None = None


class DocumentEncoder:
    """Callable that encodes texts and dialogues as tokens.

    A text gets the special tokens that begin and end it. A dialogue gets the tokens of the chat template and no others, as with
    transformers' ``apply_chat_template``. If a message spells a control token, the spelling is encoded as text.

    For each document, the result has the number of missing bytes: the length of the text in bytes minus the number of bytes
    that its tokens stand for. It differs from 0 if the tokenizer changes a text before it splits it. A control token inside a
    document counts as many bytes as its spelling has, so it adds nothing to the difference.

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
        self._template = ChatTemplate(tokenizer)
        # Output of the chat template with placeholders by roles, and the ranges of its replies if they were asked for.
        self._rendered: dict[tuple[str, ...], str] = {}
        self._ranges: dict[tuple[str, ...], list[tuple[int, int]]] = {}

    def __call__(self, documents: Sequence[Document]) -> EncodedDocuments:
        """Encode documents, one after the other.

        Args:
            documents: texts and dialogues.

        Returns:
            The tokens of all documents in their order, the start of each document, and its number of missing bytes.

        Raises:
            ValueError: if the tokenizer has no special token that begins or ends a text, fails on a text, or has no chat
                template for a dialogue, or the template leaves out a message.
        """
        return self._encode(documents, with_targets=False)[0]

    def with_targets(self, documents: Sequence[Document]) -> tuple[EncodedDocuments, np.ndarray]:
        """Encode documents, and mark the tokens that count toward a loss on texts and the assistant's messages only.

        All tokens of a text count. In a dialogue, the tokens of the assistant's messages count, including the control token
        that ends a message, as with transformers' ``return_assistant_tokens_mask``.

        Args:
            documents: texts and dialogues.

        Returns:
            The tokens, and the mask of those that count, ``[n]`` bool.

        Raises:
            UnknownRepliesError: if the chat template or the tokenizer does not show which tokens the model writes.
            ValueError: if a document cannot be encoded, as in :meth:`__call__`.
        """
        return self._encode(documents, with_targets=True)

    def one(self, document: Document) -> EncodedDocument:
        """Encode a single document, all of whose tokens count toward the loss."""
        tokens, _, missing = self([document])
        return EncodedDocument(tokens, int(missing[0]))

    def one_with_targets(self, document: Document) -> EncodedDocument:
        """Encode a single document, and mark the tokens that count toward the loss as :meth:`with_targets` does."""
        (tokens, _, missing), targets = self.with_targets([document])
        return EncodedDocument(tokens, int(missing[0]), targets)

    def _encode(self, documents: Sequence[Document], with_targets: bool) -> tuple[EncodedDocuments, np.ndarray]:
        dialogues = [document for document in documents if isinstance(document, Dialogue)]
        plain = [document for document in documents if isinstance(document, str)]
        encoded_dialogues = iter(self._dialogues(dialogues, with_targets))
        encoded_texts = zip(plain, encode_texts(self.tokenizer, plain, self.read_control_tokens), strict=True)
        rows, missing, masks = [], [], []
        for document in documents:
            if isinstance(document, Dialogue):
                text, ids, mask = next(encoded_dialogues)
                rows.append(np.array(ids, dtype=np.int64))
                masks.append(mask)
            else:
                text, ids = next(encoded_texts)
                rows.append(encode_document(ids, self.tokenizer))
                masks.append(np.ones(len(rows[-1]), dtype=bool))
            missing.append(len(text.encode()) - int(self.sizes[ids].sum()))
        starts = np.cumsum([0, *map(len, rows[:-1])], dtype=np.int64)
        encoded = EncodedDocuments(np.concatenate(rows), starts, np.array(missing, dtype=np.int64))
        return encoded, np.concatenate(masks)

    def _dialogues(self, dialogues: Sequence[Dialogue], with_targets: bool) -> list[tuple[str, list[int], np.ndarray]]:
        """Return the text of each dialogue, its token indices, and the mask of the tokens that the loss counts.

        Args:
            dialogues: dialogues to encode.
            with_targets: whether the loss counts replies only; otherwise it counts all tokens.
        """
        if not dialogues:
            return []
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"{dialogues[0].place}: the text is a dialogue, and the tokenizer has no chat template; use the tokenizer of a "
                "chat model, or make one with lightning prepare tokenizer --chat"
            )
        texts: list[str] = []
        ranges: list[list[tuple[int, int]]] = []
        rows: dict[int, tuple[list[int], np.ndarray]] = {}
        for number, dialogue in enumerate(dialogues):
            contents = [content for _, content in dialogue.messages]
            try:
                rendered, replies = self._with_placeholders(tuple(role for role, _ in dialogue.messages), with_targets)
                if self._template.spelled(contents):
                    texts.append(self._template.fill(rendered, contents))
                    rows[number] = self._spelled(rendered, contents, replies, with_targets)
                else:
                    texts.append(self._template.render_messages(dialogue.messages))
                    if with_targets:
                        replies = self._template.reply_ranges(dialogue.messages, texts[-1])
                ranges.append(replies)
            except UnknownRepliesError as error:
                raise UnknownRepliesError(f"{dialogue.place}: {error}") from error
            except ValueError as error:
                raise ValueError(f"{dialogue.place}: {error}") from error
        others = [number for number in range(len(texts)) if number not in rows]
        texts_to_encode, their_ranges = [texts[number] for number in others], [ranges[number] for number in others]
        encoded = self._rendered_texts(texts_to_encode, their_ranges if with_targets else None)
        rows |= dict(zip(others, encoded, strict=True))
        for number, dialogue in enumerate(dialogues):
            if not rows[number][0]:
                raise ValueError(f"{dialogue.place}: the chat template gives a text without tokens")
        return [(text, *rows[number]) for number, text in enumerate(texts)]

    def _spelled(
        self, rendered: str, contents: list[str], replies: list[tuple[int, int]], with_targets: bool
    ) -> tuple[list[int], np.ndarray]:
        """Encode a dialogue in which a message spells a control token.

        Args:
            rendered: output of the chat template, with placeholders for the messages.
            contents: texts of all messages.
            replies: ranges of characters of ``rendered`` that the model writes.
            with_targets: whether the loss counts replies only; otherwise it counts all tokens.

        Returns:
            Token indices, and the mask of the tokens that the loss counts, ``[n]`` bool.
        """
        if with_targets:
            return self._template.encode_with_replies(rendered, contents, replies)
        ids = self._template.encode(rendered, contents)
        return ids, np.ones(len(ids), dtype=bool)

    def _rendered_texts(
        self, texts: list[str], ranges: list[list[tuple[int, int]]] | None
    ) -> list[tuple[list[int], np.ndarray]]:
        """Return the token indices of each output of the chat template, and the mask of the tokens that the loss counts.

        Args:
            texts: outputs of the template.
            ranges: for each text, the ranges of characters whose tokens the loss counts; None if it counts all tokens.
        """
        if ranges is None:
            rows = encode_texts(self.tokenizer, texts, read_control_tokens=True)
            return [(ids, np.ones(len(ids), dtype=bool)) for ids in rows]
        encoded = encode_with_offsets(self.tokenizer, texts)
        return [
            (ids, tokens_of_characters(offsets, part)) for (ids, offsets), part in zip(encoded, ranges, strict=True)
        ]

    def _with_placeholders(self, roles: tuple[str, ...], with_targets: bool) -> tuple[str, list[tuple[int, int]]]:
        """Return the output of the template with placeholders, after checking that it has all messages.

        Args:
            roles: role of each message.
            with_targets: whether the ranges of the replies are needed.

        Returns:
            The output, and the ranges of its characters that the model writes; no ranges if they are not needed.
        """
        if roles not in self._rendered:
            rendered = self._template.render(roles)
            for number, role in enumerate(roles):
                if placeholder(number) not in rendered:
                    raise ValueError(
                        f"the chat template leaves out message {number + 1} ({role}) of {len(roles)}; use a different "
                        "template, or remove such messages"
                    )
            self._rendered[roles] = rendered
        if with_targets and roles not in self._ranges:
            messages = [(role, placeholder(number)) for number, role in enumerate(roles)]
            self._ranges[roles] = self._template.reply_ranges(messages, self._rendered[roles])
        return self._rendered[roles], self._ranges.get(roles, [])


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
        raise ValueError("the tokenizer has neither a bos nor an eos token, so documents could not be distinguished")
    return np.array([begin, *ids, *([] if end in (None, begin) else [end])], dtype=np.int64)
