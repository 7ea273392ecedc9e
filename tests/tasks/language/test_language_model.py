"""The language model: forms agree, padding never leaks, the loss is right, and what it cannot do is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mhla_tasks.language import MHLAConfig, MHLAForCausalLM, model
from mhla_tasks.language.loss import IGNORED, linear_cross_entropy, token_losses
from small import KINDS, greedy, small_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from lightning_mhla import GenerationCache

LENGTHS = (70, 33, 9)


def prompts(seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 320, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(seed))


def padded(ids: torch.Tensor, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows, mask = torch.ones_like(ids), torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        place = slice(ids.shape[1] - length, None) if side == "left" else slice(0, length)
        rows[row, place], mask[row, place] = ids[row, :length], 1
    return rows, mask


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("kind", [*KINDS, "hybrid"])
@pytest.mark.parametrize("first", [1, 8, 21])
@torch.no_grad()
def test_prefill_and_steps_give_the_logits_of_one_pass(kind: str, first: int) -> None:
    options = {"layer_kinds": ["mhla", "softmax"]} if kind == "hybrid" else {}
    network = small_model("dense" if kind == "hybrid" else kind, key_value_heads=2, **options).network
    ids = prompts()
    whole = network(ids).logits
    out = network(ids[:, :first], use_cache=True)
    parts, cache = [out.logits], out.past_key_values
    second = first + 17  # many tokens at once from the middle of a block, then one at a time
    parts.append(network(ids[:, first:second], past_key_values=cache).logits)
    parts += [network(ids[:, t : t + 1], past_key_values=cache).logits for t in range(second, ids.shape[1])]
    assert relative(torch.cat(parts, 1), whole) < 1e-4
    assert cache.lengths == (ids.shape[1],) * len(ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_prompts_give_what_each_gives_alone(kind: str, side: str) -> None:
    network = small_model(kind).network
    ids = prompts()
    rows, mask = padded(ids, side)
    together = network(rows, attention_mask=mask).logits
    for row, length in enumerate(LENGTHS):
        alone = network(ids[row : row + 1, :length]).logits[0]
        assert relative(together[row][mask[row].bool()], alone) < 1e-5
    network.config.eos_token_id = 0
    alone = [greedy(network, ids[row : row + 1, :length])[0] for row, length in enumerate(LENGTHS)]
    assert greedy(network, rows, attention_mask=mask) == alone
    assert greedy(network, rows, attention_mask=mask, use_cache=False) == alone


@pytest.mark.parametrize("kind", KINDS)
def test_beams_carry_their_states_along(kind: str) -> None:
    network = small_model(kind).network
    rows, mask = padded(prompts(), "left")
    options: dict[str, Any] = {"attention_mask": mask, "num_beams": 3}
    assert greedy(network, rows, **options) == greedy(network, rows, use_cache=False, **options)


@torch.no_grad()
def test_packed_documents_do_not_see_each_other() -> None:
    for kind in KINDS:
        network = small_model(kind).network
        ids = prompts()[:1]
        packed = network(ids, cu_seqlens=(0, 13, 13, 40, 70)).logits
        alone = torch.cat([network(ids[:, a:b]).logits for a, b in ((0, 13), (13, 40), (40, 70))], 1)
        assert relative(packed, alone) < 1e-5, kind


def test_loss_is_that_of_the_logits_and_so_are_its_gradients() -> None:
    network = small_model(tie_embeddings=False).network
    ids = prompts()
    rows, mask = padded(ids, "right")
    logits = network(rows, attention_mask=mask).logits
    targets = rows.masked_fill(mask == 0, IGNORED)
    wanted = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
    found = network(rows, attention_mask=mask, labels=rows).loss
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    parameters = list(network.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(found, parameters), torch.autograd.grad(wanted, parameters), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("targets", "rows"), [(100, 100), (60, 100), (40, 40)])
def test_ignored_tokens_are_left_out_of_the_softmax_if_they_are_most(
    targets: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To copy the logits of the targets takes longer than the softmax of a few more, and less long than that of most."""
    network, sizes = small_model().network, list[int]()
    compute = model.logits_cross_entropy

    def counted(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        sizes.append(len(scores))
        return compute(scores, labels)

    monkeypatch.setattr(model, "logits_cross_entropy", counted)
    ids = torch.randint(0, network.config.vocab_size, (1, 100))
    labels = ids.clone()
    labels[0, targets:] = IGNORED
    output = network(ids, shift_labels=labels, skip_logits=False)
    assert sizes == [rows]
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits[0], labels[0]), rtol=1e-5, atol=1e-5)


