"""Encoding of documents as tokens, with an exact count of the bytes of their text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from mhla_tasks.language.chat_template import ChatTemplate, placeholder
from mhla_tasks.language.dialogues import Dialogue, Document
from mhla_tasks.language.encoding import control_tokens, encode_texts
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


class DocumentEncoder:
    """Callable that encodes documents.

    A text gets the special tokens that begin and end it. A dialogue gets the tokens of the chat template and no others, as with
    transformers' ``apply_chat_template``. If a message spells a control token, the template gets placeholders in place of the
    messages, so that the control token remains text.

    The missing bytes differ from 0 if the tokenizer changes a text before it splits it. A control token inside a document
    counts as many bytes as its spelling has, so it adds nothing to the difference.

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
        self._rendered: dict[tuple[str, ...], str] = {}  # outputs of the chat template with placeholders, by roles

    def __call__(self, documents: Sequence[Document]) -> EncodedDocuments:
        """Encode documents.

        Args:
            documents: texts and dialogues.

        Raises:
            ValueError: if the tokenizer has no special token that begins or ends a text, fails on a text, or has no chat
                template for a dialogue, or the template leaves out a message.
        """
        dialogues = [document for document in documents if isinstance(document, Dialogue)]
        plain = [document for document in documents if isinstance(document, str)]
        encoded_dialogues = iter(self._dialogues(dialogues))
        encoded_texts = zip(plain, encode_texts(self.tokenizer, plain, self.read_control_tokens), strict=True)
        rows, missing = [], []
        for document in documents:
            if isinstance(document, Dialogue):
                text, ids = next(encoded_dialogues)
                rows.append(np.array(ids, dtype=np.int64))
            else:
                text, ids = next(encoded_texts)
                rows.append(encode_document(ids, self.tokenizer))
            missing.append(len(text.encode()) - int(self.sizes[ids].sum()))
        starts = np.cumsum([0, *map(len, rows[:-1])], dtype=np.int64)
        return EncodedDocuments(np.concatenate(rows), starts, np.array(missing, dtype=np.int64))

    def one(self, document: Document) -> tuple[np.ndarray, int]:
        """Return the tokens of a single document, ``[n]`` int64, and its number of missing bytes."""
        tokens, _, missing = self([document])
        return tokens, int(missing[0])

    def _dialogues(self, dialogues: Sequence[Dialogue]) -> list[tuple[str, list[int]]]:
        """Return the text and the tokens of each dialogue."""
        if not dialogues:
            return []
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"{dialogues[0].place}: the text is a dialogue, and the tokenizer has no chat template; use the tokenizer of a "
                "chat model, or make one with lightning prepare tokenizer --chat"
            )
        texts, rows = [], {}
        for number, dialogue in enumerate(dialogues):
            contents = [content for _, content in dialogue.messages]
            try:
                rendered = self._with_placeholders(tuple(role for role, _ in dialogue.messages))
                if self._template.spelled(contents):
                    texts.append(self._template.fill(rendered, contents))
                    rows[number] = self._template.encode(rendered, contents)
                else:
                    texts.append(self._template.render_messages(dialogue.messages))
            except ValueError as error:
                raise ValueError(f"{dialogue.place}: {error}") from error
        others = [number for number in range(len(texts)) if number not in rows]
        encoded = encode_texts(self.tokenizer, [texts[number] for number in others], read_control_tokens=True)
        rows |= dict(zip(others, encoded, strict=True))
        for number, dialogue in enumerate(dialogues):
            if not rows[number]:
                raise ValueError(f"{dialogue.place}: the chat template gives a text without tokens")
        return [(text, rows[number]) for number, text in enumerate(texts)]

    def _with_placeholders(self, roles: tuple[str, ...]) -> str:
        """Return the output of the template with placeholders, after checking that it has all messages."""
        if roles not in self._rendered:
            rendered = self._template.render(roles)
            for number, role in enumerate(roles):
                if placeholder(number) not in rendered:
                    raise ValueError(
                        f"the chat template leaves out message {number + 1} ({role}) of {len(roles)}; use a different "
                        "template, or remove such messages"
                    )
            self._rendered[roles] = rendered
        return self._rendered[roles]


def encode_document(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Add the special tokens that begin and end a document to the tokens of its text.

    If the tokenizer has only one such token, it is added at the start only.

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
