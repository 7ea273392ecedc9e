"""Putting the kernels together: a forward and a backward pass of either form, on plain tensors.

A buffer that a kernel fills whole is allocated empty; those that it adds to, or fills in part, are zeroed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from mhla_kernels.triton_backend import attend, mix, pairs, scan, summaries
from mhla_kernels.triton_backend.config import (
    HOPPER,
    PIECE,
    SPLIT,
    Tiles,
    attend_tiles,
    mix_tiles,
    pair_tiles,
    power_of_two,
    register_limit,
    scan_tiles,
    summary_tiles,
)
from mhla_kernels.triton_backend.tables import ROW, START, Layout, make_layout

TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@lru_cache
def chip_of(device: torch.device) -> int:
    """Compute capability times ten; the interpreter passes for a Hopper."""
    if device.type != "cuda":
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@dataclass(frozen=True)
class Call:
    """One call of the operator, checked.

    Attributes:
        q: ``[B, N, H, K]``, any strides, like all token tensors.
        k: ``[B, N, H, K]``.
        v: ``[B, N, H, V]``.
        mixing: ``[1, M, M]`` or ``[H, M, M]`` float32, or amplitudes ``[1, R]`` or ``[H, R]`` of exponential mixing
            (chunked, causal); a scale is multiplied into it.
        decay: decays of exponential mixing, of the shape of the amplitudes; else None.
        layout: the blocks.
        token_row: ``[N]`` int32, the row of each token's block in ``mixing``; parallel form.
        bounds: packed sequences, ``[S + 1]`` on the device.
        key_mask: ``[B, N]`` bool.
        causal: see :func:`mhla_kernels.mhla_attention`.
        normalize: likewise.
        relu: likewise, feature map.
        eps: likewise.
        form: parallel or chunked.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mixing: Tensor
    decay: Tensor | None
    layout: Layout
    token_row: Tensor | None
    bounds: Tensor | None
    key_mask: Tensor | None
    causal: bool
    normalize: bool
    relu: bool
    eps: float
    form: str

    @property
    def rows(self) -> int:
        """B * H, a part of the first dimension of every grid."""
        return self.q.shape[0] * self.q.shape[2]

    @property
    def chip(self) -> int:
        """Compute capability times ten."""
        return chip_of(self.q.device)

    def schedule(self, tiles: Tiles) -> dict[str, int]:
        """Launch options."""
        return {"num_warps": tiles.warps, "num_stages": tiles.stages, **register_limit(self.chip, tiles.warps)}

    @property
    def key_width(self) -> int:
        """K."""
        return self.q.shape[-1]

    @property
    def value_width(self) -> int:
        """V."""
        return self.v.shape[-1]

    @property
    def summary_width(self) -> int:
        """Numbers in a summary with its normaliser."""
        return self.key_width * (self.value_width + 1)

    @cached_property
    def pieces(self) -> tuple[int, int]:
        """Pieces of a block, and tokens in one."""
        longest = PIECE if self.causal else SPLIT
        pieces = -(-self.layout.largest // longest)
        return pieces, -(-self.layout.largest // pieces)

    @cached_property
    def mask_bytes(self) -> Tensor:
        """The key mask, or anything where there is none."""
        return self.q if self.key_mask is None else self.key_mask.contiguous().view(torch.uint8)

    def summarize(
        self,
        key: Tensor,
        value: Tensor,
        weights: tuple[Tensor, Tensor] | None = None,
        reverse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Summaries of the blocks ``[B * H, M, K * V + K]`` float32, and of earlier pieces of the same block, if any.

        ``weights``: of each token in S and in z, ``[B * H, N]``. ``reverse`` asks for later pieces.
        """
        pieces, piece_size = self.pieces
        blocks, width = self.layout.blocks, self.summary_width
        weighted = weights is not None
        value_weight, normalizer_weight = weights or (self.q, self.q)
        tiles = summary_tiles(self.q.dtype, self.key_width, self.value_width)
        parts = triton.cdiv(self.key_width, tiles.keys) * triton.cdiv(self.value_width, tiles.values)
        summary = self.q.new_empty(self.rows, blocks * pieces, width, dtype=torch.float32)
        aligned = _alignment(key, value)
        summaries.summaries_kernel[(self.rows * blocks * pieces, parts)](
            key, value, self.mask_bytes, value_weight, normalizer_weight, summary, self.layout.table,
            *_strides(aligned, key, value), self.layout.tokens, blocks, self.q.shape[2], pieces, piece_size,
            KEY_WIDTH=self.key_width, VALUE_WIDTH=self.value_width, HAS_MASK=self.key_mask is not None, RELU=self.relu,
            WEIGHTED=weighted, NORMALIZE=self.normalize, TOKENS=tiles.tokens, KEYS=tiles.keys, VALUES=tiles.values,
            ALIGNED=aligned, **self.schedule(tiles),
        )  # fmt: skip
        if pieces == 1:
            return summary, None
        total = self.q.new_empty(self.rows, blocks, width, dtype=torch.float32)
        columns = 1024
        summaries.running_kernel[(self.rows * blocks, triton.cdiv(width, columns))](
            summary, total, blocks, pieces, REVERSE=reverse, WIDTH=width, COLUMNS=columns, num_warps=4
        )
        return total, summary if self.causal else None

    @cached_property
    def pair_mixing(self) -> tuple[Tensor, int, int, int]:
        """Coefficients by query block and key block, with strides; exponential: m[i, i], whatever the block."""
        if self.decay is None:
            return self.mixing, *_mixing_strides(self.mixing)
        own = self.mixing.sum(-1)
        return own, int(len(own) > 1), 0, 0

    def mix(self, summary: Tensor, transposed: bool = False) -> Tensor:
        """Mixed summaries, of the shape of ``summary``."""
        mixed = torch.empty_like(summary)
        _, blocks, width = summary.shape
        if self.decay is not None:
            return self._scan(summary, mixed, reverse=transposed)
        tiles = mix_tiles(self.q.dtype, blocks)
        mix.mix_kernel[(self.rows * triton.cdiv(blocks, tiles.rows), triton.cdiv(width, tiles.columns))](
            self.mixing, summary, mixed, self.layout.table, *_mixing_strides(self.mixing), blocks, self.q.shape[2],
            INPUT=TL_DTYPES[self.q.dtype], CAUSAL=self.causal, TRANSPOSED=transposed, WIDTH=width, ROWS=tiles.rows,
            TERMS=tiles.terms, COLUMNS=tiles.columns, **self.schedule(tiles),
        )  # fmt: skip
        return mixed

    def _scan(self, summary: Tensor, mixed: Tensor, reverse: bool) -> Tensor:
        assert self.decay is not None
        (_, blocks, width), terms = summary.shape, self.mixing.shape[-1]
        tiles = scan_tiles(terms)
        scan.scan_kernel[(self.rows * triton.cdiv(width, tiles.columns),)](
            self.mixing, self.decay, summary, mixed, self.layout.table, self.stride_of_terms, blocks, self.q.shape[2],
            REVERSE=reverse, WIDTH=width, COLUMNS=tiles.columns, TERMS=terms, TERMS_PADDED=tiles.terms,
            **self.schedule(tiles),
        )  # fmt: skip
        return mixed

    @property
    def stride_of_terms(self) -> int:
        """From head to head in the amplitudes and decays of exponential mixing."""
        return self.mixing.shape[-1] if self.mixing.shape[0] > 1 else 0

    def scan_gradient(self, gradient: Tensor, summary: Tensor) -> tuple[Tensor, Tensor]:
        """``[B * H, R]`` gradients of amplitude and decay of exponential mixing, but for m[i, i]."""
        assert self.decay is not None
        _, blocks, width = summary.shape
        tiles = scan_tiles(self.mixing.shape[-1])
        parts = triton.cdiv(width, tiles.columns)
        shape = (self.rows, parts, self.mixing.shape[-1])
        shares = [gradient.new_empty(shape), gradient.new_empty(shape)]
        scan.scan_gradient_kernel[(self.rows * parts,)](
            self.mixing, self.decay, gradient, summary, *shares, self.layout.table, self.stride_of_terms,
            blocks, self.q.shape[2], WIDTH=width, COLUMNS=tiles.columns, TERMS=shape[-1], TERMS_PADDED=tiles.terms,
            **self.schedule(tiles),
        )  # fmt: skip
        return shares[0].sum(1), shares[1].sum(1)

    def mixing_gradient(self, gradient: Tensor, summary: Tensor) -> Tensor:
        """``[B * H, M, M]`` gradient of the coefficients between different blocks (all blocks, bidirectional)."""
        size = self.mixing.shape[-1]
        _, blocks, width = summary.shape
        tiles = mix_tiles(self.q.dtype, size)
        out = self.q.new_empty(self.rows, size, size, dtype=torch.float32)
        parts = triton.cdiv(size, tiles.rows)
        mix.mixing_gradient_kernel[(self.rows * parts, parts)](
            gradient, summary, out, self.layout.sequences, blocks, self.layout.sequences.shape[1], size,
            INPUT=TL_DTYPES[self.q.dtype], CAUSAL=self.causal, WIDTH=width, ROWS=tiles.rows, COLUMNS=64,
            **self.schedule(tiles),
        )  # fmt: skip
        return out

    def attend(
        self,
        mode: int,
        operands: tuple[Tensor, Tensor, Tensor],
        own: Tensor,
        mixed: Tensor | None,
        running: Tensor | None,
        weights: tuple[Tensor, Tensor] | None,
        own_gradient: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the attend kernel; ``operands`` are x, y, a of its table; chunked if there are ``mixed`` summaries.

        Gives the result, and in mode DK, if asked, the gradient of m[i, i] of every block ``[B * H, blocks]``.
        """
        x, y, a = operands
        out_like = self.v if mode in (attend.OUT.value, attend.DV.value) else self.q
        out = torch.empty(out_like.shape, dtype=out_like.dtype, device=out_like.device)
        chunked = mixed is not None
        whole = mode == attend.DQ.value and self.normalize
        tiles = attend_tiles(x.dtype, x.shape[-1], out.shape[-1], whole, not chunked, self.chip)
        parts = triton.cdiv(out.shape[-1], tiles.outputs)
        (pieces, piece_size), in_piece, span = self.pieces, 1, 1
        if chunked:
            table, in_piece = self.layout.table, triton.cdiv(piece_size, tiles.rows)
            count = self.layout.blocks * pieces * in_piece
        else:
            table, count = self.tile_table(tiles.rows)
            span = power_of_two(self.layout.span(tiles.columns))
        gradient = x.new_zeros(self.rows, count, parts, dtype=torch.float32) if own_gradient else None
        inverse, normalizer_gradient = weights or (x, x)
        aligned = _alignment(x, y, a, own, out)
        attend.attend_kernel[(self.rows * count, parts)](
            x, y, a, own, out, self.mask_bytes, inverse, normalizer_gradient,
            x if mixed is None else mixed, x if running is None else running, self.pair_mixing[0],
            x if gradient is None else gradient, table, table if self.token_row is None else self.token_row,
            *_strides(aligned, x, y, a, own, out), *self.pair_mixing[1:],
            self.layout.tokens, table.shape[1], self.q.shape[2], count, pieces, piece_size, in_piece,
            self.mixing.shape[-1], self.eps, MODE=mode, SUMMARY=chunked, PACKED=self.layout.packed,
            RUNNING=running is not None, CAUSAL=self.causal, NORMALIZE=self.normalize,
            RELU=self.relu, HAS_MASK=self.key_mask is not None, OWN_GRADIENT=own_gradient,
            X_WIDTH=x.shape[-1], OUT_WIDTH=out.shape[-1], ROWS=tiles.rows, COLUMNS=tiles.columns, SLICE=tiles.slice,
            OUTPUTS=tiles.outputs, SPAN=span, ALIGNED=aligned, **self.schedule(tiles),
        )  # fmt: skip
        if gradient is None:
            return out, None
        return out, gradient.view(self.rows, self.layout.blocks, -1).sum(-1)

    def tile_table(self, rows: int) -> tuple[Tensor, int]:
        """Tiles of ``rows`` tokens from the start of each sequence: their table (packed), anything (else); their number."""
        if self.bounds is None:
            return self.layout.table, triton.cdiv(self.layout.tokens, rows)
        table = make_layout(self.layout.tokens, self.q.device, rows, None, self.bounds).table
        return table, table.shape[1]

    def pair_gradient(self, gradient: Tensor, weights: tuple[Tensor, Tensor] | None) -> Tensor:
        """``[B * H, M, M]`` gradient of mixing in the parallel form."""
        q, k, v = self.q, self.k, self.v
        tiles = pair_tiles(q.dtype)
        (table, count), size = self.tile_table(tiles.rows), self.mixing.shape[-1]
        span = power_of_two(self.layout.span(tiles.rows))
        inverse, normalizer_gradient = weights or (q, q)
        assert self.token_row is not None
        out = q.new_zeros(self.rows, count, size, span, dtype=torch.float32)
        aligned = _alignment(q, k, v, gradient)
        pairs.pair_gradient_kernel[(self.rows * count,)](
            q, k, v, gradient, self.mask_bytes, inverse, normalizer_gradient, out, table, self.token_row,
            *_strides(aligned, q, k, v, gradient), self.layout.tokens, table.shape[1],
            q.shape[2], count, size, PACKED=self.layout.packed, CAUSAL=self.causal, NORMALIZE=self.normalize,
            RELU=self.relu, HAS_MASK=self.key_mask is not None, KEY_WIDTH=self.key_width, VALUE_WIDTH=self.value_width,
            ROWS=tiles.rows, COLUMNS=tiles.columns, SLICE=tiles.slice, SPAN=span,
            ALIGNED=aligned, **self.schedule(tiles),
        )  # fmt: skip
        starts = table[START].long() if self.layout.packed else torch.arange(count, device=q.device) * tiles.rows
        block = (self.token_row[starts][:, None] + torch.arange(span, device=q.device)).flatten()
        by_block = out.permute(0, 2, 1, 3).reshape(self.rows * size, -1)
        return _sum_at(by_block, block, size).reshape(self.rows, size, size)


def _sum_at(values: Tensor, index: Tensor, size: int) -> Tensor:
    """``[R, size]`` sums of the columns of ``values`` ``[R, n]`` by ``index``, in a fixed order; beyond ``size`` are zeros."""
    out = values.new_zeros(size + 1, values.shape[0])
    out.index_put_((index.long().clamp(max=size),), values.T, accumulate=True)
    return out[:size].T


def _alignment(*tensors: Tensor) -> int:
    """Numbers that every row of every head starts at a multiple of, at most 8: what a 16-byte load of bfloat16 wants."""
    return gcd(8, *(stride for x in tensors for stride in x.stride()[:3]))


def _strides(aligned: int, *tensors: Tensor) -> list[int]:
    """Strides of each tensor, the first three in units of ``aligned`` numbers, so that the compiler knows of it."""
    return [stride for x in tensors for stride in (*(each // aligned for each in x.stride()[:3]), x.stride(3))]


def _mixing_strides(mixing: Tensor) -> tuple[int, int, int]:
    h, i, j = mixing.stride()
    return 0 if mixing.shape[0] == 1 else h, i, j


def forward(call: Call) -> Tensor:
    """Outputs ``[B, N, H, V]``."""
    mixed = running = None
    if call.form == "chunked":
        summary, running = call.summarize(call.k, call.v)
        mixed = call.mix(summary)
    return call.attend(attend.OUT.value, (call.q, call.k, call.v), call.q, mixed, running, None)[0]


def backward(
    call: Call, gradient: Tensor, with_mixing: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, mixing and decay; summaries are computed anew, not kept by the forward pass."""
    q, k, v = call.q, call.k, call.v
    chunked = call.form == "chunked"
    gradient = gradient.to(q.dtype)
    summary = running = mixed = later = d_mixed = None
    if chunked:
        summary, running = call.summarize(k, v)
        mixed = call.mix(summary)
    weights = None
    if call.normalize:
        shape = (call.rows, call.layout.tokens)
        weights = q.new_empty(shape, dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)
    dq, _ = call.attend(attend.DQ.value, (gradient, v, k), q, mixed, running, weights)
    if chunked:
        d_mixed, later = call.summarize(q, gradient, weights, reverse=True)
        mixed = call.mix(d_mixed, transposed=True)
    dv, _ = call.attend(attend.DV.value, (k, q, gradient), k, mixed, later, weights)
    wants_own = with_mixing and chunked and call.causal
    dk, own = call.attend(attend.DK.value, (v, gradient, q), k, mixed, later, weights, wants_own)
    if not with_mixing:
        return dq, dk, dv, None, None
    if d_mixed is None or summary is None:
        return dq, dk, dv, _reduce(call.pair_gradient(gradient, weights), call), None
    if call.decay is not None:
        assert own is not None
        d_amplitude, d_decay = call.scan_gradient(d_mixed, summary)
        return dq, dk, dv, _reduce(d_amplitude + own.sum(-1, keepdim=True), call), _reduce(d_decay, call)
    d_mixing = call.mixing_gradient(d_mixed, summary)
    if own is not None:
        d_mixing = d_mixing + torch.diag_embed(_sum_at(own, call.layout.table[ROW], d_mixing.shape[-1]))
    return dq, dk, dv, _reduce(d_mixing, call), None


def _reduce(gradient: Tensor, call: Call) -> Tensor:
    """``[B * H, ...]`` summed over the batch, and over the heads where they share coefficients."""
    gradient = gradient.unflatten(0, (-1, call.q.shape[2])).sum(0)
    return gradient.sum(0, keepdim=True) if call.mixing.shape[0] == 1 else gradient
