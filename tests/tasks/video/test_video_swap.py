"""Attention swapped into diffusers' transformers: exact where nothing changes, the definition where it does.

Longer than other files: the same checks for every host model.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiTTransformer2DModel, SanaTransformer2DModel, UNet2DConditionModel
from mhla_kernels import resize_mixing
from torch import Tensor, nn
from wan import PAPER, inputs, shaken, tiny_wan

from lightning_mhla import AttentionConfig, BlockLayout, load_swapped, swap_attention
from lightning_mhla.attention import MHLA
from lightning_mhla.swap import resize_blocks, swapped_layers


def tiny_dit() -> tuple[Any, dict[str, Tensor]]:
    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        norm_num_groups=4,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    given = {"timestep": torch.tensor([3, 700]), "class_labels": torch.tensor([1, 2])}
    return shaken(model), {"hidden_states": torch.randn(2, 4, 8, 8), **given}


def tiny_sana() -> tuple[Any, dict[str, Tensor]]:
    model = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        sample_size=8,
        patch_size=1,
    )
    given = {"timestep": torch.tensor([3, 700]), "encoder_hidden_states": torch.randn(2, 5, 16)}
    return shaken(model), {"hidden_states": torch.randn(2, 4, 6, 8), **given}


def wan() -> tuple[Any, dict[str, Tensor]]:
    latent, times, text = inputs()
    return tiny_wan(), {"hidden_states": latent, "timestep": times, "encoder_hidden_states": text}


MODELS = {"wan": wan, "dit": tiny_dit, "sana": tiny_sana}


@torch.no_grad()
def run(model: Any, given: dict[str, Tensor]) -> Tensor:
    return model(**given).sample


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{"layers": []}, {"layer_kinds": ["keep"]}])
def test_swapping_nothing_changes_nothing(name: str, options: dict[str, Any]) -> None:
    model, given = MODELS[name]()
    before, names = run(model, given), list(model.state_dict())
    assert swap_attention(model, AttentionConfig(kind="mhla", block_grid=[1, 1, 1]), **options) == {}
    assert torch.equal(run(model, given), before)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize(
    ("name", "kind"), [("wan", "softmax"), ("dit", "softmax"), ("sana", "linear")]
)  # SANA's own attention is linear: normalized, of relu
def test_our_module_of_the_same_kind_gives_the_same_output(name: str, kind: str) -> None:
    model, given = MODELS[name]()
    before = run(model, given)
    swap_attention(
        model, AttentionConfig(kind=kind, normalize=True) if kind == "linear" else AttentionConfig(kind=kind)
    )
    torch.testing.assert_close(run(model, given), before, atol=1e-4, rtol=1e-4)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply Wan's rotary embedding to x ``[B, N, H, D]`` by complex products."""
    angle = torch.complex(cos[0, :, 0, 0::2].double(), sin[0, :, 0, 1::2].double())[:, None]
    return torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * angle).flatten(-2)


