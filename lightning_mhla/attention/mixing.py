"""Mixing coefficients as a module: initial values, bounds, and resizing to other block grids."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from mhla_kernels import ExponentialMixing, extend_mixing, resize_mixing
from mhla_kernels.mixing import MixingLike
from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla.attention.layout import BlockLayout

LOWER, UPPER = 1e-5, 1.0
"""Bounds of a coefficient; the paper's public code clips to them after each optimiser step."""

SLOWEST, FASTEST = 0.05, 2.5
"""Decays per block that exponential mixing starts with; 0.05, 0.2, 0.7 and 2.5 for four terms."""

LARGEST_DECAY = 20.0
"""Decay at which the next block weighs 2e-9: as good as nothing."""

MixingInit = Literal["locality", "uniform"]


def bounded(values: Tensor, low: float = LOWER, high: float = UPPER) -> Tensor:
    """Values between ``low`` and ``high``, whatever an optimiser, an average or a checkpoint made of the parameter.

    Values inside stay as they are; those outside are reflected at the bounds. An optimiser that carries a coefficient past
    its bound so meets the same coefficient on the way back, with a gradient of the opposite sign. ``torch.clamp`` has no
    gradient outside, so a coefficient would be lost there; a rule that looks at the sign of the gradient would not give the
    same step for the sum of the gradients of several batches or processes.
    """
    width = high - low
    beyond = (values - low).remainder(2 * width)
    reflected = low + torch.where(beyond > width, 2 * width - beyond, beyond)
    return torch.where((values >= low) & (values <= high), values, reflected)


def locality_mixing(layout: BlockLayout, causal: bool = False) -> Tensor:
    """Locality-biased start: ``1 - dist(i, j) / max_k dist(i, k)``, rows summing to 1 (MHLA paper, section 3).

    Distances are Euclidean, between block centres on the block grid. Causal: ``1 - dist / M`` on the lower triangle, so
    that no visible block starts at zero. A block of prefix tokens is near to every block, and weighs all alike.

    Returns:
        ``[M, M]`` float32.
    """
    centers = layout.centers
    distance = torch.cdist(centers, centers)
    farthest = distance.amax(-1, keepdim=True) if not causal else torch.full((1, 1), float(len(centers)), device="cpu")
    weight = 1 - torch.where(farthest > 0, distance / farthest, 0)
    if layout.prefix_tokens:
        weight = nn.functional.pad(weight, (1, 0, 1, 0), value=1.0)
    if causal:
        weight = weight.tril()
    return (weight / weight.sum(-1, keepdim=True)).float()


def uniform_mixing(layout: BlockLayout, causal: bool = False) -> Tensor:
    """Equal weight on every visible block: ``1 / M``, causal ``1 / (i + 1)``; ``[M, M]`` float32."""
    weight = torch.ones(layout.num_blocks, layout.num_blocks, device="cpu")
    if causal:
        weight = weight.tril()
    return weight / weight.sum(-1, keepdim=True)


def _check_init(init: str) -> None:
    if init not in ("locality", "uniform"):
        raise ValueError(f"mixing_init={init!r} is not one of 'locality', 'uniform'")


