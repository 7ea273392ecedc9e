"""Feature maps keep the precision of their dtype, with their derivatives."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_mhla.attention.features import apply_features


@pytest.mark.parametrize("features", ["elu", "softplus"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_small_features_are_not_rounded_away(features: str, dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-80, 3, 999), torch.tensor([-6.5, -17.5, -1e-3, 0.0, 1e-3])]).to(dtype)
    x = x[None, :, None, None].requires_grad_()
    for mapped in apply_features(x, x, features)[:2]:  # type: ignore[arg-type]
        exact = x.detach().double()
        want = torch.where(exact > 0, exact + 1, exact.exp()) if features == "elu" else exact.exp().log1p()
        slope = torch.where(exact > 0, 1.0, exact.exp()) if features == "elu" else exact.sigmoid()
        bound = 2 * torch.finfo(dtype).eps if dtype != torch.float64 else 1e-13
        assert ((mapped.double() - want) / want).abs().max() < bound
        (gradient,) = torch.autograd.grad(mapped.sum(), x)
        assert ((gradient.double() - slope) / slope).abs().max() < 2 * bound


def test_elu_where_the_exponential_would_overflow() -> None:
    x = torch.tensor([-math.inf, -1e30, 0.0, 100.0, 1e30, math.inf])[None, :, None, None].requires_grad_()
    mapped = apply_features(x, x, "elu")[0]
    assert mapped.flatten().tolist() == pytest.approx([0, 0, 1, 101, 1e30, math.inf])
    (first,) = torch.autograd.grad(mapped.sum(), x, create_graph=True)
    assert first.flatten().tolist() == [0, 0, 1, 1, 1, 1]
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.flatten().tolist() == [0, 0, 1, 0, 0, 0]
    assert torch.isnan(apply_features(torch.full((1, 1, 1, 1), math.nan), x, "elu")[0]).all()
