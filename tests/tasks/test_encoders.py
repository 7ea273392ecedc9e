"""Encoders with replaced attention learn the vectors of the original: data, losses, metrics, padding, and the way out."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from mhla_tasks.language import LinearizedTextEncoder, TextPassages
from mhla_tasks.language.passages import merged_groups
from mhla_tasks.language.tokenizer import train_tokenizer
from mhla_tasks.tools.export import load_trained, write_export
from torch.nn import functional as F
from transformers import AutoModel, BertConfig, BertModel, PreTrainedTokenizerFast, RobertaConfig, RobertaModel

from lightning_mhla import AttentionConfig, load_swapped
from lightning_mhla.training.encoders import EncoderDistillation
from lightning_mhla.training.neighbors import EmbeddingPairs

WORDS = [
    "a",
    "block",
    "of",
    "tokens",
    "keeps",
    "one",
    "summary",
    "and",
    "every",
    "query",
    "mixes",
    "the",
    "summaries",
    "with",
    "learned",
    "weights",
    "in",
    "linear",
    "time",
]


class MiniTexts:
    """Files of random sentences for training and validation, and a tokenizer of them."""

    def __init__(self, folder: Path) -> None:
        self.train, self.val = folder / "train.jsonl", folder / "val.jsonl"
        generator, texts = random.Random(0), []
        for file, count in ((self.train, 64), (self.val, 24)):
            documents = [
                "\n\n".join(" ".join(generator.choices(WORDS, k=generator.randint(8, 60))) for _ in range(12))
                for _ in range(count)
            ]
            file.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
            texts += documents
        self.tokenizer: PreTrainedTokenizerFast = train_tokenizer(texts, 300)


def small_bert(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=128, initializer_range=0.2, **sizes)
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> MiniTexts:
    return MiniTexts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def bert(texts: MiniTexts, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_bert(tmp_path_factory.mktemp("bert"), texts.tokenizer))


def passages(texts: MiniTexts, bert: str, **options: Any) -> TextPassages:
    return TextPassages(str(texts.train), str(texts.val), bert, **{"length": 48, "batch_size": 8, "seed": 0, **options})


def encoder(bert: str, **options: Any) -> LinearizedTextEncoder:
    torch.manual_seed(0)
    attention = AttentionConfig(kind="mhla", block_size=8, mixing="exponential", feature_map="learned")
    given = {"attention": attention, "distillation": EncoderDistillation(layer_steps=6, teacher=bert), **options}
    return LinearizedTextEncoder(bert, **given)


def trainer(folder: Path, steps: int, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", max_steps=steps, default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, **options,
    )  # fmt: skip


def test_passages_are_cut_padded_and_grouped_by_length(texts: MiniTexts, bert: str) -> None:
    data = passages(texts, bert)
    batches = list(data.val_dataloader())
    widths = {batch["tokens"].shape[1] for batch in batches}
    assert len(widths) > 1
    assert max(widths) <= 48
    rows = 0
    for batch in batches:
        tokens, mask, valid = batch["tokens"], batch["mask"], batch["valid"]
        rows += int(valid.sum())
        assert (mask.sum(1) > tokens.shape[1] - 16)[valid].all(), "less than 16 tokens of padding"
        assert (tokens[mask == 0] == data.tokenizer.pad_token_id).all()
    paragraphs = [
        part for line in texts.val.read_text().splitlines() for part in json.loads(line)["text"].split("\n\n")
    ]
    assert rows == sum(len(part) >= 40 for part in paragraphs)
    whole = passages(texts, bert, unit="document").source("validate")
    assert len(whole) == 24
    assert whole[0]["tokens"].shape == (48,)


def test_a_control_token_that_is_spelled_out_remains_text(texts: MiniTexts, bert: str, tmp_path: Path) -> None:
    file = tmp_path / "spelled.txt"
    file.write_text("the spelling of <|endoftext|> in a text is text, and it is not the token that ends a text")
    source = TextPassages(str(file), str(file), bert, length=96, batch_size=1).source("train")
    assert texts.tokenizer.eos_token_id not in source[0]["tokens"][source[0]["mask"].bool()]


def test_only_training_needs_layers_that_can_be_trained_on_their_own(
    texts: MiniTexts, bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(*_: Any) -> None:
        raise ValueError("the strategy shards weights")

    model, data = encoder(bert), passages(texts, bert)
    monkeypatch.setattr(type(model.linearization.host), "check", reject)
    (metrics,) = trainer(tmp_path, 1).validate(model, data, verbose=False)
    assert 0 < metrics["val/cosine"] < 1
    with pytest.raises(ValueError, match="the strategy shards weights"):
        trainer(tmp_path, 1).fit(model, data)  # with the teacher that the validation has loaded


def test_before_training_with_softmax_the_encoder_is_the_original(texts: MiniTexts, bert: str, tmp_path: Path) -> None:
    model = encoder(bert, attention=AttentionConfig(kind="softmax"), distillation=EncoderDistillation(teacher=bert))
    (metrics,) = trainer(tmp_path, 1).validate(model, passages(texts, bert), verbose=False)
    assert metrics["val/cosine"] == pytest.approx(1, abs=1e-5)
    assert metrics["val/token_cosine"] == pytest.approx(1, abs=1e-5)
    assert metrics["val/recall_at_10"] > 0.99
    assert metrics["val/loss"] < 1e-6


def test_both_stages_bring_it_closer_and_it_is_exported(texts: MiniTexts, bert: str, tmp_path: Path) -> None:
    model, data = encoder(bert), passages(texts, bert)
    before = trainer(tmp_path, 1).validate(model, data, verbose=False)[0]["val/loss"]
    embeddings = model.network.embeddings.word_embeddings.weight.detach().clone()
    checkpoints = ModelCheckpoint(tmp_path / "checkpoints", save_last=True, every_n_train_steps=6, save_top_k=-1)
    run = trainer(tmp_path, 24, callbacks=[checkpoints], limit_val_batches=0)
    run.fit(model, data)
    assert model.linearization.teacher is not None
    matched = load_trained(next((tmp_path / "checkpoints").glob("*step=6.ckpt")))
    assert torch.equal(matched.network.embeddings.word_embeddings.weight, embeddings), (
        "matching trains new attention alone"
    )
    halfway = trainer(tmp_path, 1).validate(matched, data, verbose=False)[0]["val/loss"]
    after = trainer(tmp_path, 1).validate(model, data, verbose=False)[0]["val/loss"]
    assert after < halfway < before
    write_export(tmp_path / "checkpoints" / "last.ckpt", tmp_path / "out", False, {})
    exported = load_swapped(tmp_path / "out").eval()
    batch = next(iter(data.val_dataloader()))
    with torch.no_grad():
        vectors = exported(input_ids=batch["tokens"], attention_mask=batch["mask"]).last_hidden_state
        weights = batch["mask"][..., None].float()
        pooled = F.normalize((vectors * weights).sum(1) / weights.sum(1), dim=-1)
        torch.testing.assert_close(pooled, model.eval()(batch))
    assert (tmp_path / "out/tokenizer.json").exists()
    assert "AutoModel.from_pretrained" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize(
    ("mixing", "layer_kinds", "length", "warns"),
    [
        ("dense", None, 48, True),
        ("dense", ["keep", "replace"], 48, True),
        ("exponential", None, 48, False),
        ("dense", None, 128, False),
    ],
)
def test_coefficients_that_no_training_text_reaches_are_named(
    texts: MiniTexts, bert: str, tmp_path: Path, mixing: Any, layer_kinds: list[str] | None, length: int, warns: bool
) -> None:
    attention = AttentionConfig(kind="mhla", block_size=16, mixing=mixing)
    options = {"layer_kinds": layer_kinds, "distillation": EncoderDistillation(teacher=bert)}
    model = encoder(bert, attention=attention, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(tmp_path, 1, limit_val_batches=0).fit(model, passages(texts, bert, length=length))
    messages = [str(warning.message) for warning in caught if "untrained coefficients" in str(warning.message)]
    assert bool(messages) is warns
    if warns:
        assert "8 blocks (128 tokens)" in messages[0]
        assert "at most 3 blocks (data.length=48)" in messages[0]


def test_padding_changes_no_embedding_and_no_loss(texts: MiniTexts, bert: str) -> None:
    model = encoder(bert).eval()
    model.configure_model()
    tokens = torch.randint(2, 250, (2, 21))
    narrow = {"tokens": tokens, "mask": torch.ones_like(tokens)}
    wide = {"tokens": F.pad(tokens, (0, 11), value=1), "mask": F.pad(narrow["mask"], (0, 11))}
    with torch.no_grad():
        torch.testing.assert_close(model(narrow), model(wide), atol=1e-5, rtol=1e-4)
        vectors, wanted = torch.randn(2, 2, 32, 32).unbind()
        mask = wide["mask"].bool()
        one = model.distances(vectors, wanted, mask)
        vectors = torch.where(mask[..., None], vectors, 1e3)
        other = model.distances(vectors, wanted, mask)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_distances_by_hand(bert: str) -> None:
    model = encoder(bert, distillation=EncoderDistillation(0, bert, 2.0, 0.0, 3.0))
    vectors, wanted = torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]]]), torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]]])
    distances = model.distances(vectors, wanted, None)
    variance = wanted.flatten().var()
    assert distances["tokens"] == pytest.approx((9 + 4) / 4 / variance)
    assert distances["embedding"] == pytest.approx(0.5)
    assert distances["similarity"] == pytest.approx(0.5)
    assert model._weighted(distances) == pytest.approx(2 * 13 / 4 / variance + 1.5)


def test_recall_counts_common_neighbors() -> None:
    pairs, teacher = EmbeddingPairs(), torch.randn(64, 16)
    pairs.update(teacher[:40], teacher[:40])
    pairs.update(teacher[40:] * 3, teacher[40:])
    assert pairs.compute()["recall_at_10"] == pairs.compute()["mixed_recall_at_10"] == 1
    pairs.reset()
    model = torch.randn(64, 16)
    pairs.update(model, teacher)
    normalized, reference = F.normalize(model, dim=-1), F.normalize(teacher, dim=-1)
    shares = []
    for row in range(64):
        others = [other for other in range(64) if other != row]
        by_model = sorted(others, key=lambda other: -float(normalized[row] @ normalized[other]))[:10]
        by_teacher = sorted(others, key=lambda other: -float(reference[row] @ reference[other]))[:10]
        shares.append(len(set(by_model) & set(by_teacher)) / 10)
    assert pairs.compute()["recall_at_10"] == pytest.approx(sum(shares) / 64)


def test_a_hybrid_starts_from_a_model_with_all_layers_replaced(texts: MiniTexts, bert: str, tmp_path: Path) -> None:
    model = encoder(bert)
    trainer(tmp_path, 2, callbacks=[ModelCheckpoint(tmp_path, save_last=True)], limit_val_batches=0).fit(
        model, passages(texts, bert)
    )
    hybrid = encoder(bert, layer_kinds=["keep", "replace"], distillation=EncoderDistillation(0, bert))
    hybrid._pretrained = str(tmp_path / "last.ckpt")
    hybrid.configure_model()
    names = [name for name in hybrid.network.state_dict() if ".swapped." in name]
    assert names
    assert all("layer.1." in name for name in names)
    assert all(torch.equal(hybrid.network.state_dict()[name], model.network.state_dict()[name]) for name in names)


def test_held_out_passages_are_drawn_from_all_of_them(texts: MiniTexts, bert: str) -> None:
    every, drawn = passages(texts, bert).source("validate"), passages(texts, bert, val_passages=30).source("validate")
    assert len(drawn) == 30
    assert len(every) > 200
    assert abs(every.groups.mean() - drawn.groups.mean()) < 0.5, "not the shortest ones"
    again = passages(texts, bert, val_passages=30).source("validate")
    assert all(torch.equal(drawn[index]["tokens"], again[index]["tokens"]) for index in range(30))


@pytest.mark.parametrize("name", ["ViT", "Dinov2"])
def test_image_encoders_take_other_sizes(name: str, tmp_path: Path) -> None:
    import transformers
    from mhla_tasks.classification.encoder import LinearizedImageEncoder

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    config = (
        getattr(transformers, f"{name}Config")(**sizes, intermediate_size=64)
        if name == "ViT"
        else transformers.Dinov2Config(**sizes)
    )
    original = getattr(transformers, f"{name}Model")(config).eval()
    original.save_pretrained(tmp_path)
    model = LinearizedImageEncoder(str(tmp_path), attention=AttentionConfig(kind="softmax")).eval()
    model.configure_model()
    mixed = LinearizedImageEncoder(str(tmp_path), attention=AttentionConfig(kind="mhla", block_grid=[2, 2])).eval()
    for size in (32, 48):
        images = torch.randn(2, 3, size, size)
        options = {"interpolate_pos_encoding": True} if name == "ViT" else {}
        with torch.no_grad():
            wanted = original(pixel_values=images, **options).last_hidden_state
            torch.testing.assert_close(model.encode(model.network, images), wanted, atol=1e-5, rtol=1e-4)
            assert mixed.encode(mixed.network, images).shape == wanted.shape


def test_mistakes_are_told(texts: MiniTexts, bert: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name it by --model"):
        trainer(tmp_path, 1).validate(
            encoder(bert, distillation=EncoderDistillation()), passages(texts, bert), verbose=False
        )
    with pytest.raises(ValueError, match="pooling='max' is not one of mean, first, head"):
        encoder(bert, pooling="max")
    with pytest.raises(ValueError, match="pooling=head is for encoders of timm"):
        encoder(bert, pooling="head")
    with pytest.raises(ValueError, match="must be positive"):
        EncoderDistillation(0, bert, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="length=256 is above the 128 tokens"):
        trainer(tmp_path, 1).validate(encoder(bert), passages(texts, bert, length=256), verbose=False)
    with pytest.raises(ValueError, match="lower min_characters"):
        passages(texts, bert, min_characters=10_000).source("train")
    with pytest.raises(ValueError, match="name the encoder to linearize"):
        LinearizedTextEncoder()
    assert isinstance(AutoModel.from_pretrained(bert), BertModel), "the original folder is unchanged"


def test_the_positions_of_roberta_begin_after_its_padding(texts: MiniTexts, tmp_path: Path) -> None:
    """Its table of 66 rows holds 64 positions; a longer text would end the training with an IndexError."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = RobertaConfig(vocab_size=len(texts.tokenizer), max_position_embeddings=66, pad_token_id=1, **sizes)
    RobertaModel(config).save_pretrained(tmp_path)
    texts.tokenizer.save_pretrained(tmp_path)
    for length in (64, 65):
        trainer = Trainer(accelerator="cpu", fast_dev_run=1, enable_progress_bar=False, enable_model_summary=False)
        data, module = passages(texts, str(tmp_path), length=length), encoder(str(tmp_path))
        if length == 65:
            with pytest.raises(ValueError, match="length=65 is above the 64 tokens that the encoder allows"):
                trainer.fit(module, data)
        else:
            trainer.fit(module, data)
            assert torch.isfinite(trainer.callback_metrics["train/loss"])


