"""Modules for the mixing coefficients of MHLA, with initial values, bounds, and resizing to a different number of blocks."""

# Longer than other modules because it contains both parametrizations, dense and exponential, which share bounds and resizing.

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from mhla_kernels import ExponentialMixing, extend_mixing, resize_mixing
from mhla_kernels.mixing import MixingLike
from torch import Tensor, nn
from typing_extensions import override

from lightning_mhla.attention.config import MixingInit
from lightning_mhla.attention.layout import BlockLayout

LOWER, UPPER = 1e-5, 1.0
"""Bounds of a mixing coefficient. The public code of MHLA clips coefficients to this range after each optimizer step."""

SLOWEST, FASTEST = 0.05, 2.5
"""Smallest and largest initial decay per block of exponential mixing. Four terms start at 0.05, 0.18, 0.68 and 2.5."""

LARGEST_DECAY = 20.0
"""Largest decay per block of exponential mixing. At this decay, the next block has weight 2e-9."""


def bounded(values: Tensor, low: float = LOWER, high: float = UPPER) -> Tensor:
    """Map values of any size into the range from ``low`` to ``high`` by reflection at the bounds.

    Values inside the range do not change. If an optimizer step moves a parameter past a bound, the reflected value is inside
    the range, and its gradient has the opposite sign, so that later steps lead back. Two alternatives are worse. With
    ``torch.clamp``, the gradient outside the range is zero, so a parameter would stay there. A rule that depends on the sign of
    the gradient is not linear, so its result would depend on how the gradient is summed over batches or processes.

    Args:
        values: floating-point tensor of any shape.
        low: lower bound.
        high: upper bound.

    Returns:
        Values within the bounds, in the shape of ``values``.
    """
    width = high - low
    beyond = (values - low).remainder(2 * width)
    reflected = low + torch.where(beyond > width, 2 * width - beyond, beyond)
    # `remainder` rounds, and values inside the range must not change by a bit.
    return torch.where((values >= low) & (values <= high), values, reflected)


def locality_mixing(layout: BlockLayout, causal: bool = False) -> Tensor:
    """Compute initial mixing coefficients that decrease with the distance between blocks (arXiv 2601.07832, section 3).

    Row i contains the coefficients with which block i weights the key-value summaries of blocks j. They are proportional to
    ``1 - dist(i, j) / max_k dist(i, k)``, where ``dist`` is the Euclidean distance on the block grid. For causal attention,
    they are proportional to ``1 - dist(i, j) / M`` for ``j <= i``, so that all visible blocks start above zero. Prefix tokens,
    such as a class token, form a block with distance 0 to all blocks. Each row sums to 1.

    Args:
        layout: token grid and its partition into M blocks.
        causal: whether blocks read only themselves and earlier blocks.

    Returns:
        ``[M, M]`` float32 on the CPU.
    """
    centers = layout.centers
    distance = torch.cdist(centers, centers)
    farthest = distance.amax(-1, keepdim=True) if not causal else torch.full((1, 1), float(len(centers)), device="cpu")
    # A layout of one block has distance 0 / 0.
    weight = 1 - torch.where(farthest > 0, distance / farthest, 0)
    if layout.prefix_tokens:
        weight = nn.functional.pad(weight, (1, 0, 1, 0), value=1.0)
    if causal:
        weight = weight.tril()
    return (weight / weight.sum(-1, keepdim=True)).float()


def uniform_mixing(layout: BlockLayout, causal: bool = False) -> Tensor:
    """Compute initial mixing coefficients that weight all visible blocks equally.

    Args:
        layout: token grid and its partition into M blocks.
        causal: whether blocks read only themselves and earlier blocks.

    Returns:
        ``[M, M]`` float32 on the CPU. Without ``causal``, each entry is ``1 / M``. With ``causal``, the entries of row i are
        ``1 / (i + 1)`` up to the diagonal and 0 after it.
    """
    weight = torch.ones(layout.num_blocks, layout.num_blocks, device="cpu")
    if causal:
        weight = weight.tril()
    return weight / weight.sum(-1, keepdim=True)


