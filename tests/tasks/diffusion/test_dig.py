"""DiG: against a float64 function of its definition, sizes, directions, shapes, bad input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mhla_tasks.diffusion import ClassToImage, DiTShape
from mhla_tasks.diffusion.dig import PROJECTION_GAIN, DiGConfig
from mhla_tasks.diffusion.model import DiT
from mhla_tasks.diffusion.pretrained import load_pretrained
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lightning_mhla import AttentionConfig

GRID = (3, 4)


def dig(attention: AttentionConfig, depth: int = 5, **options: Any) -> DiT:
    """Build a small random model for 6 x 8 pixels."""
    model = DiT([6, 8], 2, 3, attention, dim=16, depth=depth, heads=2, dig=DiGConfig(mlp_width=24, **options)).double()
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def one_block(w: dict[str, Tensor], at: str, x: Tensor, condition: Tensor, kind: str, causal: bool) -> Tensor:
    """Apply one block to an image ``[H, W, dim]``, token by token."""
    grid, dim = x.shape[:2], x.shape[2]
    flat = x.flatten(0, 1)

    def plain(y: Tensor) -> Tensor:
        centred = y - y.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    changes = F.silu(condition) @ w[f"{at}.modulation.1.weight"].T + w[f"{at}.modulation.1.bias"]
    shift1, scale1, gate1, shift2, scale2, gate2 = changes.chunk(6)
    y = plain(flat) * (1 + scale1) + shift1
    q, k, v = (y @ w[f"{at}.attn.qkv.weight"].T).split([dim // 2, dim // 2, dim], -1)
    q, k, v = (part.unflatten(-1, (2, -1)) for part in (q, k, v))
    if kind == "gla":
        decay = y @ w[f"{at}.attn.reduce.weight"].T @ w[f"{at}.attn.decay.weight"].T + w[f"{at}.attn.decay.bias"]
        keep = (F.logsigmoid(decay) / 16).exp().unflatten(-1, (2, -1))
        state, rows = torch.zeros(2, q.shape[-1], v.shape[-1], dtype=q.dtype), []
        for t in range(len(q)):
            state = keep[t, :, :, None] * state + k[t, :, :, None] * v[t, :, None, :]
            rows.append(torch.einsum("hd,hde->he", q[t], state) * q.shape[-1] ** -0.5)
        out = torch.stack(rows)
        out = out / (out.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{at}.attn.norm.weight"]
        out = out.flatten(1) * F.silu(y @ w[f"{at}.attn.gate.weight"].T)
    else:
        scores = torch.einsum("thd,jhd->htj", q, k) * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
        out = torch.einsum("htj,jhe->the", scores.softmax(-1), v).flatten(1)
    flat = flat + gate1 * (out @ w[f"{at}.attn.proj.weight"].T)
    y = plain(flat) * (1 + scale2) + shift2
    y = F.silu(y @ w[f"{at}.mlp.fc1_g.weight"].T) * (y @ w[f"{at}.mlp.fc1_x.weight"].T)
    flat = flat + gate2 * (y @ w[f"{at}.mlp.fc2.weight"].T)
    padded = F.pad(flat.unflatten(0, grid), (0, 0, 1, 1, 1, 1))
    kernel, out = w[f"{at}.local.weight"], torch.zeros(*grid, dim, dtype=x.dtype)
    for row in range(3):
        for column in range(3):
            out += padded[row : row + grid[0], column : column + grid[1]] * kernel[:, 0, row, column]
    return out + w[f"{at}.local.bias"]


def expected(model: DiT, x: Tensor, time: float, label: int, kind: str, directions: str, causal: bool) -> Tensor:
    """Compute the outputs ``[2, 6, 8]``: every block reads the image in its own direction, and its output is turned back."""
    w = model.state_dict()
    frequencies = 10_000 ** (-torch.arange(128, dtype=torch.float32) / 128)
    angles = torch.tensor(time) * frequencies  # in float32, as diffusers embeds times
    embedded = torch.cat([angles.cos(), angles.sin()]).double()
    hidden = F.silu(w["time.linear_1.weight"] @ embedded + w["time.linear_1.bias"])
    condition = w["time.linear_2.weight"] @ hidden + w["time.linear_2.bias"] + w["label.weight"][label]
    patches = x.unflatten(1, (3, 2)).unflatten(3, (4, 2)).permute(1, 3, 0, 2, 4).flatten(2)
    image = patches @ w["patches.proj.weight"].flatten(1).T + w["patches.proj.bias"]
    waves = 10_000 ** (-torch.arange(4).double() / 4)
    rows, columns = torch.meshgrid(torch.arange(3).double(), torch.arange(4).double(), indexing="ij")
    parts = [(place[..., None] * waves).sin() if name == "sin" else (place[..., None] * waves).cos()
             for place in (columns, rows) for name in ("sin", "cos")]  # fmt: skip
    image = image + torch.cat(parts, -1)
    for layer in range(len(model.backbone.blocks)):
        across = directions == "four" and layer % 4 >= 2
        back = directions != "one" and layer % 2 == 1
        seen = image.transpose(0, 1) if across else image
        seen = seen.flip(0, 1) if back else seen
        seen = one_block(w, f"backbone.blocks.{layer}", seen, condition, kind, causal)
        seen = seen.flip(0, 1) if back else seen
        image = seen.transpose(0, 1) if across else seen
    centred = image - image.mean(-1, keepdim=True)
    image = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    shift, scale = (F.silu(condition) @ w["modulation.1.weight"].T + w["modulation.1.bias"]).chunk(2)
    image = (image * (1 + scale) + shift) @ w["head.weight"].T + w["head.bias"]
    return image.unflatten(-1, (2, 2, 2)).permute(4, 0, 2, 1, 3).flatten(3).flatten(1, 2)


@pytest.mark.parametrize("directions", ["four", "two", "one"])
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 6])
def test_dig_is_its_definition(directions: str, depth: int) -> None:
    model = dig(AttentionConfig(kind="gla"), depth, directions=directions)
    x = torch.randn(2, 2, 6, 8, dtype=torch.float64)
    times, labels = torch.tensor([5.0, 2.5]), torch.tensor([2, 3])
    with torch.no_grad():
        out = model(x, times.double(), labels)
        wanted = torch.stack(
            [expected(model, x[i], float(times[i]), int(labels[i]), "gla", directions, True) for i in (0, 1)]
        )
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_other_kinds_turn_with_it(causal: bool) -> None:
    model = dig(AttentionConfig(kind="softmax"), 4, causal=causal)
    x = torch.randn(1, 2, 6, 8, dtype=torch.float64)
    with torch.no_grad():
        out = model(x, torch.tensor([5.0], dtype=torch.float64), torch.tensor([1]))
        wanted = expected(model, x[0], 5.0, 1, "softmax", "four", causal)
    torch.testing.assert_close(out[0], wanted, rtol=1e-5, atol=1e-5)


def sees(model: DiT) -> Tensor:
    """Return ``[12, 12]`` bool, true if an output token changes with an input token."""
    tokens = torch.randn(1, 12, 16, dtype=torch.float64, requires_grad=True)
    out = model.backbone(tokens, torch.randn(1, 16, dtype=torch.float64)) @ torch.randn(16, dtype=torch.float64)
    rows = [torch.autograd.grad(out[0, t], tokens, retain_graph=True)[0][0].abs().sum(-1) > 1e-12 for t in range(12)]
    return torch.stack(rows)


@pytest.mark.parametrize(
    "attention", [AttentionConfig(kind="gla"), AttentionConfig(kind="mhla", block_size=4)], ids=["gla", "mhla"]
)
def test_directions_decide_what_a_token_sees(attention: AttentionConfig) -> None:
    """Without the convolutions, one direction never shows what comes later; two show all."""
    for directions, whole in (("one", False), ("two", True), ("four", True)):
        model = dig(attention, 4, directions=directions, local=False)
        seen = sees(model)
        assert seen.tril().equal(torch.ones(12, 12).tril().bool())
        assert bool(seen.all()) == whole


PUBLISHED = {"S": (32.98, 4.30), "B": (130.6, 17.07), "L": (464.8, 61.66), "XL": (675.7, 89.40)}
"""Parameters in millions as the shapes of DiG's code give them; billions of multiply-adds at 256 pixels (arXiv 2505.11196)."""


