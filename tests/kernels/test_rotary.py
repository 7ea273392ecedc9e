"""Rotary embedding after the feature map, both backends."""

from __future__ import annotations

import pytest
import torch
from implementations import DEVICE
from mhla_kernels import mhla_attention, rotary_features
from torch import Tensor

BACKENDS = ("torch", "triton")


def angles(tokens: int, width: int, rows: int | None = None) -> tuple[Tensor, Tensor]:
    rates = 10000.0 ** -(torch.arange(width // 2).double() * 2 / width)
    place = torch.arange(tokens).double()
    if rows is not None:
        place = place + torch.arange(rows)[:, None] * 5
    angle = place[..., None] * rates
    return angle.cos(), angle.sin()


def by_complex_numbers(x: Tensor, cos: Tensor, sin: Tensor, relu: bool, interleaved: bool) -> Tensor:
    """Rotate each pair of features as a complex number, multiplied by e^{i angle}."""
    x = x.double()
    x = x.clamp(min=0) + 1e-6 if relu else x
    half = x.shape[-1] // 2
    even, odd = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = torch.complex(even, odd) * torch.complex(cos, sin).unsqueeze(-2)
    out = torch.empty_like(x)
    if interleaved:
        out[..., 0::2], out[..., 1::2] = turned.real, turned.imag
    else:
        out[..., :half], out[..., half:] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("feature_map", ["relu", "identity"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("rows", [None, 2], ids=["one position", "positions by row"])
def test_values_and_gradients(backend: str, feature_map: str, interleaved: bool, rows: int | None) -> None:
    packed = torch.randn(2, 9, 3, 36)
    cos, sin = angles(9, 12, rows)
    x = packed.double().requires_grad_()
    want = by_complex_numbers(x[..., 12:24], cos, sin, feature_map == "relu", interleaved)
    cotangent = torch.randn_like(want)
    want_grad = torch.autograd.grad(want, x, cotangent)[0]
    leaf = packed.to(DEVICE).requires_grad_()
    got = rotary_features(
        leaf[..., 12:24],
        cos.to(DEVICE),
        sin.to(DEVICE),
        feature_map=feature_map,
        interleaved=interleaved,
        backend=backend,
    )
    grad = torch.autograd.grad(got, leaf, cotangent.float().to(DEVICE))[0]
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad.cpu().double(), want_grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_is_rounded_once(backend: str) -> None:
    x = torch.randn(1, 20, 2, 16).bfloat16()
    cos, sin = angles(20, 16)
    want = by_complex_numbers(x, cos, sin, True, False)
    got = rotary_features(x.to(DEVICE), cos.to(DEVICE), sin.to(DEVICE), backend=backend).cpu()
    assert got.dtype == torch.bfloat16
    assert (got.double() - want).abs().max() <= want.abs().max() * 2**-8


def test_products_depend_on_the_distance_of_positions() -> None:
    cos, sin = angles(30, 8)
    q, k = torch.rand(1, 1, 1, 8).expand(1, 30, 1, 8), torch.rand(1, 1, 1, 8).expand(1, 30, 1, 8)
    turned_q, turned_k = rotary_features(q, cos, sin), rotary_features(k, cos, sin)
    products = torch.einsum("bthd,bjhd->tj", turned_q, turned_k)
    for distance in range(29):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)
    out = mhla_attention(
        turned_q, turned_k, torch.randn(1, 30, 1, 4), torch.rand(4, 4), block_size=8, causal=True, normalize=False
    )
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(
    ("shape", "half", "message"), [((1, 4, 1, 5), 2, "D even"), ((2, 4, 1, 6), 2, r"\[4, 3\] or \[2, 4, 3\]")]
)
def test_wrong_shapes(shape: tuple[int, ...], half: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotary_features(torch.rand(shape), torch.rand(4, half), torch.rand(4, half))


def test_opcheck() -> None:
    from mhla_kernels.triton_backend import rotary  # noqa: F401  registers the operator

    x = torch.rand(1, 5, 2, 8, device=DEVICE, requires_grad=True)
    cos, sin = (angle.float().to(DEVICE) for angle in angles(5, 8))
    torch.library.opcheck(torch.ops.mhla.rotary, (x, cos, sin, True, False, ""))