@pytest.mark.parametrize("grid", [(5, 3, 5), (4, 2, 6), (1, 4, 3)], ids=str)
def test_swapped_mhla_is_its_definition(grid: tuple[int, int, int]) -> None:
    """Every step of a replaced layer, in float64 and token by token, on grids that blocks divide, do not, and do not fill."""
    model = tiny_wan()
    swapped = swap_attention(model, PAPER)[1]
    shaken(model, 5)
    host, seen = model.blocks[1].attn1, {}
    host.register_forward_hook(lambda module, args, output: seen.update(args=args, output=output))
    with torch.no_grad():
        model(*inputs(grid))
    x, _, _, rotary = seen["args"]
    host = copy.deepcopy(host).double()
    q, k = host.norm_q(host.to_q(x.double())), host.norm_k(host.to_k(x.double()))
    q, k, v = (each.unflatten(-1, (2, 24)) for each in (q, k, host.to_v(x.double())))
    q, k = (rotated(each.relu() + 1e-6, *rotary) for each in (q, k))
    fitted = tuple(min(pair) for pair in zip((2, 2, 3), grid, strict=True))
    layout = BlockLayout(grid, fitted)
    block = torch.empty(len(layout.order), dtype=torch.long)
    block[layout.order] = torch.repeat_interleave(torch.arange(layout.num_blocks), layout.block_offsets.diff())
    assert isinstance(swapped, MHLA)
    mixing = resize_mixing(swapped.mixing.matrix().detach().double(), (2, 2, 3), fitted)
    weights = torch.einsum("bnhd,bmhd->bhnm", q, k) * 24**-0.5 * mixing[block][:, block]
    out = torch.einsum("bhnm,bmhd->bnhd", weights, v)
    out = out * (out.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * swapped.norm.weight.double()
    gate = nn.functional.silu(
        nn.functional.linear(x.double(), swapped.gate.weight.double(), swapped.gate.bias.double())
    )
    expected = host.to_out[0](out.flatten(2) * gate)
    torch.testing.assert_close(seen["output"].double(), expected, atol=1e-5, rtol=1e-4)


def test_new_modules_start_without_effect() -> None:
    """A gate and a convolution change nothing until they are trained."""
    latent, times, text = inputs()
    plain = tiny_wan()
    dressed = copy.deepcopy(plain)
    swap_attention(plain, AttentionConfig(kind="linear", normalize=False))
    swap_attention(dressed, AttentionConfig(kind="linear", normalize=False, gate=True, lepe=3))
    with torch.no_grad():
        torch.testing.assert_close(dressed(latent, times, text).sample, plain(latent, times, text).sample)


def test_one_size_after_another() -> None:
    """A clip's output does not depend on the clips before it; a batch of one size is its clips."""
    model = tiny_wan()
    swap_attention(model, PAPER, layer_kinds=["mhla", "linear", "softmax"])
    given = {grid: inputs(grid) for grid in [(5, 3, 5), (4, 4, 6), (1, 2, 2), (7, 3, 4)]}
    with torch.no_grad():
        alone = {}
        for grid, (latent, times, text) in given.items():
            fresh = copy.deepcopy(model)
            alone[grid] = torch.cat(
                [fresh(*(x[row : row + 1] for x in (latent, times, text))).sample for row in range(2)]
            )
        for grid in [*given, *reversed(given)]:
            torch.testing.assert_close(model(*given[grid]).sample, alone[grid], atol=1e-5, rtol=1e-4)


def test_a_copy_is_independent() -> None:
    """The weight average copies the model; input sizes of one model must not change the other."""
    model = tiny_wan()
    swap_attention(model, PAPER)
    twin = copy.deepcopy(model)
    first, second = inputs((5, 3, 5)), inputs((4, 2, 6))
    with torch.no_grad():
        before = model(*first).sample
        twin(*second)
        assert torch.equal(model(*first).sample, before)
        assert torch.equal(twin(*first).sample, before)
    grids = [{id(layer.attn1.processor.grid) for layer in each.blocks} for each in (model, twin)]
    assert len(grids[0]) == len(grids[1]) == 1
    assert grids[0] != grids[1]


def test_training_after_sampling_the_same_size() -> None:
    model = tiny_wan()
    swap_attention(model, AttentionConfig(block_grid=[2, 2, 2], normalize=False, lepe=3))
    given = inputs()
    with torch.inference_mode():
        model(*given)
    model(*given).sample.sum().backward()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_reach_everything(checkpointing: bool) -> None:
    model = tiny_wan()
    assert sorted(swap_attention(model, PAPER, layer_kinds=["keep", "replace", "linear"])) == [1, 2]
    shaken(model).train()
    if checkpointing:
        model.enable_gradient_checkpointing()
    latent, times, text = inputs()
    model(latent, times, text).sample.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients.values())
    if checkpointing:
        model.disable_gradient_checkpointing()
        model.zero_grad()
        model(latent, times, text).sample.square().mean().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], msg=name)


def test_save_and_load_restores_the_swap(tmp_path: Path) -> None:
    model = tiny_wan()
    swap_attention(model, PAPER, layers=[0, 2])
    shaken(model, 3)
    given = inputs()
    model.save_pretrained(tmp_path)
    loaded = load_swapped(tmp_path)
    assert sorted(swapped_layers(loaded)) == [0, 2]
    assert not loaded.training
    with torch.no_grad():
        assert torch.equal(loaded(*given).sample, model(*given).sample)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_save_and_load_in_bfloat16(tmp_path: Path) -> None:
    """Coefficients, and what diffusers keeps in float32, stay so."""
    model = tiny_wan()
    swap_attention(model, PAPER, layer_kinds=["mhla", "keep", "linear"])
    model.save_pretrained(tmp_path)
    half = load_swapped(tmp_path, torch.bfloat16)
    kept = {name for name, parameter in half.named_parameters() if parameter.dtype == torch.float32}
    assert "blocks.0.attn1.processor.attention.mixing.weight" in kept
    assert "blocks.0.scale_shift_table" in kept
    assert "blocks.0.attn1.to_q.weight" not in kept
    half.save_pretrained(tmp_path / "again")
    again = load_swapped(tmp_path / "again")
    given = [x.bfloat16() for x in inputs()]
    with torch.no_grad():
        assert torch.equal(again(*given).sample, half(*given).sample)
    assert {name for name, parameter in again.named_parameters() if parameter.dtype == torch.float32} == kept


