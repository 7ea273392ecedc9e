"""Continuation of prompts in the terminal, printed token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import set_seed

from lightning_mhla.system.processes import process_device
from mhla_tasks.language.export import load_model
from mhla_tasks.language.lengths import generate_tokens
from mhla_tasks.language.networks import longest
from mhla_tasks.language.prompts import GenerationOptions, sampling_options
from mhla_tasks.language.streaming import TextPrinter
from mhla_tasks.language.tokenizer import left_padded

LONGEST = 256
"""Default maximum number of new tokens."""


def continue_prompts(
    path: str, prompt: str | None, count: int | None, sampling: Mapping[str, Any], seed: int, device: str | None
) -> None:
    """Generate and print continuations of a given prompt, or of the prompts that the user types.

    Each continuation is printed after its prompt.

    Args:
        path: path of a checkpoint, of a run's folder (for its latest checkpoint) or of an exported folder, or name of a model
            on the Hugging Face Hub.
        prompt: text to continue; None to read prompts from the terminal, one after the other.
        count: maximum number of new tokens; None for 256, or fewer if the model's length limit is lower.
        sampling: options of :class:`GenerationOptions` by name, except ``max_new_tokens``. An option that is None or missing
            has the value that was saved with the model, or else its default in this class.
        seed: seed of sampling.
        device: ``"cpu"`` or ``"cuda"``; None for a GPU if there is one.

    Raises:
        FileNotFoundError: if there is no such model, or it has no tokenizer.
        ValueError: if an option is out of range, or a prompt has no tokens or is too long.
    """
    model, tokenizer = load_model(path)
    set_seed(seed)  # loading draws random numbers, more of them for a checkpoint than for an exported folder
    torch_device = process_device(device)
    model = model.to(torch_device)
    chosen = sampling_options(model.generation_config, sampling)
    # Reports a wrong option before the first prompt is typed.
    GenerationOptions(LONGEST if count is None else count, **chosen)
    for text in _prompts(prompt):
        ids, mask = (x.to(torch_device) for x in left_padded(tokenizer, [text], bool(sampling.get("control_tokens"))))
        new_tokens = count
        if new_tokens is None:
            limit = longest(model)
            # The last new token is not an input.
            new_tokens = LONGEST if limit is None else max(1, min(LONGEST, limit - ids.shape[1] + 1))
        options = GenerationOptions(new_tokens, **chosen).for_generate()
        streamer = TextPrinter(tokenizer, skip_prompt=False)
        generate_tokens(model, ids, mask, streamer=streamer, **options)


def _prompts(single_prompt: str | None) -> Iterator[str]:
    if single_prompt is not None:
        yield single_prompt
        return
    while True:
        try:
            prompt = input("> ")
        except (EOFError, KeyboardInterrupt):
            return
        if prompt:
            yield prompt
