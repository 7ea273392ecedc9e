"""Chat with a language model in the terminal.

Replies are printed while they are generated, and the model keeps its state between turns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from lightning_mhla.system.processes import process_device
from mhla_tasks.commandline.console import harmless
from mhla_tasks.language.conversation import Conversation
from mhla_tasks.language.export import load_model
from mhla_tasks.language.lengths import generate_tokens
from mhla_tasks.language.networks import longest
from mhla_tasks.language.prompts import GenerationOptions, sampling_options
from mhla_tasks.language.streaming import TextPrinter
from mhla_tasks.language.tokenizer import pad_token

LONGEST = 512
"""Default maximum number of tokens in a reply."""

HELP = "/reset forgets the conversation, /exit or the end of the input (Ctrl-D) leaves, Ctrl-C stops a reply"


def chat(
    path: str, system: str | None, count: int | None, sampling: Mapping[str, Any], seed: int, device: str | None
) -> None:
    """Chat with a model in the terminal until the user enters ``/exit`` or the input ends.

    Args:
        path: path of a checkpoint, of a run's folder (for its latest checkpoint) or of an exported folder, or name of a model
            on the Hugging Face Hub.
        system: text of the system message; None for no system message.
        count: maximum number of tokens in a reply; None for 512.
        sampling: sampling options by name, such as ``temperature``. An option that is None or missing has the value that was
            saved with the model, or else its default in :class:`GenerationOptions`.
        seed: seed of sampling.
        device: ``"cpu"`` or ``"cuda"``; None for a GPU if there is one.

    Raises:
        FileNotFoundError: if there is no such model, or it has no tokenizer.
        ValueError: if an option is out of range, options contradict each other, or the chat template rejects the messages.
    """
    model, tokenizer = load_model(path)
    set_seed(seed)  # loading draws random numbers, more of them for a checkpoint than for an exported folder
    chatting = Chat(model.to(process_device(device)), tokenizer, system, LONGEST if count is None else count, sampling)
    interactive = sys.stdin.isatty()
    if not chatting.conversation.has_template:
        _note("the model has no chat template: it continues what you write")
    if interactive:
        _note(HELP)
    for text in _lines(interactive):
        if text == "/exit":
            return
        if text == "/reset":
            chatting.reset()
            _note("the conversation is forgotten")
        elif text.startswith("/"):
            _note(HELP)
        elif text:
            chatting.answer(text)


class Chat:
    """Conversation between a user and a model in the terminal; the state of the model is kept between turns.

    Args:
        model: causal language model.
        tokenizer: tokenizer of the model.
        system: text of the system message; None for no system message.
        count: maximum number of tokens in a reply.
        sampling: sampling options by name, such as ``temperature``. An option that is None or missing has the value that was
            saved with the model, or else its default in :class:`GenerationOptions`.

    Raises:
        ValueError: if an option is out of range, or the chat template does not accept a system message.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        system: str | None,
        count: int,
        sampling: Mapping[str, Any],
    ) -> None:
        self.model, self.tokenizer, self.system = model, tokenizer, system
        self.count = count
        self.sampling = GenerationOptions(count, **sampling_options(model.generation_config, sampling)).sampling()
        self.reset()

    def reset(self) -> None:
        """Start a new conversation, and discard the model's state."""
        self.conversation = Conversation(self.tokenizer, self.system)
        self.cache: Any = None
        self._seen: list[int] = []

    def answer(self, text: str) -> None:
        """Generate and print the reply to a user message, then print the time taken and the size of the model's state.

        Ctrl-C ends the reply early. If the conversation is too long for the model, a message to standard error says so, and
        there is no reply.

        Args:
            text: message of the user.

        Raises:
            ValueError: if the chat template rejects the messages.
        """
        ids = self.conversation.ask(text)
        limit = longest(self.model)
        # The last token of a reply is never an input, so it may exceed the limit by one.
        reply_limit = self.count if limit is None else min(self.count, limit - len(ids) + 1)
        if reply_limit < 1:
            self.conversation.take_back()
            self.cache = None
            _note(
                f"the conversation has {len(ids)} tokens, and the model reads at most {limit}: /reset begins a new one"
            )
            return
        streamer, start = TextPrinter(self.tokenizer, skip_prompt=True), time.perf_counter()
        stops = self._stops()
        try:
            self._generate(ids, reply_limit, stops, streamer)
        except KeyboardInterrupt:
            self.cache = None  # the state may be ahead of the conversation or behind it
            streamer.end()
        seconds = time.perf_counter() - start
        tokens = streamer.tokens[:-1] if streamer.tokens and streamer.tokens[-1] in stops else streamer.tokens
        self.conversation.reply(tokens)
        state_size = "" if self.cache is None else f", state of {_bytes(self.cache) / 2**20:.2f} MiB"
        total = len(self.conversation.ids)
        _note(f"{len(streamer.tokens)} tokens in {seconds:.1f} s; {total} tokens in the conversation{state_size}")

    def _generate(self, ids: list[int], reply_limit: int, stops: list[int], streamer: TextPrinter) -> None:
        rows = torch.tensor([ids], device=self.model.device)
        if self.cache is not None:
            # The state can only be continued by a longer conversation that begins with the tokens it has seen. A template may
            # change earlier turns, for example by omitting their reasoning.
            cached_ids = self._seen[: self.cache.get_seq_length()]
            if not cached_ids or len(cached_ids) >= len(ids) or ids[: len(cached_ids)] != cached_ids:
                self.cache = None
        output = generate_tokens(
            self.model,
            rows,
            torch.ones_like(rows),
            past_key_values=self.cache,
            streamer=streamer,
            max_new_tokens=reply_limit,
            eos_token_id=stops or None,
            pad_token_id=pad_token(self.tokenizer),
            return_dict_in_generate=True,
            **self.sampling,
        )
        self.cache, self._seen = output.past_key_values, output.sequences[0].tolist()

    def _stops(self) -> list[int]:
        """Return the indices of all tokens that end a reply: those of the model, of its tokenizer and of its chat template."""
        end_tokens = self.model.generation_config.eos_token_id
        listed = end_tokens if isinstance(end_tokens, list) else [end_tokens]
        stops = {*listed, self.tokenizer.eos_token_id, *self.conversation.stops} - {None}
        return sorted(stops)


def _bytes(cache: Any) -> int:
    """Return the size in bytes of a model's generation state or key-value cache."""
    if hasattr(cache, "bytes"):
        return int(cache.bytes)
    total = 0
    for layer in cache.layers:
        for value in vars(layer).values():
            if isinstance(value, Tensor):
                total += value.numel() * value.element_size()
            else:  # state of a layer whose attention was replaced
                total += int(getattr(value, "bytes", 0))
    return total


def _lines(interactive: bool) -> Iterator[str]:
    """Yield each line that the user enters, without surrounding whitespace, until the input ends.

    Args:
        interactive: whether the user types the lines in a terminal; if so, ``> `` is printed before each line.
    """
    if interactive:
        import readline  # noqa: F401  adds line editing and history to input()
    while True:
        try:
            yield input("> " if interactive else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n")


def _note(text: str) -> None:
    """Print a message to standard error, because standard output is reserved for the conversation."""
    from rich.console import Console

    Console(stderr=True, highlight=False, soft_wrap=True, style="dim").print(harmless(text), markup=False)
