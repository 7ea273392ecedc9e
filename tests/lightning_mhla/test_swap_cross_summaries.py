"""Generation with swapped cross-attention, which reads the summaries of the encoder's keys in place of the keys."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from test_swap_cross import IDS, KINDS, logits, read, swapped, tiny
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from lightning_mhla.attention import AttentionConfig

STEPS = 11
OPTIONS: dict[str, Any] = {
    "max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False, "return_dict_in_generate": True, "output_logits": True,
}  # fmt: skip
FAMILIES = ("T5", "Bart", "Whisper", "Marian")


def double(family: str, config: AttentionConfig = KINDS[0]) -> Any:
    return swapped(tiny(family).double(), config)


def inputs_of(model: Any, columns: int = 11) -> dict[str, Tensor]:
    """Return two rows, of which the second is padded, or two sounds."""
    return {name: x.double() if x.is_floating_point() else x for name, x in read(model, columns).items()}


def first() -> Tensor:
    return torch.full((2, 1), 3)


@torch.no_grad()
def written_with_cache(model: Any, inputs: dict[str, Tensor], tokens: Tensor) -> tuple[Tensor, EncoderDecoderCache]:
    """Return the logits of tokens that the decoder takes one at a time, and its cache."""
    cache, rows = None, []
    for position in range(tokens.shape[1]):
        out = model(
            **inputs, decoder_input_ids=tokens[:, position : position + 1], past_key_values=cache, use_cache=True
        )
        cache, _ = out.past_key_values, rows.append(out.logits)
    return torch.cat(rows, 1), cache


@pytest.mark.parametrize("config", KINDS, ids=IDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_generated_logits_and_beams_are_those_of_complete_passes(family: str, config: AttentionConfig) -> None:
    model = double(family, config)
    inputs = inputs_of(model)
    made = {}
    for beams in (1, 3):
        for cache in (True, False):
            rows: list[Tensor] = []  # generate itself converts logits to float32
            hook = model.register_forward_hook(lambda module, args, out, rows=rows: rows.append(out.logits[:, -1]))
            out = model.generate(**inputs, decoder_input_ids=first(), use_cache=cache, num_beams=beams, **OPTIONS)
            hook.remove()
            made[beams, cache] = out.sequences, torch.stack(rows, 1)
        assert torch.equal(made[beams, True][0], made[beams, False][0])
        torch.testing.assert_close(made[beams, True][1], made[beams, False][1], rtol=1e-9, atol=1e-9)
    assert made[1, True][1].dtype == torch.float64


MAPS = [AttentionConfig(block_size=4, feature_map=name) for name in ("learned", "sana", "softplus")]


@pytest.mark.parametrize("config", [*KINDS, *MAPS], ids=[*IDS, "learned", "sana", "softplus"])
def test_no_key_of_the_encoder_is_read_after_the_second_token(config: AttentionConfig) -> None:
    """NaN in the cached keys and values changes nothing, across the ends of blocks."""
    model = double("Bart", config)
    inputs, tokens = inputs_of(model), torch.randint(4, 99, (2, STEPS), generator=torch.Generator().manual_seed(5))
    want, _ = written_with_cache(model, inputs, tokens)
    got, cache = written_with_cache(model, inputs, tokens[:, :2])
    for layer in cache.cross_attention_cache.layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    with torch.no_grad():
        for position in range(2, STEPS):
            out = model(
                **inputs, decoder_input_ids=tokens[:, position : position + 1], past_key_values=cache, use_cache=True
            )
            got = torch.cat([got, out.logits], 1)
    assert torch.equal(got, want)
    complete = logits(model, inputs, tokens, use_cache=False)
    torch.testing.assert_close(got, complete, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_text_is_not_read_by_the_summaries_of_the_first(family: str) -> None:
    model = double(family)
    second = {name: x.flip(0) if x.is_floating_point() else x for name, x in inputs_of(model).items()}
    if "input_ids" in second:
        second["input_ids"] = second["input_ids"].flip(0)
    fresh = copy.deepcopy(model).generate(**second, decoder_input_ids=first(), **OPTIONS)
    model.generate(**inputs_of(model), decoder_input_ids=first(), **OPTIONS)
    again = model.generate(**second, decoder_input_ids=first(), **OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(again.logits, fresh.logits, strict=True))


@pytest.mark.parametrize("change", ["reorder", "repeat", "select", "mask"])
def test_rows_of_a_cache_take_their_summaries_along(change: str) -> None:
    model = double("T5")
    inputs, tokens = inputs_of(model), torch.randint(4, 99, (2, 6), generator=torch.Generator().manual_seed(5))
    _, cache = written_with_cache(model, inputs, tokens[:, :4])
    rows = {"reorder": [1, 1], "repeat": [0, 0, 1, 1], "select": [1], "mask": [1]}[change]
    if change == "reorder":
        cache.reorder_cache(torch.tensor(rows))
    elif change == "repeat":
        cache.batch_repeat_interleave(2)
    else:
        cache.batch_select_indices(torch.tensor(rows) if change == "select" else torch.tensor([False, True]))
    for layer in cache.cross_attention_cache.layers:
        layer.keys.fill_(torch.nan)
    chosen = {name: x[rows] for name, x in inputs.items()}
    want = logits(model, chosen, tokens[rows], use_cache=False)[:, 4:]
    with torch.no_grad():
        out = model(**chosen, decoder_input_ids=tokens[rows, 4:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)


def test_a_changed_mask_or_a_cache_that_is_used_again_is_not_read_by_old_summaries() -> None:
    model = double("Bart")
    inputs, tokens = inputs_of(model), torch.randint(4, 99, (2, 6), generator=torch.Generator().manual_seed(5))
    _, cache = written_with_cache(model, inputs, tokens[:, :5])
    other = copy.deepcopy(inputs)
    other["attention_mask"][0, 4:] = 0
    with torch.no_grad():
        # one pass over the same tokens computes no summaries, so that the next token makes them with its own mask
        filled = model(**inputs, decoder_input_ids=tokens[:, :5], use_cache=True).past_key_values
        outs = [
            model(**other, decoder_input_ids=tokens[:, 5:], past_key_values=x, use_cache=True).logits
            for x in (cache, filled)
        ]
    torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-9)
    assert not torch.equal(outs[0][0], logits(model, inputs, tokens, use_cache=False)[0, 5:]), "the mask is ignored"
    cache.reset()
    second = {"input_ids": inputs["input_ids"].flip(0), "attention_mask": inputs["attention_mask"]}
    rows = []
    for position in range(6):
        with torch.no_grad():
            call = {
                "decoder_input_ids": tokens[:, position : position + 1],
                "past_key_values": cache,
                "use_cache": True,
            }
            rows.append(model(**second, **call).logits)
    want = logits(model, second, tokens, use_cache=False)
    torch.testing.assert_close(torch.cat(rows, 1), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rows", ["reorder", "repeat", "select"])
@pytest.mark.parametrize("change", ["update", "crop"])
@torch.no_grad()
def test_summaries_of_former_keys_are_not_read_after_rows_change(change: str, rows: str) -> None:
    """The keys change, before or after a further token, and then the rows; a cache that was never read has the same keys."""
    model = double("Bart")
    inputs, tokens = {"input_ids": inputs_of(model)["input_ids"]}, torch.randint(4, 99, (2, 6))
    for reads in (False, True):
        _, cache = written_with_cache(model, inputs, tokens[:, :4])
        for index, layer in enumerate(cache.cross_attention_cache.layers):
            more = torch.randn(2, 2, 4, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(index))
            if change == "update":
                cache.cross_attention_cache.update(more[0], more[1], index)
            else:
                layer.crop(-4)
        if reads:
            model(decoder_input_ids=tokens[:, 4:5], encoder_outputs=encoded(model, inputs), past_key_values=cache)
        if rows == "reorder":
            cache.reorder_cache(torch.tensor([1, 0]))
        elif rows == "repeat":
            cache.batch_repeat_interleave(2)
        else:
            cache.batch_select_indices(torch.tensor([1]))
        unread = EncoderDecoderCache(copy.deepcopy(cache.self_attention_cache), DynamicCache())
        for index, layer in enumerate(cache.cross_attention_cache.layers):
            unread.cross_attention_cache.update(layer.keys, layer.values, index)
            unread.is_updated[index] = True
        batch = len(cache.cross_attention_cache.layers[0].keys)
        call = {
            "decoder_input_ids": tokens[:1, 5:].expand(batch, -1),
            "encoder_outputs": (torch.zeros(batch, 11, 32).double(),),
        }
        outs = [model(**call, past_key_values=x).logits for x in (cache, unread)]
        torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-9)


def encoded(model: Any, inputs: dict[str, Tensor]) -> Any:
    return model.get_encoder()(**inputs)


@torch.no_grad()
def test_rows_of_an_empty_cache_change_nothing() -> None:
    """A cache that was read, and one whose layers were never read, after reset; both are then used again."""
    model = double("T5")
    inputs, tokens = inputs_of(model), torch.randint(4, 99, (2, 6), generator=torch.Generator().manual_seed(5))
    want = logits(model, inputs, tokens, use_cache=False)
    for columns in (1, 4):
        _, cache = written_with_cache(model, inputs, tokens[:, :columns])
        cache.reset()
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(3)
        cache.batch_select_indices(torch.tensor([True, False]))
        assert cache.get_seq_length() == 0
        outs = [model(**inputs, decoder_input_ids=tokens[:, i : i + 1], past_key_values=cache).logits for i in range(6)]
        torch.testing.assert_close(torch.cat(outs, 1), want, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_copies_of_a_cache_and_of_a_model_continue() -> None:
    """A copied and a pickled cache, and a copy of the model whose summaries those of the cache are not."""
    model = double("Bart")
    inputs, tokens = inputs_of(model), torch.randint(4, 99, (2, 6), generator=torch.Generator().manual_seed(5))
    want = logits(model, inputs, tokens, use_cache=False)[:, 4:]
    _, cache = written_with_cache(model, inputs, tokens[:, :4])
    copied_model = copy.deepcopy(model)
    pairs = [(model, copy.deepcopy(cache)), (model, pickle.loads(pickle.dumps(cache))), (copied_model, cache)]
    for reader, copied in pairs:
        out = reader(**inputs, decoder_input_ids=tokens[:, 4:], past_key_values=copied, use_cache=True).logits
        torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)
