"""Attention masks and positions of transformers: which tokens are padding, and where documents begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mhla_kernels.torch_private import assert_async
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from lightning_mhla.system.torch_private import is_fake

HIDDEN = -1000.0
"""Largest value of an additive mask that counts as hidden: exp(-1000) is 0."""


GIVEN = "given_mask"
"""Argument that hands an attention module the mask that the model was called with, as a tuple of one."""


def check_values(condition: Callable[[], Tensor], message: str) -> None:
    """Check what a mask holds: at once where it can be read, when the graph runs where it is traced.

    Args:
        condition: makes a boolean tensor that must be true everywhere.
        message: error message.

    Raises:
        ValueError: where the condition does not hold. Compiled and exported graphs raise RuntimeError.
    """
    holds = condition().all()
    if torch.compiler.is_compiling():
        assert_async(holds, message)
    elif not is_fake(holds) and not bool(holds):
        raise ValueError(message)


def real_of_decoder(
    attention_mask: Any, x: Tensor, cache: Any, given: tuple[Any] | None, position_ids: Tensor | None
) -> Tensor | None:
    """``[B, N]`` bool: which of these tokens of a decoder are real; None where all are.

    The mask that the model was called with, where it is known and has two dimensions, says it without a look at the mask for
    each pair of tokens that transformers makes of it. Without one, a graph always gets such a mask, in which packed
    documents, if there are any, are those of ``position_ids``.

    Args:
        attention_mask: as for :func:`documents`.
        x: ``[B, N, dim]``.
        cache: the state before these tokens, whose columns already count them; None without.
        given: tuple of the mask that the model was called with; None where that is not known.
        position_ids: ``[B, N]`` or ``[1, N]``; None where they are not known.

    Raises:
        ValueError: as :func:`key_mask`, and in a graph for packed documents.
    """
    if given is not None and isinstance(given[0], Tensor) and given[0].dim() == 2:
        return key_mask(given[0], x, cache)
    if given is not None and given[0] is None and torch.compiler.is_compiling():
        if attention_mask is None or cache is not None:
            return None
        if position_ids is not None:
            check_values(lambda: position_ids[:, 1:] == position_ids[:, :-1] + 1, PACKED)
            return None
    return key_mask(attention_mask, x, cache)


PACKED = (
    "position_ids begin again inside a row: a compiled or exported graph of swapped attention takes no packed documents; "
    "give them as rows with attention_mask, or run this model without torch.compile"
)


def documents(attention_mask: Any, x: Tensor, position_ids: Tensor | None = None) -> Tensor | None:
    """``cu_seqlens`` of documents packed in the one row; None where nothing is packed.

    As in transformers: a mask of ``[B, 1, N, N]`` keeps documents apart. Without a mask, flash attention begins a document at
    each smallest position.

    Args:
        attention_mask: ``[B, columns]``, or ``[B, 1, N, columns]`` as boolean or as what is added to scores; None for none.
        x: ``[B, N, dim]``.
        position_ids: ``[B, N]`` or ``[1, N]``, where they alone keep documents apart (flash attention); None where not.

    Raises:
        ValueError: for documents in one of several rows.
    """
    tokens = x.shape[1]
    if attention_mask is not None:
        starts = _starts_in(attention_mask, tokens)
    elif position_ids is None or tokens < 2 or x.shape[0] != 1 or _counts_up(position_ids):
        return None
    else:
        starts = position_ids[:, 1:] == position_ids.min()
    if starts is None or not bool(starts.any()):
        return None
    if x.shape[0] != 1:
        raise ValueError(f"documents packed in a row need a batch of one row, not {list(x.shape[:2])} tokens")
    (first,) = starts[0].nonzero(as_tuple=True)
    return F.pad(F.pad(first + 1, (1, 0)), (0, 1), value=tokens)


def _starts_in(attention_mask: Any, tokens: int) -> Tensor | None:
    """``[B, N - 1]`` bool: before which tokens a document ends, by a causal mask of documents; None for any other mask."""
    if isinstance(attention_mask, Tensor) and (attention_mask.dim() == 2 or _has_no_values(attention_mask)):
        return None
    visible = _visible(attention_mask)
    if visible.shape[-2:] != (tokens, tokens):
        return None
    starts = ~visible[:, 0].diagonal(-1, 1, 2)
    if not bool(starts.any()):
        return None
    document = F.pad(starts.cumsum(1), (1, 0))
    wanted = (document[:, :, None] == document[:, None]).tril()[:, None]
    return starts if bool((visible == wanted).all()) else None


_counting: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Positions by tensor: its version, and whether they count up; the layers of a model are all given the same one."""