def test_rare_lengths_share_a_group(tmp_path: Path, bert: str) -> None:
    """Every passage is trained on in some epoch, also the few long ones; held-out ones keep their own length."""
    lines = ["word " * count for count in (*[10] * 9, 15, *[20] * 2, 40)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    where = str(tmp_path / "texts.jsonl")
    data = TextPassages(where, where, bert, length=128, batch_size=4)
    groups = data.source("train").groups
    assert (np.bincount(groups)[np.unique(groups)] >= 4).all()
    widths = [batch["tokens"].shape[1] for batch in data.train_dataloader()]
    assert max(widths) == 128
    assert len(set(data.source("validate").groups.tolist())) > len(set(groups.tolist()))


@pytest.mark.parametrize(
    ("lengths", "least", "wanted"),
    [
        ([1, 1, 1, 2, 5], 2, [1, 1, 1, 5, 5]),
        ([1, 1, 2, 2, 5], 2, [1, 1, 5, 5, 5]),
        ([3, 7], 4, [7, 7]),
        ([3, 7], 1, [3, 7]),
        ([1, 2, 3, 4, 4, 4], 3, [3, 3, 3, 4, 4, 4]),
        ([], 3, []),
    ],
    ids=str,
)
def test_merged_groups(lengths: list[int], least: int, wanted: list[int]) -> None:
    assert merged_groups(np.array(lengths, dtype=np.int64), least).tolist() == wanted


def test_a_few_batches_of_an_evaluation_are_of_all_lengths(tmp_path: Path, bert: str) -> None:
    """A validation of limited length must not see the shortest passages only."""
    lines = ["word " * count for count in range(10, 110)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    where = str(tmp_path / "texts.jsonl")
    data = TextPassages(where, where, bert, length=128, batch_size=4)
    batches = list(data.val_dataloader())
    widths = [batch["tokens"].shape[1] for batch in batches]
    assert len(set(widths[:4])) > 1
    assert widths != sorted(widths)
    assert sum(int(batch["valid"].sum()) for batch in batches) == 100