class MixingCoefficients(nn.Module):
    """Mixing coefficients of one layer, float32 whatever the precision of the model; the base of both kinds.

    The operator needs coefficients that are not negative. :meth:`forward` and :meth:`matrix` return :func:`bounded` values,
    so that the parameters themselves may be trained, averaged and loaded by anything.
    """

    @override
    def extra_repr(self) -> str:
        return ", ".join(f"{name}={list(values.shape)}" for name, values in self.named_parameters())

    def forward(self, block_grid: tuple[int, ...] | None = None) -> MixingLike:
        """Coefficients as the operator takes them for ``mixing``.

        Args:
            block_grid: blocks along each axis of the tokens at hand, where they may differ from those that were learned.
        """
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draw new values: for a module that was made on the meta device and has memory without content."""
        raise NotImplementedError

    def resize(self, block_grid: tuple[int, ...]) -> None:
        """Carry what is learned to other blocks along each axis, for good."""
        raise NotImplementedError

    def matrix(self) -> Tensor:
        """``[M, M]`` or ``[H, M, M]``, for analysis."""
        raise NotImplementedError

    def bring_inside_(self) -> None:
        """Give the parameters their bounded values, which changes no result: for weights that others will read."""
        raise NotImplementedError

    def extend(self, blocks: int) -> None:
        """Reach to ``blocks`` blocks of a causal sequence; known coefficients stay as they are."""
        raise NotImplementedError

    def carried(self, name: str, values: Tensor, block_grid: tuple[int, ...] | None) -> Tensor | None:
        """A parameter of other coefficients fitted to these blocks and heads.

        Args:
            name: name of the parameter.
            values: its values there.
            block_grid: blocks along each axis there; None where that is not known, or for a sequence.

        Returns:
            Values of this parameter's shape, or None where they cannot be carried over.
        """
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MixingCoefficients:
        def keep_dtype(x: Tensor) -> Tensor:
            moved = fn(x)
            return moved if moved.dtype == x.dtype else x.to(moved.device)

        super()._apply(keep_dtype, recurse)
        return self


class DenseCoefficients(MixingCoefficients):
    """One free coefficient for each pair of blocks.

    Args:
        layout: the blocks.
        heads: a matrix for each of so many heads; None shares one among all.
        init: ``"locality"`` (:func:`locality_mixing`) or ``"uniform"`` (:func:`uniform_mixing`).
        causal: whether blocks see earlier blocks only.
        trainable: False keeps the coefficients as they start.
    """

    def __init__(
        self,
        layout: BlockLayout,
        heads: int | None = None,
        init: MixingInit = "locality",
        causal: bool = False,
        trainable: bool = True,
    ) -> None:
        super().__init__()
        _check_init(init)
        start = (locality_mixing if init == "locality" else uniform_mixing)(layout, causal)
        self._start = start.clamp(LOWER, UPPER)
        own = self._start.to(torch.get_default_device(), copy=True)
        self.weight = nn.Parameter(own if heads is None else own.repeat(heads, 1, 1), requires_grad=trainable)
        self.grid, self.prefix_tokens, self.causal = layout.block_grid, layout.prefix_tokens, causal
        self.cut = layout.block_size is not None

    @torch.no_grad()
    @override
    def reset_parameters(self) -> None:
        self.weight.copy_(self._start)

    def forward(self, block_grid: tuple[int, ...] | None = None) -> Tensor:
        """``[M, M]`` or ``[H, M, M]``.

        Over other blocks than those learned: of a sequence with ``block_size``, the first ones, as if padding followed; of a
        grid, see :func:`mhla_kernels.resize_mixing`.
        """
        if block_grid in (None, self.grid):
            return bounded(self.weight)
        assert block_grid is not None
        if not self.cut:
            return self._resized(block_grid)
        (blocks,), (known,) = block_grid, self.grid
        if blocks > known:
            raise ValueError(
                f"{blocks} blocks are more than the {known} that dense coefficients were made for; mixing: exponential takes "
                "any number"
            )
        return bounded(self.weight)[..., :blocks, :blocks]

    @override
    def resize(self, block_grid: tuple[int, ...]) -> None:
        self._start = self._resized(block_grid).detach()
        self.weight = nn.Parameter(self._start.clone(), self.weight.requires_grad)
        self.grid = tuple(block_grid)

    def _resized(self, block_grid: tuple[int, ...]) -> Tensor:
        if self.prefix_tokens:
            raise ValueError(
                "coefficients of blocks with prefix tokens, which have no position on the grid, keep their size"
            )
        return resize_mixing(bounded(self.weight), self.grid, block_grid)

    @override
    def carried(self, name: str, values: Tensor, block_grid: tuple[int, ...] | None) -> Tensor | None:
        """Carry causal coefficients over by :func:`mhla_kernels.extend_mixing`, or cut them."""
        if values.dim() not in (2, 3) or values.shape[-1] != values.shape[-2] or self.prefix_tokens:
            return None
        values, blocks = bounded(values), math.prod(self.grid)
        if self.causal or len(self.grid) == 1:
            resized = (
                extend_mixing(values, blocks) if self.causal else resize_mixing(values, values.shape[-1:], self.grid)
            )
        else:
            side = math.isqrt(values.shape[-1])
            old = (
                block_grid if block_grid is not None and len(block_grid) == len(self.grid) else (side,) * len(self.grid)
            )
            if math.prod(old) != values.shape[-1]:
                return None
            resized = resize_mixing(values, old, self.grid)
        return _for_heads(resized, self.weight)

    @override
    def matrix(self) -> Tensor:
        return bounded(self.weight)

    @torch.no_grad()
    @override
    def bring_inside_(self) -> None:
        self.weight.copy_(bounded(self.weight))

    def extend(self, blocks: int) -> None:
        """See :class:`MixingCoefficients` and :func:`mhla_kernels.extend_mixing`."""
        if blocks > self.weight.shape[-1]:
            self._start = extend_mixing(bounded(self.weight.detach()), blocks)
            self.weight = nn.Parameter(self._start.clone(), self.weight.requires_grad)


class ExponentialCoefficients(MixingCoefficients):
    """A sum of exponentials of the distance of blocks: cost linear in their number, and sequences of any length.

    Args:
        layout: the blocks; without prefix tokens, which have no position on the grid.
        terms: number of exponentials, R.
        heads: a sum for each of so many heads; None shares one among all.
        init: ``"locality"``, decays from :data:`SLOWEST` to :data:`FASTEST` per block, evenly on a logarithmic scale; or
            ``"uniform"``, all of them next to 0, so that every block weighs about the same.
        causal: whether blocks see earlier blocks only; the coefficients are then not tied to the layout's length.
        trainable: False keeps the coefficients as they start.

    Raises:
        ValueError: for a layout with prefix tokens, an unknown ``init``, or a number of terms below 1.
    """

    def __init__(
        self,
        layout: BlockLayout,
        terms: int = 4,
        heads: int | None = None,
        init: MixingInit = "locality",
        causal: bool = False,
        trainable: bool = True,
    ) -> None:
        super().__init__()
        _check_init(init)
        if terms < 1:
            raise ValueError(f"mixing_terms={terms} must be positive")
        if layout.prefix_tokens:
            raise ValueError(
                f"exponential mixing has no position for the {layout.prefix_tokens} prefix tokens; use dense"
            )
        self.grid = None if causal or len(layout.grid) == 1 else layout.block_grid
        self.blocks = layout.num_blocks
        cpu = torch.device("cpu")
        rate = torch.tensor([SLOWEST], device=cpu)
        if terms > 1:
            rate = torch.logspace(math.log10(SLOWEST), math.log10(FASTEST), terms, device=cpu)
        if init == "uniform":
            rate = torch.full((terms,), LOWER, device=cpu)
        amplitude = torch.full((terms,), 1 / terms, device=cpu)
        if self.grid is not None:
            rate = rate[:, None].repeat(1, len(self.grid))
        if heads is not None:
            amplitude, rate = amplitude.repeat(heads, 1), rate.repeat(heads, *(1,) * rate.dim())
        self._start = {"amplitude": amplitude, "decay": rate}
        device = torch.get_default_device()
        self.amplitude = nn.Parameter(amplitude.to(device, copy=True), requires_grad=trainable)
        self.decay = nn.Parameter(rate.to(device, copy=True), requires_grad=trainable)

    @torch.no_grad()
    @override
    def reset_parameters(self) -> None:
        for name, values in self._start.items():
            getattr(self, name).copy_(values)

    @override
    def forward(self, block_grid: tuple[int, ...] | None = None) -> ExponentialMixing:
        """Build the mixing; over other blocks, decays stay the same over a whole axis."""
        amplitude = bounded(self.amplitude)
        if self.grid is None or block_grid in (None, self.grid):
            return ExponentialMixing(amplitude, bounded(self.decay, high=LARGEST_DECAY), self.grid)
        assert block_grid is not None
        return ExponentialMixing(amplitude, self._rescaled(block_grid), block_grid)

    @override
    def resize(self, block_grid: tuple[int, ...]) -> None:
        with torch.no_grad():
            self.decay.copy_(self._rescaled(block_grid))
        self.grid = None if self.grid is None else tuple(block_grid)
        self.blocks = math.prod(block_grid)

    @override
    def carried(self, name: str, values: Tensor, block_grid: tuple[int, ...] | None) -> Tensor | None:
        """Carry the decays to other blocks: they stay the same over a whole axis."""
        own, high = (self.amplitude, UPPER) if name == "amplitude" else (self.decay, LARGEST_DECAY)
        values = bounded(values, high=high)
        axes = own.dim() - self.amplitude.dim()
        if values.shape[values.dim() - 1 - axes] != own.shape[own.dim() - 1 - axes]:
            return None
        if name == "decay" and self.grid is not None and block_grid is not None and len(block_grid) == len(self.grid):
            values = values * values.new_tensor([a / b for a, b in zip(block_grid, self.grid, strict=True)])
        fitted = _for_heads(values, own)
        return fitted if fitted is not None and fitted.shape == own.shape else None

    def _rescaled(self, block_grid: tuple[int, ...]) -> Tensor:
        """Decays of a step between blocks that are larger or smaller than those learned."""
        old = (self.blocks,) if self.grid is None else self.grid
        scale = self.decay.new_tensor([before / after for before, after in zip(old, block_grid, strict=True)])
        return bounded(self.decay, high=LARGEST_DECAY) * (scale[0] if self.grid is None else scale)

    @override
    def matrix(self) -> Tensor:
        return self().dense(self.blocks)

    @torch.no_grad()
    @override
    def bring_inside_(self) -> None:
        self.amplitude.copy_(bounded(self.amplitude))
        self.decay.copy_(bounded(self.decay, high=LARGEST_DECAY))

    @override
    def extend(self, blocks: int) -> None:
        """Change the size of :meth:`matrix`, and nothing else."""
        self.blocks = blocks


def _for_heads(values: Tensor, own: Tensor) -> Tensor | None:
    """Coefficients shared by the heads for each of them, those of each head averaged for all; None for other numbers."""
    if values.dim() < own.dim():
        return values.expand(own.shape[0], *values.shape).clone()
    if values.dim() > own.dim():
        return values.mean(0)
    return values if values.dim() < 3 or len(values) == len(own) else None
