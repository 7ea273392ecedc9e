"""Swapped models as one graph: compiled cold, at several sizes, with masks, caches and gradients; exported with open axes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_mhla import AttentionConfig, swap_attention
from lightning_mhla.attention import MHLA, BlockLayout

timm = pytest.importorskip("timm")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
DENSE, SUM = AttentionConfig(block_size=8), AttentionConfig(block_size=8, mixing="exponential")
GRID = AttentionConfig(block_grid=[2, 2])
BEYOND = AttentionConfig(
    kind="mhla_window", block_size=4, mixing="exponential", options={"sinks": 3, "feature_positions": 2}
)
LENGTHS = (23, 32, 17, 40)


@pytest.fixture(autouse=True)
def cold() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def llama(attention: AttentionConfig = DENSE, layers: int = 2) -> Any:
    context = 15 if (attention.options or {}).get("feature_positions") else 64  # shorter than the texts, or longer
    config = transformers.LlamaConfig(
        vocab_size=99, num_key_value_heads=2, max_position_embeddings=context, **{**WIDTHS, "num_hidden_layers": layers}
    )
    model = transformers.LlamaForCausalLM(config).eval()
    swap_attention(model, attention)
    return model


def bert(attention: AttentionConfig = DENSE, layers: int = 2) -> Any:
    options = {"vocab_size": 99, "max_position_embeddings": 64, "attention_probs_dropout_prob": 0.0}
    sizes = {**WIDTHS, "num_hidden_layers": layers}
    model = transformers.BertModel(transformers.BertConfig(**options, hidden_dropout_prob=0.0, **sizes)).eval()
    swap_attention(model, attention)
    return model


def text(length: int, padded: str = "", batch: int = 2) -> dict[str, Tensor]:
    mask = torch.ones(batch, length, dtype=torch.long)
    if padded:
        mask[0, :5] = 0
        mask[-1, -3:] = 0
    given = {"input_ids": torch.randint(0, 99, (batch, length))}
    return given | ({"attention_mask": mask} if padded else {})


def randomised(model: nn.Module, attention: AttentionConfig) -> Any:
    swap_attention(model, attention)
    for parameter in model.parameters():
        if not parameter.any():  # zeros at the start would hide what attention returns
            nn.init.normal_(parameter, std=0.02)
    return model.eval()


def wan() -> tuple[Any, Callable[[int], dict[str, Any]]]:
    sizes = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 24, "text_dim": 16, "ffn_dim": 64}
    model = randomised(
        diffusers.WanTransformer3DModel(**sizes), AttentionConfig(block_grid=[1, 2, 2], normalize=False, gate=True)
    )
    return model, lambda i: {
        "hidden_states": torch.randn(1, 16, 2 + i % 2, 16, (16, 26, 20, 30)[i]),
        "encoder_hidden_states": torch.randn(1, 5, 16),
        "timestep": torch.tensor([9]),
    }


def diffusion(name: str, **options: Any) -> tuple[Any, Callable[[int], dict[str, Any]]]:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 1, "sample_size": 8}
    model = randomised(getattr(diffusers, name)(**sizes, **options), GRID)
    captions = {"encoder_hidden_states": torch.randn(2, 5, 16)} if "caption_channels" in options else {}
    if name.startswith("DiT"):
        captions = {"class_labels": torch.tensor([1, 2])}
    if name.startswith("PixArt"):
        captions["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}
    return model, lambda i: {
        "hidden_states": torch.randn(2, 4, *(2 * ((8, 12, 10, 14)[i],))), "timestep": torch.tensor([9, 9]), **captions
    }  # fmt: skip


def sana() -> tuple[Any, Callable[[int], dict[str, Any]]]:
    cross = {"num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16}
    return diffusion("SanaTransformer2DModel", out_channels=4, caption_channels=16, patch_size=1, **cross)


def pixart() -> tuple[Any, Callable[[int], dict[str, Any]]]:
    options = {"cross_attention_dim": 16, "norm_num_groups": 1, "use_additional_conditions": False}
    return diffusion("PixArtTransformer2DModel", out_channels=8, caption_channels=16, patch_size=2, **options)


def vit(name: str, attention: AttentionConfig = GRID, **options: Any) -> tuple[Any, Callable[[int], dict[str, Any]]]:
    model = timm.create_model(name, img_size=64, patch_size=16, depth=1, dynamic_img_size=True, **options)
    return randomised(model, attention), lambda i: {"x": torch.randn(2, 3, 64, (64, 96, 80, 112)[i])}


def hf_image(name: str, **options: Any) -> tuple[Any, Callable[[int], dict[str, Any]]]:
    widths = {key: value for key, value in WIDTHS.items() if name != "Dinov2" or key != "intermediate_size"}
    widths["num_hidden_layers"] = 1
    config = getattr(transformers, f"{name}Config")(
        image_size=32, patch_size=8, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0, **widths
    )
    model = randomised(getattr(transformers, f"{name}Model")(config), AttentionConfig(block_grid=[2, 2], lepe=3))
    return model, lambda i: {"pixel_values": torch.randn(2, 3, 32, (32, 48, 40, 56)[i]), **options}


IMAGES: dict[str, Callable[[], tuple[Any, Callable[[int], dict[str, Any]]]]] = {
    "wan": wan,
    "dit": lambda: diffusion("DiTTransformer2DModel", patch_size=2, num_embeds_ada_norm=10),
    "sana": sana,
    "pixart": pixart,
    "timm-class-token": lambda: vit("vit_tiny_patch16_224"),
    "timm-registers-lepe": lambda: vit("vit_tiny_patch16_224", AttentionConfig(block_grid=[2, 2], lepe=3), reg_tokens=2),
    "timm-eva-rotary": lambda: vit("eva02_tiny_patch14_224"),
    "timm-window": lambda: vit("vit_tiny_patch16_224", AttentionConfig(kind="mhla_window", block_grid=[3, 2])),
    "timm-linear": lambda: vit("vit_tiny_patch16_224", AttentionConfig(kind="linear")),
    "timm-softmax": lambda: vit("vit_tiny_patch16_224", AttentionConfig(kind="softmax")),
    "hf-vit": lambda: hf_image("ViT", interpolate_pos_encoding=True),
    "hf-dinov2": lambda: hf_image("Dinov2"),
}  # fmt: skip
RECOMPILED = {
    "timm-class-token": 3,
    "timm-registers-lepe": 3,
    "timm-eva-rotary": 3,
    "timm-window": 3,
    "timm-linear": 3,
    "timm-softmax": 3,
    "sana": 3,
}
"""Graphs for three sizes where more than two are needed: the unswapped timm model compiles each size by itself, and the operator
cuts long inputs into pieces, which one of SANA's sizes is too short for."""


