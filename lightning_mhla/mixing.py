"""Mixing coefficients as a module: their start, their bounds, and their own place in the optimiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_mhla.layout import BlockLayout

LOWER, UPPER = 1e-5, 1.0
"""Bounds of a coefficient after each optimiser step (the paper's public code)."""

MixingInit = Literal["locality", "uniform"]


def locality_mixing(layout: BlockLayout, causal: bool = False) -> Tensor:
    """Locality-biased start: ``1 - dist(i, j) / max_k dist(i, k)``, rows summing to 1 (MHLA paper, section 3).

    Distances are Euclidean, between block centres on the block grid. Causal: ``1 - dist / M`` on the lower triangle, so
    that no visible block starts at zero. A block of prefix tokens is near to every block, and looks at all alike.

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


class MixingCoefficients(nn.Module):
    """Dense mixing coefficients of one layer, float32 whatever the precision of the model.

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
        if init not in ("locality", "uniform"):
            raise ValueError(f"mixing_init={init!r} is not one of 'locality', 'uniform'")
        start = (locality_mixing if init == "locality" else uniform_mixing)(layout, causal)
        start = start.clamp(LOWER, UPPER).to(torch.get_default_device())
        self.weight = nn.Parameter(start if heads is None else start.repeat(heads, 1, 1), requires_grad=trainable)

    def forward(self) -> Tensor:
        """``[M, M]`` or ``[H, M, M]``."""
        return self.weight

    @torch.no_grad()
    def clip_(self) -> None:
        """Bring every coefficient back into its bounds; the gradient does not see this, so it can grow again."""
        self.weight.clamp_(LOWER, UPPER)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MixingCoefficients:
        def keep_dtype(x: Tensor) -> Tensor:
            moved = fn(x)
            return moved if moved.dtype == x.dtype else x.to(moved.device)

        super()._apply(keep_dtype, recurse)
        return self


def clip_mixing(model: nn.Module) -> None:
    """Clip the trainable mixing coefficients of every layer of ``model``."""
    for module in model.modules():
        if isinstance(module, MixingCoefficients) and module.weight.requires_grad:
            module.clip_()