@pytest.mark.parametrize("size", PUBLISHED)
def test_sizes_are_the_published_ones(size: str) -> None:
    """The operations that are printed leave out the recurrence and the MLP's last projection, which a fused kernel computes."""
    parameters, operations = PUBLISHED[size]
    with torch.device("meta"):
        model = DiT(32, 4, 1000, AttentionConfig(kind="gla"), size=size, dig=DiGConfig(), out_channels=8).eval()
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(1, 4, 32, 32), torch.zeros(1), torch.zeros(1, dtype=torch.long))
    assert abs(sum(p.numel() for p in model.parameters()) / 1e6 - parameters) < 0.05
    found = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
    weights = sum(count for name, count in found.items() if "bmm" not in name) / 2e9
    last = sum(block.mlp.fc2.weight.numel() for block in model.backbone.blocks) * 256 / 1e9
    assert abs((weights - last) / operations - 1) < 0.006
    recurrence = counter.get_total_flops() / 2e9 - weights
    assert 0 < recurrence < 0.04 * weights


def test_it_starts_as_dig_does() -> None:
    torch.manual_seed(0)
    model = DiT(8, 1, 3, AttentionConfig(kind="gla"), dim=64, depth=2, heads=2, dig=DiGConfig())
    block = model.backbone.blocks[1]
    x = torch.randn(1, 16, 64)
    condition = torch.randn(1, 64)
    torch.testing.assert_close(block(x, condition), x)  # gates are shut, the convolution passes its input on
    bound = PROJECTION_GAIN * (6 / (64 + 32)) ** 0.5
    assert 0.9 * bound < block.attn.qkv.weight[:32].abs().max() <= bound
    assert block.mlp.fc2.weight.shape == (64, 256)