def check_init(init: str) -> None:
    """Raise ValueError unless ``init`` names an initialization of mixing coefficients: ``"locality"`` or ``"uniform"``."""
    if init not in ("locality", "uniform"):
        raise ValueError(f"mixing_init={init!r} is not one of 'locality', 'uniform'")


class MixingCoefficients(nn.Module):
    """Base class of modules that hold the mixing coefficients of an attention layer.

    The coefficients are the weights with which the queries of each block combine the key-value summaries of blocks.

    Parameters stay in float32 regardless of the model's precision. Coefficients must not be negative. :meth:`forward` and
    :meth:`matrix` therefore reflect parameters outside the allowed range back into it (:func:`bounded`), so that an optimizer,
    a weight average or a checkpoint may set parameters to any value.
    """

    @override
    def extra_repr(self) -> str:
        return ", ".join(f"{name}={list(values.shape)}" for name, values in self.named_parameters())

    def forward(self, block_grid: tuple[int, ...] | None = None) -> MixingLike:
        """Return the coefficients as a tensor or a ``Mixing`` object, for :func:`mhla_kernels.mhla_attention`.

        Args:
            block_grid: number of blocks along each axis in this call; None for the number that the parameters were made for.
        """
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Set the parameters to their initial values, for example after ``to_empty`` has allocated uninitialized memory."""
        raise NotImplementedError

    def resize(self, block_grid: tuple[int, ...]) -> None:
        """Resize the parameters to a different number of blocks along each axis.

        Parameters may be replaced with new objects, so optimizers must be built afterwards.

        Args:
            block_grid: new number of blocks along each axis.
        """
        raise NotImplementedError

    def matrix(self) -> Tensor:
        """Return the mixing coefficients between all pairs of blocks as a matrix, for analysis.

        Returns:
            ``[M, M]`` for M blocks, or ``[H, M, M]`` if each of H heads has its own coefficients. Entry ``[..., i, j]`` weighs
            the summary of block j for the queries of block i.
        """
        raise NotImplementedError

    def bring_inside_(self) -> None:
        """Reflect parameters outside the allowed range back into it, in place.

        The outputs of the model do not change, because each forward pass computes with the reflected values. After this call,
        code that reads the parameters directly also sees the reflected values.
        """
        raise NotImplementedError

    def extend(self, blocks: int) -> None:
        """Extend causal coefficients to ``blocks`` blocks. Existing coefficients do not change.

        Parameters may be replaced with new objects, so optimizers must be built afterwards.
        """
        raise NotImplementedError

    def carried(self, name: str, values: Tensor, block_grid: tuple[int, ...] | None) -> Tensor | None:
        """Convert a mixing parameter of another layer to the number of blocks and heads of this layer.

        Args:
            name: name of the parameter.
            values: values of the parameter in the other layer.
            block_grid: number of blocks along each axis in the other layer; None if it is unknown, or for a sequence.

        Returns:
            Values in the shape of this layer's parameter; None if they cannot be converted.
        """
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MixingCoefficients:
        def keep_dtype(x: Tensor) -> Tensor:
            # `half` and `to(dtype)` arrive here, too; only a move to a different device takes effect.
            moved = fn(x)
            return moved if moved.dtype == x.dtype else x.to(moved.device)

        super()._apply(keep_dtype, recurse)
        return self


class FreeCoefficients(MixingCoefficients):
    """Base class of dense mixing coefficients, with one free coefficient for each pair of blocks.

    Args:
        start: initial coefficients, ``[Mq, Mk]`` for Mq query blocks and Mk key blocks. They are clamped to the bounds, 1e-5
            and 1.
        heads: number of heads, each with its own coefficients; None for coefficients shared by all heads.
        trainable: whether the coefficients are trained.
    """

    def __init__(self, start: Tensor, heads: int | None, trainable: bool) -> None:
        super().__init__()
        self._start = start.clamp(LOWER, UPPER)
        # A copy even on the CPU, because training would otherwise overwrite `_start`, which reset_parameters reads.
        initial = self._start.to(torch.get_default_device(), copy=True)
        self.weight = nn.Parameter(initial if heads is None else initial.repeat(heads, 1, 1), requires_grad=trainable)

    @torch.no_grad()
    @override
    def reset_parameters(self) -> None:
        self.weight.copy_(self._start)

    @override
    def matrix(self) -> Tensor:
        return bounded(self.weight)

    @torch.no_grad()
    @override
    def bring_inside_(self) -> None:
        self.weight.copy_(bounded(self.weight))


class DenseCoefficients(FreeCoefficients):
    """Dense mixing coefficients of self-attention, with one free coefficient for each pair of blocks.

    Args:
        layout: token grid and its partition into blocks.
        heads: number of heads, each with its own matrix of coefficients; None for one matrix shared by all heads.
        init: initial coefficients: ``"locality"`` (decreasing with the distance between blocks) or ``"uniform"``.
        causal: whether blocks read only themselves and earlier blocks.
        trainable: whether the coefficients are trained.

    Raises:
        ValueError: if ``init`` is unknown.
    """

    def __init__(
        self,
        layout: BlockLayout,
        heads: int | None = None,
        init: MixingInit = "locality",
        causal: bool = False,
        trainable: bool = True,
    ) -> None:
        check_init(init)
        start = (locality_mixing if init == "locality" else uniform_mixing)(layout, causal)
        super().__init__(start, heads, trainable)
        self.grid, self.prefix_tokens, self.causal = layout.block_grid, layout.prefix_tokens, causal
        self.cut = layout.block_size is not None

    def forward(self, block_grid: tuple[int, ...] | None = None) -> Tensor:
        """Return the mixing coefficients of M blocks, ``[M, M]``, or ``[H, M, M]`` if each of H heads has its own.

        Args:
            block_grid: number of blocks along each axis in this call; None for the number that the parameters were made for.
                For a different number, the matrix is cut to its first rows and columns if the layout has a ``block_size``, and
                resized by interpolation otherwise.

        Raises:
            ValueError: if the layout has a ``block_size`` and there are more blocks than the parameters were made for, or if
                the matrix would have to be resized and the layout has prefix tokens.
        """
        if block_grid in (None, self.grid):
            return bounded(self.weight)
        assert block_grid is not None
        if not self.cut:
            return self._resized(block_grid)
        (blocks,), (covered,) = block_grid, self.grid
        if blocks > covered:
            raise ValueError(
                f"{blocks} blocks are more than the {covered} that dense coefficients were made for; mixing: exponential takes "
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
        """Convert the mixing coefficients of another layer to the number of blocks and heads of this layer.

        Causal coefficients are extended or cut. Others are resized by interpolation.

        Args:
            name: name of the parameter; ignored, because there is only one.
            values: coefficients of the other layer, ``[M', M']`` or ``[H', M', M']`` for M' blocks and H' heads.
            block_grid: number of blocks along each axis in the other layer; None if it is unknown, or for a sequence.

        Returns:
            Values in the shape of this layer's parameter; None if they cannot be converted.
        """
        if values.dim() not in (2, 3) or values.shape[-1] != values.shape[-2] or self.prefix_tokens:
            return None
        values, blocks = bounded(values), math.prod(self.grid)
        if self.causal or len(self.grid) == 1:
            resized = (
                extend_mixing(values, blocks) if self.causal else resize_mixing(values, values.shape[-1:], self.grid)
            )
        else:
            # Weights that do not record their grid are taken as those of a square, which `math.prod` below confirms or rejects.
            side = math.isqrt(values.shape[-1])
            old = (
                block_grid if block_grid is not None and len(block_grid) == len(self.grid) else (side,) * len(self.grid)
            )
            if math.prod(old) != values.shape[-1]:
                return None
            resized = resize_mixing(values, old, self.grid)
        return for_heads(resized, self.weight)

    def extend(self, blocks: int) -> None:
        """Extend causal coefficients to at least ``blocks`` blocks. Existing coefficients do not change.

        New rows and columns are extrapolated by :func:`mhla_kernels.extend_mixing`.
        """
        if blocks > self.weight.shape[-1]:
            self._start = extend_mixing(bounded(self.weight.detach()), blocks)
            self.weight = nn.Parameter(self._start.clone(), self.weight.requires_grad)
            self.grid = (blocks,)


class ExponentialCoefficients(MixingCoefficients):
    """Exponential mixing coefficients, which are sums of exponentials of the distance between blocks.

    The cost of attention with these coefficients is linear in the number of blocks.

    Args:
        layout: token grid and its partition into blocks, without prefix tokens, which have no position on the grid.
        terms: number of exponentials.
        heads: number of heads, each with its own sum; None for one sum shared by all heads.
        init: ``"locality"`` for initial decays from 0.05 to 2.5 per block, spaced evenly on a logarithmic scale; ``"uniform"``
            for initial decays of ``min_decay``. With the default ``min_decay``, all blocks start with about the same weight.
        causal: whether blocks read only themselves and earlier blocks. Causal coefficients fit any number of blocks.
        trainable: whether the coefficients are trained.
        min_decay: smallest decay per block, from 1e-5 to 2.5. If it is above 0.05, it is also the smallest initial decay.

    Raises:
        ValueError: if the layout has prefix tokens, ``init`` is unknown, ``terms`` is less than 1, or ``min_decay`` is out of
            range.
    """

    def __init__(
        self,
        layout: BlockLayout,
        terms: int = 4,
        heads: int | None = None,
        init: MixingInit = "locality",
        causal: bool = False,
        trainable: bool = True,
        min_decay: float = LOWER,
    ) -> None:
        super().__init__()
        check_init(init)
        if terms < 1:
            raise ValueError(f"mixing_terms={terms} must be positive")
        if not LOWER <= min_decay <= FASTEST:
            raise ValueError(f"mixing_min_decay={min_decay} must lie between {LOWER} and {FASTEST}")
        if layout.prefix_tokens:
            raise ValueError(
                f"exponential mixing has no position for the {layout.prefix_tokens} prefix tokens; use dense"
            )
        self.grid = None if causal or len(layout.grid) == 1 else layout.block_grid
        self.blocks = layout.num_blocks
        self.min_decay = min_decay
        cpu = torch.device("cpu")
        slowest = max(SLOWEST, min_decay)
        rate = torch.tensor([slowest], device=cpu)
        if terms > 1:
            rate = torch.logspace(math.log10(slowest), math.log10(FASTEST), terms, device=cpu)
        if init == "uniform":
            rate = torch.full((terms,), min_decay, device=cpu)
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
        """Return the mixing coefficients of the layer as an :class:`ExponentialMixing`.

        Args:
            block_grid: number of blocks along each axis in this call; None for the number that the parameters were made for. If
                the number differs on a grid with several axes, decays are rescaled so that the decay over the full length of
                an axis stays the same. The decays per block of a sequence do not depend on the number of blocks.
        """
        amplitude = bounded(self.amplitude)
        if self.grid is None or block_grid in (None, self.grid):
            return ExponentialMixing(amplitude, self._inside(self.decay), self.grid)
        assert block_grid is not None
        return ExponentialMixing(amplitude, self._rescaled(self.decay, block_grid), block_grid)

    @override
    def resize(self, block_grid: tuple[int, ...]) -> None:
        with torch.no_grad():
            # Clamped and not reflected: a decay that rescaling moves past a bound is closest to the original at this bound.
            self.decay.copy_(self._rescaled(self.decay, block_grid).clamp(self.min_decay, LARGEST_DECAY))
            start = self._rescaled(self._start["decay"], block_grid)
            self._start["decay"] = start.clamp(self.min_decay, LARGEST_DECAY)
        self.grid = None if self.grid is None else tuple(block_grid)
        self.blocks = math.prod(block_grid)

    @override
    def carried(self, name: str, values: Tensor, block_grid: tuple[int, ...] | None) -> Tensor | None:
        """Convert amplitudes or decays of another layer to the number of blocks and heads of this layer.

        On a grid with several axes, decays are rescaled so that the decay over the full length of an axis stays the same, if
        ``block_grid`` is known. The decays per block of a sequence do not change.

        Args:
            name: name of the parameter, ``"amplitude"`` or ``"decay"``.
            values: values of the parameter in the other layer.
            block_grid: number of blocks along each axis in the other layer; None if it is unknown, or for a sequence.

        Returns:
            Values in the shape of this layer's parameter; None if they cannot be converted.
        """
        parameter, high = (self.amplitude, UPPER) if name == "amplitude" else (self.decay, LARGEST_DECAY)
        values = bounded(values, high=high)
        # Amplitudes are [..., terms], and so are decays of a sequence; decays of a grid are [..., terms, axes].
        axes = parameter.dim() - self.amplitude.dim()
        if values.shape[values.dim() - 1 - axes] != parameter.shape[parameter.dim() - 1 - axes]:
            return None
        if name == "decay" and self.grid is not None and block_grid is not None and len(block_grid) == len(self.grid):
            values = values * values.new_tensor([a / b for a, b in zip(block_grid, self.grid, strict=True)])
        values = values if name == "amplitude" else values.clamp(self.min_decay, LARGEST_DECAY)
        fitted = for_heads(values, parameter)
        return fitted if fitted is not None and fitted.shape == parameter.shape else None

    def _inside(self, decay: Tensor) -> Tensor:
        """Reflect decays per block into the allowed range, from ``min_decay`` to 20."""
        return bounded(decay, self.min_decay, LARGEST_DECAY)

    def _rescaled(self, decay: Tensor, block_grid: tuple[int, ...]) -> Tensor:
        """Rescale decays per block to a different block grid, so that the decay over the full length of an axis is the same.

        Args:
            decay: decays per block of the current grid.
            block_grid: new number of blocks along each axis.

        Returns:
            Decays in the shape of ``decay``, which may be out of bounds.
        """
        grid = (self.blocks,) if self.grid is None else self.grid
        scale = decay.new_tensor([old / new for old, new in zip(grid, block_grid, strict=True)])
        return self._inside(decay) * scale

    @override
    def matrix(self) -> Tensor:
        return self().dense(self.blocks)

    @torch.no_grad()
    @override
    def bring_inside_(self) -> None:
        self.amplitude.copy_(bounded(self.amplitude))
        self.decay.copy_(self._inside(self.decay))

    @override
    def extend(self, blocks: int) -> None:
        """Set the number of blocks of causal coefficients. The parameters fit any number of blocks and do not change."""
        self.blocks = blocks


def for_heads(values: Tensor, parameter: Tensor) -> Tensor | None:
    """Convert a parameter of another layer to the number of heads of ``parameter``, the corresponding parameter of this layer.

    Values shared by all heads are repeated for each head. Values of several heads are averaged if ``parameter`` is shared by
    all heads.

    Args:
        values: parameter of the other layer; its first axis is the head axis if each head has its own values.
        parameter: parameter of this layer; its first axis is the head axis if each head has its own values.

    Returns:
        Converted values, which are ``values`` itself if both tensors have the same number of axes. None if both have three axes
        and different numbers of heads. For tensors with fewer axes, the caller has to compare the numbers of heads.
    """
    if values.dim() < parameter.dim():
        return values.expand(parameter.shape[0], *values.shape).clone()
    if values.dim() > parameter.dim():
        return values.mean(0)
    return values if values.dim() < 3 or len(values) == len(parameter) else None
