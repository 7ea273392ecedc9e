"""Generation with swapped cross-attention, which reads the summaries of the encoder's keys in place of the keys."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_swap_cross import IDS, KINDS, logits, read, swapped, tiny
from torch import Tensor
from transformers import EncoderDecoderCache

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