def test_coefficients_go_to_other_blocks_and_are_saved_so(tmp_path: Path) -> None:
    model = tiny_wan()
    swap_attention(model, PAPER, layer_kinds=["keep", "mhla", "linear"])
    shaken(model, 3)
    given = inputs((6, 4, 6))
    old = model.blocks[1].attn1.processor.attention.mixing().detach().clone()
    resize_blocks(model, [3, 4, 2])
    new = model.blocks[1].attn1.processor.attention.mixing.weight
    assert torch.equal(new, resize_mixing(old, (2, 2, 3), (3, 4, 2)))
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(load_swapped(tmp_path)(*given).sample, model(*given).sample)
    with pytest.raises(ValueError, match="blocks cannot be resized to"):
        resize_blocks(model, [3, 4])
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        resize_blocks(model, [3.0, 4, 2])  # type: ignore[list-item]


def test_exponential_mixing_on_any_grid(tmp_path: Path) -> None:
    model = tiny_wan()
    swap_attention(model, AttentionConfig(block_grid=[2, 2, 3], mixing="exponential", normalize=False))
    with torch.no_grad():
        for grid in [(5, 3, 5), (1, 2, 2)]:
            assert model(*inputs(grid)).sample.isfinite().all()
        resize_blocks(model, [4, 2, 6])
        model.save_pretrained(tmp_path)
        given = inputs((5, 3, 6))
        assert torch.equal(load_swapped(tmp_path)(*given).sample, model(*given).sample)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": AttentionConfig(kind="mhla", normalize=False)}, "needs block_grid, the number of blocks along each of the 3 axes"),
        ({"attention": AttentionConfig(block_grid=[2, 2], normalize=False)}, "needs block_grid, .* not \\[2, 2\\]"),
        ({"attention": AttentionConfig(block_grid=[2, 2, 2])}, "normalize needs nonnegative queries and keys, and rotary makes them negative"),
        ({"layers": [0, 3]}, "layers \\[3\\] are not among the model's 0 to 2"),
        ({"layers": [0], "layer_kinds": ["mhla"]}, "give layers or layer_kinds, not both"),
        ({"layer_kinds": ["keep", "mhla"]}, "its length must divide the 3 layers"),
        ({"layer_kinds": ["keep", "mhla", "mhl"]}, "did you mean 'mhla'"),
        ({"attention": AttentionConfig(normalize=False), "layer_kinds": ["linear", "mhla", "mhla"]}, "needs block_grid"),
    ],
)  # fmt: skip
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    model = tiny_wan()
    with pytest.raises(ValueError, match=message):
        swap_attention(model, **{"attention": PAPER, **options})
    assert swapped_layers(model) == {}, "a refused swap must leave the model as it was"


def test_calls_of_other_models_are_refused() -> None:
    model, given = tiny_dit()
    swap_attention(model, AttentionConfig(block_grid=[2, 2]))
    layer = model.transformer_blocks[0].attn1
    with pytest.raises(ValueError, match=r"image_rotary_emb.* have a form that swapped attention does not support"):
        layer(torch.randn(1, 16, 16), image_rotary_emb=(torch.ones(16, 8), torch.ones(16, 8)))
    with pytest.raises(ValueError, match="self-attention without a mask"):
        layer(torch.randn(1, 16, 16), attention_mask=torch.ones(1, 16))
    with pytest.raises(ValueError, match="requires batch, channels and the 2 axes of its patches"):
        model(given["hidden_states"].flatten(2), **{k: v for k, v in given.items() if k != "hidden_states"})


def test_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Linear is not a model of diffusers, timm or transformers"):
        swap_attention(nn.Linear(2, 2), PAPER)
    unet = UNet2DConditionModel(
        block_out_channels=(8, 8),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        cross_attention_dim=8,
    )
    with pytest.raises(ValueError, match="UNet2DConditionModel is not a diffusers transformer"):
        swap_attention(unet, PAPER)
    model = tiny_wan()
    model.blocks[1].attn1.fuse_projections()
    with pytest.raises(ValueError, match="attn1 of block 1 has fused_projections=True"):
        swap_attention(model, PAPER)
    model = tiny_wan()
    swap_attention(model, PAPER)
    with pytest.raises(ValueError, match="already swapped"):
        swap_attention(model, PAPER)
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_swapped(tmp_path)
    tiny_wan().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="was never swapped"):
        load_swapped(tmp_path)
    with pytest.raises(AssertionError, match="call the complete model"):
        model.blocks[0].attn1(torch.randn(1, 75, 48))


HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
LATENT = {"in_channels": 4, "out_channels": 4}
FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "text among the tokens": (
        "CogVideoXTransformer3DModel",
        {**HEADS, **LATENT, "time_embed_dim": 2, "text_embed_dim": 8, "sample_width": 8, "sample_height": 8,
         "sample_frames": 5, "patch_size": 2, "temporal_compression_ratio": 4, "max_text_seq_length": 8},
    ),
    "other rotary angles": (
        "CosmosTransformer3DModel",
        {**LATENT, **HEADS, "attention_head_dim": 12, "mlp_ratio": 2, "text_embed_dim": 16, "adaln_lora_dim": 4, "max_size": (4, 32, 32),
         "patch_size": (1, 2, 2)},
    ),
    "skips and other angles": (
        "HunyuanDiT2DModel",
        {**HEADS, "in_channels": 4, "patch_size": 2, "sample_size": 8, "hidden_size": 16, "cross_attention_dim": 8,
         "cross_attention_dim_t5": 8, "pooled_projection_dim": 4, "text_len": 4, "text_len_t5": 4},
    ),
    "packed tokens": ("LTXVideoTransformer3DModel", {**LATENT, **HEADS, "cross_attention_dim": 16, "caption_channels": 16}),
    "no patches": ("Transformer2DModel", {**HEADS, "in_channels": 16, "norm_num_groups": 4, "cross_attention_dim": 16}),
    "sound": (
        "StableAudioDiTModel",
        {**LATENT, "sample_size": 4, "num_layers": 2, "attention_head_dim": 4, "num_attention_heads": 2,
         "num_key_value_attention_heads": 2, "cross_attention_dim": 4, "time_proj_dim": 8, "global_states_input_dim": 8,
         "cross_attention_input_dim": 4},
    ),
    "space and time in turns": (
        "LatteTransformer3DModel",
        {**HEADS, "in_channels": 4, "cross_attention_dim": 16, "caption_channels": 16, "sample_size": 8, "patch_size": 2,
         "norm_type": "ada_norm_single", "video_length": 3, "num_embeds_ada_norm": 10},
    ),
}  # fmt: skip


def unchanged(model: Any, attention: AttentionConfig, message: str, **options: Any) -> None:
    """Check that the swap is rejected with a message, and that the model does not change."""
    before, processors = (
        dict(model.state_dict()),
        [type(m.processor) for m in model.modules() if hasattr(m, "processor")],
    )
    config = dict(model.config)
    with pytest.raises(ValueError, match=message):
        swap_attention(model, attention, **options)
    assert dict(model.config) == config
    assert not model._forward_pre_hooks
    assert [type(m.processor) for m in model.modules() if hasattr(m, "processor")] == processors
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("kind", ["softmax", "mhla"])
def test_models_that_call_their_attention_otherwise_are_refused_untouched(name: str, kind: str) -> None:
    import diffusers

    class_name, options = FOREIGN[name]
    model = getattr(diffusers, class_name)(**options)
    attention = AttentionConfig(kind=kind, block_grid=[2, 2] if kind == "mhla" else None)
    unchanged(model, attention, f"{class_name}.*supported are WanTransformer3DModel, .*lightning_mhla.MHLA in place")


def test_attention_that_is_not_the_models_usual_is_refused_untouched() -> None:
    from diffusers.models.attention_processor import AttnProcessor, PAGIdentitySanaLinearAttnProcessor2_0

    linear = AttentionConfig(kind="linear", output_norm=False)
    sana, _ = tiny_sana()
    sana.transformer_blocks[1].attn1.set_processor(PAGIdentitySanaLinearAttnProcessor2_0())
    unchanged(
        sana,
        linear,
        "block 1 has processor PAGIdentitySanaLinearAttnProcessor2_0, .* replaces SanaLinearAttnProcessor2_0",
    )
    swap_attention(sana, linear, layers=[0])  # the other layer is as usual
    dit, _ = tiny_dit()
    dit.transformer_blocks[0].attn1.set_processor(AttnProcessor())
    unchanged(dit, AttentionConfig(kind="softmax"), "block 0 has processor AttnProcessor, .* replaces AttnProcessor2_0")
    dit, _ = tiny_dit()
    dit.transformer_blocks[1].attn1.residual_connection = True
    unchanged(dit, AttentionConfig(kind="softmax"), "block 1 has residual_connection=True")
    normed, _ = tiny_sana()
    normed.transformer_blocks[0].attn1.norm_q = nn.LayerNorm(8, elementwise_affine=False)
    unchanged(normed, linear, "block 0 has norm_q=.* without weights")