def test_rectangles_train_and_are_drawn() -> None:
    model = ClassToImage(
        AttentionConfig(kind="mhla", block_grid=[2, 1]),
        3,
        [6, 8],
        1,
        shape=DiTShape(dim=16, depth=3, heads=2),
        dig=DiGConfig(causal=False),
    ).eval()
    assert model.network.backbone.blocks[2].attn.layout.block_grid == (1, 2)
    batch = {"image": torch.rand(4, 1, 6, 8) * 2 - 1, "label": torch.tensor([0, 1, 2, 1])}
    losses = model.sample_losses(batch, [torch.Generator().manual_seed(i) for i in range(4)])
    losses.mean().backward()
    assert model.draw(torch.tensor([0, 2]), [0, 1], 0, model.sampling).shape == (2, 1, 6, 8)


def test_recomputed_blocks_give_the_same_gradients() -> None:
    model = dig(AttentionConfig(kind="gla"))
    x = torch.randn(1, 2, 6, 8, dtype=torch.float64)
    gradients = []
    for checkpointing in (False, True):
        model.backbone.checkpointing = checkpointing
        model.zero_grad()
        model(x, torch.tensor([5.0], dtype=torch.float64), torch.tensor([1])).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("attention", "options", "message"),
    [
        ({"kind": "mhla", "block_grid": [2, 2]}, {}, r"block_grid \(2, 2\) has 2 axes, but the token grid \(12,\) 1"),
        (
            {"kind": "mhla", "block_size": 4, "lepe": 3},
            {},
            "lepe sees later tokens too; leave it out of causal attention",
        ),
        ({"kind": "rala"}, {}, "attention kind 'rala' sees every token"),
        ({"kind": "gla"}, {"directions": "six"}, "directions='six' is not one of 'four', 'two', 'one'"),
        ({"kind": "gla"}, {"key_ratio": 0}, "key_ratio=0 must be above 0"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(
    attention: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        dig(AttentionConfig(**attention), **options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["gla", "mamba2", "mhla"])
def test_training_starts_from_a_dig(kind: str, tmp_path: Path) -> None:
    """Gates have no bias here, and are loaded; weights without a gate cannot start one."""
    attention = AttentionConfig(kind=kind, block_size=4 if kind == "mhla" else None, gate=True)
    model = dig(attention, 2).float()
    model.save_pretrained(tmp_path)
    other = dig(attention, 2).float()
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    load_pretrained(other, str(tmp_path))
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor, rtol=0, atol=0, msg=name)
    if kind == "mhla":
        dig(replace(attention, gate=False), 2).float().save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="cannot start a layer whose gate has no bias"):
            load_pretrained(other, str(tmp_path))


def test_sizes_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="mlp_width=-5 must be positive, or null"):
        DiGConfig(mlp_width=-5)
    for size in ([28], [8, 12, 3]):
        with pytest.raises(ValueError, match="must be the side of a square, or height and width"):
            DiT(size, 1, 3, AttentionConfig(kind="gla"), dim=16, depth=1, heads=2)


def test_sizes_of_a_dit_are_not_those_of_a_dig() -> None:
    with pytest.raises(ValueError, match=r"mlp_ratio does not apply to a DiG; set dig\.mlp_width"):
        DiT(8, 1, 3, AttentionConfig(kind="gla"), dim=16, depth=1, heads=2, dig=DiGConfig(), mlp_ratio=2.0)
    with pytest.raises(ValueError, match="does not divide the sample's side"):
        DiT([8, 7], 1, 3, AttentionConfig(kind="gla"), dim=16, depth=1, heads=2, dig=DiGConfig())
