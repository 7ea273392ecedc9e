"""The transformer: what is trained, adapters, distillation, and weights from every place they may come from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from mhla_tasks.captioned.host import build_transformer, load_weights, read_transformer, read_weights
from mhla_tasks.commandline import registry
from mhla_tasks.video import VideoDiffusion
from mhla_tasks.video.model import WanTransformerConfig
from mhla_tasks.video.pretrained import WAN, load_published
from torch import Tensor
from torch.nn import functional as F
from wan import PAPER, SHAPE, TINY, inputs, shaken, tiny_wan

from lightning_mhla import AttentionConfig, CrossAttentionConfig, load_swapped, swap_attention
from lightning_mhla.generative.distillation import DistillationConfig, VelocityHost
from lightning_mhla.swap import swapped_layers
from lightning_mhla.swap.adapters import LoraOptions, choose_trained, merge_adapters

HYBRID = ["keep", "mhla", "mhla"]


def test_the_default_shape_is_wan_1_3b() -> None:
    with torch.device("meta"):
        model = build_transformer(WAN, WanTransformerConfig(), AttentionConfig(kind="softmax"), ["keep"])
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_418_996_800


def trained(model: WanTransformer3DModel) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_what_is_trained() -> None:
    everything = {name for name, _ in build_transformer(WAN, TINY, PAPER, HYBRID).named_parameters()}
    added = {name for name in everything if ".processor." in name}
    projections = {name for name in everything if ".attn1." in name and not name.startswith("blocks.0.")}
    for part, expected in [("all", everything), ("attention", projections), ("new", added)]:
        model = build_transformer(WAN, TINY, PAPER, HYBRID)
        choose_trained(model, part, LoraOptions())
        assert trained(model) == expected, part
    model = build_transformer(WAN, TINY, PAPER, HYBRID)
    choose_trained(model, "lora", LoraOptions(rank=2, alpha=2))
    adapters = {name for name in trained(model) if ".lora_" in name}
    assert trained(model) == added | adapters
    assert {name.split(".lora_")[0] for name in adapters} == {
        f"blocks.{layer}.attn1.{each}" for layer in (1, 2) for each in ("to_q", "to_k", "to_v", "to_out.0")
    }


def test_fixed_coefficients_stay_fixed() -> None:
    model = build_transformer(
        WAN, TINY, AttentionConfig(block_grid=[2, 2, 2], normalize=False, mixing_trainable=False), None
    )
    choose_trained(model, "attention", LoraOptions())
    assert not [name for name in trained(model) if "mixing" in name]


def test_training_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="train='new' trains replaced attention, but no layer is replaced"):
        choose_trained(tiny_wan(), "new", LoraOptions())
    with pytest.raises(ValueError, match="train='new' leaves nothing to train"):
        choose_trained(build_transformer(WAN, TINY, AttentionConfig(kind="softmax"), None), "new", LoraOptions())


def test_adapters_start_without_effect_and_merge_exactly() -> None:
    given = inputs()
    model = shaken(build_transformer(WAN, TINY, PAPER, HYBRID))
    names = set(model.state_dict())
    with torch.no_grad():
        before = model(*given).sample
        choose_trained(model, "lora", LoraOptions(rank=2, alpha=4))
        torch.testing.assert_close(model(*given).sample, before)
        shaken(model, 7)
        adapted = model(*given).sample
        assert (adapted - before).abs().max() > 1e-3
        merge_adapters(model)
        torch.testing.assert_close(model(*given).sample, adapted, atol=1e-5, rtol=1e-4)
    assert set(model.state_dict()) == names


@pytest.fixture(scope="module")
def original() -> WanTransformer3DModel:
    return tiny_wan()


def original_names(model: WanTransformer3DModel) -> dict[str, Tensor]:
    """Rename weights to the names of the original Wan's code."""
    plain = {
        "patch_embedding": "patch_embedding",
        "condition_embedder.text_embedder.linear_1": "text_embedding.0",
        "condition_embedder.text_embedder.linear_2": "text_embedding.2",
        "condition_embedder.time_embedder.linear_1": "time_embedding.0",
        "condition_embedder.time_embedder.linear_2": "time_embedding.2",
        "condition_embedder.time_proj": "time_projection.1",
        "proj_out": "head.head",
    }
    inside = {"norm2": "norm3", "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"}
    for ours, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn")):
        letters = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "norm_q": "norm_q", "norm_k": "norm_k"}
        inside |= {f"{ours}.{name}": f"{theirs}.{letter}" for name, letter in letters.items()}
    state = {}
    for name, tensor in model.state_dict().items():
        if name == "scale_shift_table":
            state["head.modulation"] = tensor
        elif name.endswith(".scale_shift_table"):
            state[name.replace("scale_shift_table", "modulation")] = tensor
        elif name.startswith("blocks."):
            _, layer, rest = name.split(".", 2)
            module, leaf = rest.rsplit(".", 1)
            state[f"blocks.{layer}.{inside[module]}.{leaf}"] = tensor
        else:
            module, leaf = name.rsplit(".", 1)
            state[f"{plain[module]}.{leaf}"] = tensor
    return state