def _counts_up(position_ids: Tensor) -> bool:
    """Whether each position follows the one before it; tensors without values are taken to."""
    if _has_no_values(position_ids):
        return True
    version = 0 if position_ids.is_inference() else position_ids._version
    known = _counting.get(position_ids)
    if known is None or known[0] != version:
        known = (version, bool((position_ids[:, 1:] == position_ids[:, :-1] + 1).all()))
        _counting[position_ids] = known
    return bool(known[1])


def own_keys(attention_mask: Any, x: Tensor) -> Tensor | None:
    """``[B, N]`` bool: which of these tokens the mask lets see themselves; None without a mask."""
    if attention_mask is None:
        return None
    tokens = x.shape[1]
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        return attention_mask[:, -tokens:].bool()
    return _visible(attention_mask).expand(-1, -1, tokens, -1)[:, 0, :, -tokens:].diagonal(dim1=1, dim2=2)


def _visible(attention_mask: Any) -> Tensor:
    """``[B, heads or 1, N, columns]`` bool."""
    if not isinstance(attention_mask, Tensor):
        raise ValueError(
            f"swapped attention does not know masks of {type(attention_mask).__name__}; set_attn_implementation of the "
            "model to sdpa or eager"
        )
    if attention_mask.dtype == torch.bool:
        return attention_mask
    visible = attention_mask == 0
    check_values(
        lambda: visible | (attention_mask <= HIDDEN),
        "the attention mask adds biases to the scores, which the new attention does not have",
    )
    return visible


def _has_no_values(x: Tensor) -> bool:
    """Whether the numbers of a tensor cannot be read now: while a graph is traced."""
    return torch.compiler.is_compiling() or is_fake(x)


def key_mask(attention_mask: Any, x: Tensor, cache: Any = None) -> Tensor | None:
    """``[B, N]`` bool: which of these tokens are real; None where all are.

    Args:
        attention_mask: as for :func:`documents`.
        x: ``[B, N, dim]``.
        cache: the state before these tokens, whose columns already count them.

    Raises:
        ValueError: for a mask that hides more than padding and later tokens, or tokens that the state holds.
    """
    if attention_mask is None:
        return None
    tokens = x.shape[1]
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        last = attention_mask.bool()
    else:
        visible = _visible(attention_mask)
        last = visible[:, 0, -1]
        position = torch.arange(visible.shape[-1], device=x.device)
        wanted = (last[:, None] & (position <= position[-tokens:, None]))[:, None]
        padding = ~last[:, None, -tokens:, None] & (visible.all(-1, keepdim=True) | ~visible.any(-1, keepdim=True))
        check_values(
            lambda: (visible == wanted) | padding,
            "the attention mask hides more than padding and later tokens, and swapped attention knows no other masks",
        )
    if cache is not None and cache.state is not None and last.shape[1] > tokens and not _has_no_values(last):
        seen = tuple(last[:, :-tokens].sum(1).tolist())
        if last.shape[1] == cache.columns and seen != tuple(cache.state.lengths):
            raise ValueError(
                f"the attention mask has {list(seen)} real tokens before these, but the state holds {cache.state.lengths}: "
                "tokens that were read cannot be hidden"
            )
    return last[:, -tokens:].expand(x.shape[0], -1)


def padding_mask(attention_mask: Any, x: Tensor) -> Tensor | None:
    """``[B, N]`` bool: which tokens of a text that an encoder reads are real; None where all are.

    Args:
        attention_mask: as for :func:`documents`.
        x: ``[B, N, dim]``.

    Raises:
        ValueError: for a mask that hides more than padding.
    """
    real = own_keys(attention_mask, x)
    if real is None or attention_mask.dim() == 2:
        return real
    visible = _visible(attention_mask)
    check_values(
        lambda: (visible == real[:, None, None]) | ~real[:, None, :, None],
        "the attention mask hides more than padding, and the new attention of an encoder knows no other",
    )
    return real.expand(x.shape[0], -1)


def check_nothing_hidden(attention_mask: Any) -> None:
    """Check that a mask of an image encoder hides no patch.

    Raises:
        ValueError: for a mask that does, and one that is not a tensor.
    """
    if attention_mask is not None:
        visible = _visible(attention_mask)
        check_values(lambda: visible, "the attention mask hides patches, and the new attention sees whole images")