def first(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output[0] if isinstance(output, tuple) else next(iter(output.values()))


def compare(model: Any, inputs: list[dict[str, Any]], train: bool = False) -> int:
    """Compare outputs and gradients of a model and its compiled form, compiled cold, and return the number of graphs."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for given in inputs:
        results = []
        for call in (compiled, model):
            model.zero_grad()
            with torch.set_grad_enabled(train):
                out = first(call(**copy.deepcopy(given)))
            results.append([out.detach()])
            if train:
                out.float().square().mean().backward()
                # a compiled graph gives parameters that it does not use zeros, torch nothing
                results[-1] += [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        for one, two in zip(*results, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    return counter.frame_count


@pytest.mark.parametrize("name", IMAGES)
def test_image_models_are_one_graph_at_every_size(name: str) -> None:
    """Sizes that blocks divide and sizes that they do not; the same graph serves all but the first size."""
    model, inputs = IMAGES[name]()
    assert compare(model, [inputs(i) for i in range(3)]) <= RECOMPILED.get(name, 2)


@pytest.mark.parametrize("name", ["wan", "timm-registers-lepe", "timm-eva-rotary", "hf-vit"])
def test_image_models_are_trained_as_one_graph(name: str) -> None:
    model, inputs = IMAGES[name]()
    compare(model.train(), [inputs(0), inputs(1)], train=True)


@pytest.mark.parametrize("name", ["wan", "pixart"])
def test_blocks_that_are_compiled_by_themselves(name: str) -> None:
    model, inputs = IMAGES[name]()
    model._repeated_blocks = ["WanTransformerBlock", "BasicTransformerBlock"]
    given = [inputs(i) for i in range(3)]
    with torch.no_grad():
        expected = [first(model(**each)) for each in given]
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        for each, values in zip(given, expected, strict=True):
            torch.testing.assert_close(first(model(**each)), values, rtol=1e-4, atol=1e-5)


KINDS = {
    "dense": DENSE,
    "exponential": SUM,
    "window": AttentionConfig(kind="mhla_window", block_size=8, mixing="exponential"),
    "window with sinks": AttentionConfig(kind="mhla_window", block_size=4, mixing="exponential", options={"sinks": 3}),
    "window beyond its context": BEYOND,
    "linear": AttentionConfig(kind="linear"),
    "softmax": AttentionConfig(kind="softmax"),
}


PLAIN = ("dense", "exponential", "window with sinks")
"""Kinds whose graphs are also tested without a mask."""


@pytest.mark.parametrize(("kind", "padded"), [(kind, "padded") for kind in KINDS] + [(kind, "") for kind in PLAIN])
def test_decoders_are_one_graph_at_every_length(kind: str, padded: str) -> None:
    model = llama(KINDS[kind], layers=2 if kind == "exponential" else 1)
    given = [text(length, padded) | {"use_cache": False} for length in LENGTHS]
    assert compare(model, given) <= 2


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind] is not BEYOND])
def test_encoders_are_one_graph_at_every_length(kind: str) -> None:
    compare(bert(KINDS[kind], layers=1), [text(length, "padded") for length in LENGTHS])


@pytest.mark.parametrize("make", [llama, bert])
def test_text_models_are_trained_as_one_graph(make: Callable[[], Any]) -> None:
    compare(make().train(), [text(23, "padded"), text(32, "padded")], train=True)


def test_inductor_at_three_lengths() -> None:
    """The second length opens the axis; inductor then compiles sums of exponentials of any length, backward too."""
    model = bert(SUM, layers=1).train()
    compiled = torch.compile(model, fullgraph=True)
    for length in LENGTHS[:3]:
        given, grads = text(length), []
        for call in (compiled, model):
            model.zero_grad()
            first(call(**given)).square().mean().backward()
            grads.append(model.embeddings.word_embeddings.weight.grad)
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", [SUM, BEYOND], ids=["mhla", "window"])
@pytest.mark.parametrize("padded", ["", "padded"])
def test_a_compiled_prompt_is_continued(padded: str, attention: AttentionConfig) -> None:
    """The state of a prompt that a graph read, in rows that other rows of the cache replace, is that of the plain model."""
    model, given = llama(attention), text(20, padded)
    mask = given.get("attention_mask", torch.ones(2, 20, dtype=torch.long))
    longer = {"attention_mask": torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)[[1, 0]]} if padded else {}
    token, outs = torch.randint(0, 99, (2, 1)), []
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for call in (compiled, model):
            cache = call(**given, use_cache=True).past_key_values
            cache.reorder_cache(torch.tensor([1, 0]))
            outs.append(model(token, past_key_values=cache, **longer).logits)
            assert cache.get_seq_length() == 21
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", [SUM, BEYOND], ids=["mhla", "window"])
def test_steps_of_generation_are_compiled(attention: AttentionConfig) -> None:
    model, ids = llama(attention), torch.randint(0, 99, (2, 24))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        cache = compiled(ids[:, :5]).past_key_values
        for place in range(5, 20):
            out = compiled(ids[:, place : place + 1], past_key_values=cache)
        torch.testing.assert_close(out.logits[:, 0], model(ids[:, :20]).logits[:, -1], rtol=1e-4, atol=1e-5)


def test_packed_documents_in_a_graph_are_an_error() -> None:
    model, ids = llama(), torch.randint(0, 99, (1, 20))
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="takes no packed documents"):
        compiled(ids, position_ids=positions, use_cache=False)


def test_masks_that_hide_more_than_padding_are_an_error_in_a_graph() -> None:
    visible = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    visible[:, :, 10, 3] = False
    compiled = torch.compile(llama(), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="hides more than padding"):
        compiled(torch.randint(0, 99, (2, 20)), attention_mask=visible, use_cache=False)


class Logits(nn.Module):
    """Module that returns only the first output, for export."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, *given: Tensor) -> Tensor:
        return first(self.model(*given, **self.options))


def exportable(name: str) -> tuple[Logits, Callable[[int], tuple[Tensor, ...]]]:
    if name.startswith("vit"):
        model, inputs = IMAGES["hf-vit" if name == "vit-hf" else "timm-class-token"]()
        return Logits(model).eval(), lambda batch: (next(iter(inputs(0).values()))[:1].repeat(batch, 1, 1, 1),)
    model = llama() if name.startswith("llama") else bert()
    padded = "padded" if name.endswith("padded") else ""
    options = {"use_cache": False} if name.startswith("llama") else {}
    return Logits(model, **options).eval(), lambda batch: tuple(text(23, padded, batch).values())


NAMES = ["llama", "llama-padded", "bert", "bert-padded", "vit-timm", "vit-hf"]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_exported_with_an_open_batch(name: str, strict: bool) -> None:
    wrapped, inputs = exportable(name)
    given = inputs(3)
    batch = torch.export.Dim("batch", min=1, max=16)
    program = torch.export.export(wrapped, given, dynamic_shapes=[({0: batch},) * len(given)], strict=strict).module()
    for size in (1, 2, 5):
        other = inputs(size)
        torch.testing.assert_close(program(*other), wrapped(*other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "bert-padded", "vit-timm"])
def test_onnx_with_an_open_batch(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    wrapped, inputs = exportable(name)
    given = inputs(3)
    batch = torch.export.Dim("batch", min=1, max=16)
    file = tmp_path / "model.onnx"
    shapes = [({0: batch},) * len(given)]
    torch.onnx.export(wrapped, given, file, dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    for size in (2, 5):
        other = inputs(size)
        names = [entry.name for entry in session.get_inputs()]
        (out,) = session.run(None, {key: value.numpy() for key, value in zip(names, other, strict=True)})
        torch.testing.assert_close(torch.from_numpy(out), wrapped(*other), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "layout",
    [
        BlockLayout((6, 8), (2, 2)),
        BlockLayout((5, 7), (2, 3)),
        BlockLayout((5, 7), (2, 3), prefix_tokens=3),
        BlockLayout((3, 3), (3, 3), prefix_tokens=4),
        BlockLayout((3, 5, 4), (2, 2, 1)),
        BlockLayout((1, 9), (1, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("lepe", [0, 3])
def test_places_by_arithmetic_are_those_of_the_tables(layout: BlockLayout, lepe: int) -> None:
    """A layer that is told a layout for one call, as in graphs, gives what a layer built for it gives."""
    layer = MHLA(16, 2, layout, AttentionConfig(lepe=lepe, gate=True))
    x = torch.randn(2, layout.num_tokens, 16)
    torch.testing.assert_close(layer(x, layout=layout), layer(x), rtol=1e-5, atol=1e-6)