def published(original: WanTransformer3DModel, layers: tuple[int, ...], blocks: int = 12) -> dict[str, Tensor]:
    """Draw random weights in the layout of the authors' Wan-MHLA: those of Wan, and the new attention's in ``layers``."""
    state = original_names(original)
    for layer in layers:
        state[f"blocks.{layer}.self_attn.g.weight"] = 0.2 * torch.randn(48, 48)
        state[f"blocks.{layer}.self_attn.g.bias"] = torch.randn(48)
        state[f"blocks.{layer}.self_attn.g_norm.weight"] = torch.rand(24)
        state[f"blocks.{layer}.self_attn.block_attn.conv.weight"] = torch.rand(blocks, blocks, 1, 1)
    return state


def authors_attention(
    x: Tensor, state: dict[str, Tensor], grid: tuple[int, ...], blocks: tuple[int, ...], heads: int = 2
) -> Tensor:
    """Compute the authors' self-attention in float64 from weights by their names, with each block as a slice."""
    own = {
        name.removeprefix("blocks.0.self_attn."): t.double()
        for name, t in state.items()
        if "blocks.0.self_attn." in name
    }
    x = x.double()

    def project(letter: str) -> Tensor:
        return F.linear(x, own[f"{letter}.weight"], own[f"{letter}.bias"])

    def normed(y: Tensor, weight: Tensor) -> Tensor:
        return y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    width = x.shape[-1] // heads
    half = width // 2
    sizes = [half - 2 * (half // 3), half // 3, half // 3]
    angles = []
    for axis, (length, size) in enumerate(zip(grid, sizes, strict=True)):
        rates = 10000.0 ** (-torch.arange(0, 2 * size, 2, dtype=torch.float64) / (2 * size))
        along = torch.outer(torch.arange(length, dtype=torch.float64), rates)
        shape = [1, 1, 1, size]
        shape[axis] = length
        angles.append(along.view(shape).expand(*grid, size))
    turn = torch.polar(torch.ones(1, dtype=torch.float64), torch.cat(angles, -1).reshape(-1, 1, half))

    def mapped(letter: str) -> Tensor:
        y = (normed(project(letter), own[f"norm_{letter}.weight"]).relu() + 1e-6).unflatten(-1, (heads, half, 2))
        return torch.view_as_real(torch.view_as_complex(y.contiguous()) * turn).flatten(-2)

    def cut(y: Tensor) -> Tensor:
        steps = [length // count for length, count in zip(grid, blocks, strict=True)]
        y = y.unflatten(1, (blocks[0], steps[0], blocks[1], steps[1], blocks[2], steps[2]))
        return y.permute(0, 1, 3, 5, 2, 4, 6, 7, 8).flatten(4, 6).flatten(1, 3)

    q, k, v = (cut(each) for each in (mapped("q"), mapped("k"), project("v").unflatten(-1, (heads, width))))
    summaries = torch.einsum("bmnhd,bmnhe->bmhde", k, v)
    mixed = torch.einsum("pm,bmhde->bphde", own["block_attn.conv.weight"][:, :, 0, 0], summaries)
    out = torch.einsum("bmnhd,bmhde->bmnhe", q, mixed)
    steps = [length // count for length, count in zip(grid, blocks, strict=True)]
    out = out.unflatten(1, blocks).unflatten(4, steps).permute(0, 1, 4, 2, 5, 3, 6, 7, 8).flatten(1, 6)
    out = normed(out, own["g_norm.weight"]).flatten(2) * F.silu(project("g"))
    return F.linear(out, own["o.weight"], own["o.bias"])


@pytest.mark.parametrize("layers", [(0, 1, 2), (0, 2)], ids=["all layers", "hybrid"])
def test_published_weights_give_the_authors_attention(
    original: WanTransformer3DModel, tmp_path: Path, layers: tuple[int, ...]
) -> None:
    state = published(original, layers)
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "theirs.pth")
    model = load_published(str(tmp_path / "theirs.pth"), (2, 2, 3))
    assert sorted(swapped_layers(model)) == list(layers)
    seen: dict[str, Any] = {}
    model.blocks[0].attn1.register_forward_hook(lambda module, args, output: seen.update(x=args[0], output=output))
    with torch.no_grad():
        model(*inputs((4, 2, 6)))
    expected = authors_attention(seen["x"], state, (4, 2, 6), (2, 2, 3))
    torch.testing.assert_close(seen["output"].double(), expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(model.blocks[1].ffn.net[2].weight, state["blocks.1.ffn.2.weight"])


def test_published_weights_by_command(
    original: WanTransformer3DModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(published(original, (1,)), tmp_path / "theirs.pth")
    source, target = str(tmp_path / "theirs.pth"), str(tmp_path / "ours")
    registry.run("import", [source, target, "--block_grid", "2", "2", "3"])
    assert sorted(swapped_layers(load_swapped(target))) == [1]
    with pytest.raises(SystemExit, match=r"has 12 blocks, not the 150 of block_grid \[3, 5, 10\]"):
        registry.run("import", [source, target])
    assert "parameters written to" in capsys.readouterr().out


def test_their_convolution_after_the_gate_is_refused(original: WanTransformer3DModel, tmp_path: Path) -> None:
    state = published(original, (1,)) | {"blocks.1.self_attn.lepe.weight": torch.rand(48, 1, 3, 3, 3)}
    torch.save(state, tmp_path / "theirs.pth")
    with pytest.raises(ValueError, match="added after the gate"):
        load_published(str(tmp_path / "theirs.pth"), (2, 2, 3))
    torch.save(original_names(original), tmp_path / "softmax.pth")
    with pytest.raises(ValueError, match="no mixing coefficients"):
        load_published(str(tmp_path / "softmax.pth"), (2, 2, 3))


@pytest.mark.parametrize("place", ["transformer", "pipeline", "original", "swapped", "swapped pipeline"])
def test_weights_to_start_from(original: WanTransformer3DModel, pipeline: Path, tmp_path: Path, place: str) -> None:
    """From wherever they come, softmax attention gives the source's output, and MHLA starts from its projections."""
    source: Any = original
    path = tmp_path / "weights"
    if place == "pipeline":
        source, path = WanPipeline.from_pretrained(pipeline).transformer, pipeline
    elif place == "transformer":
        original.save_pretrained(path)
    elif place == "original":
        path = tmp_path / "wan.pth"
        torch.save({"model": original_names(original)}, path)
    else:
        source = tiny_wan()
        swap_attention(source, PAPER, layer_kinds=HYBRID)
        shaken(source).save_pretrained(path / "transformer" if place == "swapped pipeline" else path)
    given = inputs()
    kinds = HYBRID if place.startswith("swapped") else ["keep"]
    model = build_transformer(WAN, TINY, PAPER, kinds)
    load_weights(model, str(path), WAN)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(*given).sample, source(*given).sample)
    if not place.startswith("swapped"):
        model = build_transformer(WAN, TINY, PAPER, HYBRID)
        choose_trained(model, "lora", LoraOptions(rank=2))
        load_weights(model, str(path), WAN)
        assert torch.equal(model.blocks[1].attn1.to_q.base_layer.weight, source.blocks[1].attn1.to_q.weight)


def test_wrong_weights(original: WanTransformer3DModel, tmp_path: Path) -> None:
    model = build_transformer(WAN, TINY, PAPER, HYBRID)
    with pytest.raises(
        FileNotFoundError, match="neither a file, nor a folder of a Wan transformer, nor a model on the hub"
    ):
        load_weights(model, str(tmp_path / "nowhere"), WAN)
    (tmp_path / "text.pth").write_text("no weights")
    with pytest.raises(ValueError, match="cannot be read safely"):
        load_weights(model, str(tmp_path / "text.pth"), WAN)
    torch.save([torch.ones(2)], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="contains a list instead of weights by name"):
        load_weights(model, str(tmp_path / "list.pth"), WAN)
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded/meta.pt").touch()
    with pytest.raises(ValueError, match="was not written completely"):
        load_weights(model, str(tmp_path / "sharded"), WAN)
    torch.save({"a": torch.ones(2)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="no weights of a Wan transformer"):
        load_weights(model, str(tmp_path / "other.pth"), WAN)
    torch.save(original_names(tiny_wan(ffn_dim=32)), tmp_path / "narrow.pth")
    with pytest.raises(
        ValueError,
        match=r"different shapes or attention: blocks\.0\.ffn\.net\.0\.proj\.weight \[32, 48\] for \[64, 48\]",
    ):
        load_weights(model, str(tmp_path / "narrow.pth"), WAN)
    torch.save(published(original, (0,)), tmp_path / "theirs.pth")
    with pytest.raises(ValueError, match=r"blocks\.0\.attn1\.processor"):
        load_weights(model, str(tmp_path / "theirs.pth"), WAN)
    state = original_names(original)
    del state["head.head.bias"]
    torch.save(state, tmp_path / "part.pth")
    with pytest.raises(ValueError, match=r"lacks proj_out\.bias \(1 tensors\)"):
        load_weights(model, str(tmp_path / "part.pth"), WAN)
    adapted = build_transformer(WAN, TINY, PAPER, HYBRID)
    choose_trained(adapted, "lora", LoraOptions(rank=2))
    torch.save(adapted.state_dict(), tmp_path / "lora.pth")
    with pytest.raises(ValueError, match="LoRA adapters beside the weights"):
        read_weights(str(tmp_path / "lora.pth"), WAN)


def test_matching_layers_is_zero_for_the_teacher_itself_and_trains_replaced_layers_only(
    original: WanTransformer3DModel, tmp_path: Path
) -> None:
    original.save_pretrained(tmp_path)
    host, teacher = VelocityHost(VideoDiffusion.velocity), read_transformer(str(tmp_path), WAN, TINY)
    latent, times, text = inputs()
    same = build_transformer(WAN, TINY, AttentionConfig(kind="softmax"), None)
    load_weights(same, str(tmp_path), WAN)
    assert host.layer_loss(same, teacher, latent, times, text).item() < 1e-9
    student = build_transformer(WAN, TINY, PAPER, HYBRID)
    load_weights(student, str(tmp_path), WAN)
    loss = host.layer_loss(student, teacher, latent, times, text)
    loss.backward()
    gradient = student.blocks[1].attn1.to_q.weight.grad.clone()
    student.zero_grad()
    student.enable_gradient_checkpointing()
    host.layer_loss(student.train(), teacher, latent, times, text).backward()
    torch.testing.assert_close(student.blocks[1].attn1.to_q.weight.grad, gradient)
    moved = {name for name, parameter in student.named_parameters() if parameter.grad is not None}
    choose_trained(student, "attention", LoraOptions())
    assert moved == trained(student)
    assert all(parameter.grad is None for parameter in teacher.parameters())
    velocity = host.predict(teacher, latent, times, text)
    torch.testing.assert_close(velocity, original(latent, times, text).sample)


def test_cross_attention_of_clips_is_replaced_matched_and_loaded(
    original: WanTransformer3DModel, tmp_path: Path
) -> None:
    original.save_pretrained(tmp_path / "original")
    cross = {"block_grid": [2, 2, 3], "key_block_size": 2, "key_tokens": 8}
    module = VideoDiffusion(
        {"kind": "softmax"}, SHAPE, ["keep"], cross, train="new", pretrained=str(tmp_path / "original"),  # type: ignore[arg-type]
        text={"length": 8},  # type: ignore[arg-type]
    )  # fmt: skip
    module.configure_model()
    assert list(swapped_layers(module.network, cross=True)) == [0, 1, 2]
    teacher, host = read_transformer(str(tmp_path / "original"), WAN, TINY), VelocityHost(VideoDiffusion.velocity)
    host.layer_loss(module.network, teacher, *inputs()).backward()
    moved = {name for name, parameter in module.network.named_parameters() if parameter.grad is not None}
    assert moved == trained(module.network)
    assert all(".attn2.processor.attention." in name for name in moved)
    with torch.no_grad():
        module.network.blocks[1].attn2.processor.attention.mixing.weight.uniform_(0.1, 1.0)
    module.network.save_pretrained(tmp_path / "swapped")
    same = build_transformer(WAN, TINY, AttentionConfig(kind="softmax"), ["keep"], CrossAttentionConfig(**cross))
    load_weights(same, str(tmp_path / "swapped"), WAN)
    sample = inputs()
    with torch.no_grad():
        assert torch.equal(same(*sample).sample, module.network(*sample).sample)
    other = build_transformer(
        WAN, TINY, AttentionConfig(kind="softmax"), ["keep"], CrossAttentionConfig(**{**cross, "block_grid": [3, 2, 2]})
    )
    with pytest.raises(ValueError, match=r"blocks \[2, 2, 3\] for \[3, 2, 2\].*cross_attention as in their training"):
        load_weights(other, str(tmp_path / "swapped"), WAN)


def test_wrong_distillation() -> None:
    with pytest.raises(ValueError, match=r"layer_steps=5 needs distillation\.teacher"):
        DistillationConfig(layer_steps=5)
    with pytest.raises(ValueError, match="velocity_weight=-1 must be at least 0"):
        DistillationConfig("teacher", velocity_weight=-1)


def test_layers_count_alike_whatever_the_size_of_their_outputs(original: WanTransformer3DModel, tmp_path: Path) -> None:
    """Ten times the output projection in teacher and student makes no layer count more."""
    given = inputs()
    losses = []
    for factor in (1, 10):
        source = copy.deepcopy(original)
        with torch.no_grad():
            for parameter in source.blocks[-1].attn1.to_out.parameters():  # nothing of a later layer hangs on it
                parameter.mul_(factor)
        source.save_pretrained(tmp_path / str(factor))
        student = build_transformer(
            WAN, TINY, AttentionConfig(kind="linear", normalize=False), ["keep", "keep", "linear"]
        )
        load_weights(student, str(tmp_path / str(factor)), WAN)
        teacher = read_transformer(str(tmp_path / str(factor)), WAN, TINY)
        losses.append(VelocityHost(VideoDiffusion.velocity).layer_loss(student, teacher, *given).item())
    assert losses[0] > 0
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