def test_loss_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mhla_tasks.language.loss.LOGITS", 7 * 50)
    hidden, weight = (torch.randn(n, 16, dtype=torch.float64, requires_grad=True) for n in (40, 50))
    targets = torch.randint(0, 50, (40,))
    targets[::5] = IGNORED
    logits = hidden @ weight.T
    wanted = F.cross_entropy(logits, targets)
    found = linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
    each = F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(token_losses(hidden, weight, targets).double(), each, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(
        torch.autograd.grad(3 * found, (hidden, weight)), torch.autograd.grad(3 * wanted, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert float(linear_cross_entropy(hidden, weight, torch.full_like(targets, IGNORED))) == 0


def test_loss_keeps_its_gradient_in_half_precision() -> None:
    """Divided by the number of tokens too early, most of the softmax would be zeros."""
    hidden, weight = (torch.randn(n, 32, requires_grad=True) for n in (20_000, 300))
    targets = torch.randint(0, 300, (20_000,))
    scale = 2.0**16  # of the loss, as mixed precision sets it
    wanted = torch.autograd.grad(scale * F.cross_entropy(hidden @ weight.T, targets), (hidden, weight))
    halves = [x.detach().half().requires_grad_() for x in (hidden, weight)]
    found = torch.autograd.grad(scale * linear_cross_entropy(*halves, targets), halves)
    for ours, theirs in zip(found, wanted, strict=True):
        assert float((ours.float() - theirs).norm() / theirs.norm()) < 5e-3


@torch.no_grad()
def test_generation_goes_on_from_a_state() -> None:
    network = small_model().network
    ids = prompts()[:, :30]
    cache = GenerationCache(2)
    network(ids[:, :21], past_key_values=cache)
    assert greedy(network, ids, past_key_values=cache) == greedy(network, ids)
    with pytest.raises(ValueError, match="the state has seen 41 tokens, but input_ids holds 30"):
        network.generate(ids, past_key_values=cache, max_new_tokens=2)
    embedded = network.embedding(ids)
    tokens = network.generate(inputs_embeds=embedded, max_new_tokens=12, do_sample=False, pad_token_id=1)
    assert tokens.tolist() == greedy(network, ids)


@pytest.mark.parametrize("kind", [*KINDS, "hybrid"])
@torch.no_grad()
def test_saved_and_loaded_through_auto_classes(kind: str, tmp_path: Path) -> None:
    options = {"layer_kinds": ["mhla", "linear"]} if kind == "hybrid" else {}
    network = small_model("dense" if kind == "hybrid" else kind, value_width=16, **options).network
    network.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is MHLAForCausalLM
    assert torch.equal(loaded(prompts()).logits, network(prompts()).logits)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.embedding.weight.dtype == torch.bfloat16
    assert {p.dtype for name, p in half.named_parameters() if "mixing" in name} <= {torch.float32}


@torch.no_grad()
def test_extended_models_do_the_same_on_short_sequences_and_more_on_long_ones(tmp_path: Path) -> None:
    network = small_model("dense", context=64).network
    ids = torch.randint(2, 320, (2, 150))
    before = network(ids[:, :64]).logits
    with pytest.raises(ValueError, match=r"150 tokens are more than the 64 .* exponential"):
        network(ids)
    network.extend(150)
    assert torch.equal(network(ids[:, :64]).logits, before)
    long = network(ids).logits
    network.save_pretrained(tmp_path)
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, long)
    free = small_model("exponential", context=64).network
    assert free(ids).logits.shape == (2, 150, 320)


@torch.no_grad()
def test_a_state_has_the_same_size_at_any_length() -> None:
    sizes = {}
    for kind in KINDS:
        network = small_model(kind).network
        cache, growth = GenerationCache(2), []
        for _ in range(3):
            network(torch.randint(2, 320, (1, 64)), past_key_values=cache)
            growth.append(cache.bytes)
        sizes[kind] = growth
    assert all(len(set(sizes[kind])) == 1 for kind in set(KINDS) - {"dense", "learned", "softmax"})
    assert sizes["softmax"][0] < sizes["softmax"][-1]


def test_model_refuses() -> None:
    network = small_model("dense", context=64).network
    with pytest.raises(ValueError, match="the prompt is empty"):
        network(torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="row 1 is empty"):
        network(torch.ones(2, 4, dtype=torch.long), attention_mask=torch.tensor([[1] * 4, [0] * 4]))
    with pytest.raises(ValueError, match="token 320 is not in the vocabulary of 320"):
        network(torch.full((1, 4), 320))
    with pytest.raises(ValueError, match="token -1 is not in the vocabulary"):
        network.generate(torch.full((1, 4), -1))
    with pytest.raises(ValueError, match=r"a prompt of 60 tokens and 20 new ones are more than the 64"):
        network.generate(torch.ones(1, 60, dtype=torch.long), max_new_tokens=20)
    with pytest.raises(ValueError, match="packed sequences"):
        network(torch.ones(1, 4, dtype=torch.long), cu_seqlens=(0, 2, 4), use_cache=True)
    with pytest.raises(ValueError, match="give one of the two"):
        network(torch.ones(1, 4, dtype=torch.long), attention_mask=torch.ones(1, 4), cu_seqlens=(0, 2, 4))
    with pytest.raises(ValueError, match="attention lists 1 layers, but depth=2"):
        MHLAForCausalLM(MHLAConfig(dim=16, depth=2, heads=2, attention=[{"kind": "linear"}]))
    with pytest.raises(ValueError, match="its length must divide depth=2"):
        small_model(layer_kinds=["mhla", "mhla", "softmax"])


@torch.no_grad()
def test_the_loss_of_padded_rows_is_that_of_the_rows_alone() -> None:
    network, ids = small_model().network, prompts()
    alone = [network(ids[row : row + 1, :n], labels=ids[row : row + 1, :n]).loss for row, n in enumerate(LENGTHS)]
    wanted = sum(float(loss) * (n - 1) for loss, n in zip(alone, LENGTHS, strict=True)) / sum(n - 1 for n in LENGTHS)
    for side in ("left", "right"):
        rows, mask = padded(ids, side)
        assert float(network(rows, attention_mask=mask, labels=rows).loss) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("rows", [1, len(LENGTHS)])
@torch.no_grad()
def test_positions_may_include_those_of_earlier_tokens(rows: int) -> None:
    """Positions of all columns, of which the last ones belong to the new tokens."""
    network, ids = small_model("exponential").network, prompts()
    whole = network(ids).logits
    positions = torch.arange(ids.shape[1]).expand(rows, -1)
    cache = network(ids[:, :60], use_cache=True).past_key_values
    for part in (slice(60, 67), slice(67, 68), slice(68, None)):
        out = network(ids[:, part], past_key_values=cache, position_ids=positions[:, : part.stop])
        assert relative(out.logits, whole[:, part]) < 1e-4


def test_weights_start_with_the_deviation_asked_for() -> None:
    for wanted in (0.2, 0.01):
        network = small_model(initializer_range=wanted, tie_embeddings=False).network
        for weight in (network.embedding.weight, network.head.weight, network.backbone.layers[0].mlp.fc1_g.weight):
            assert float(weight.detach().std()) == pytest.approx(wanted, rel=0.1)
