"""A pretrained language model with replaced attention: what near tokens, sinks and MHLA contribute, at equal training.

    lightning bench real_texts --out texts
    lightning bench real_language smollm2 --texts texts --rows softmax mhla_window --out benchmarks/results
    lightning bench real_language smollm2 --texts texts --rows softmax mhla_window --steps 60 240 --out benchmarks/results
    lightning bench real_language smollm2 --texts texts --rows softmax mhla_window --seed 1 --long --out benchmarks/results
    lightning bench real_language smollm2 --texts texts --rows mhla_window --lora 8 --distill 1 --out benchmarks/results
    lightning bench real_language smollm2 --texts texts --rows softmax mhla_window --steps 60 480 --curve 5 \
        --out benchmarks/results

Each row replaces the attention of the model in one way, matches the new layers to the original ones, trains all weights on the
documents, and measures the perplexity of held-out documents at 1,024 and 4,096 tokens. The row softmax is the control: the
original model, trained on as many batches. Its batches begin with those on which other rows match their layers. With
``--long``, the trained model also reads 8,192 to 32,768 tokens of held-out documents, one after the other, and is asked for a
number that stands in one sentence between them. ``--lora``, ``--distill``, ``--weights``, ``--length`` and the learning rates
vary the recipe. ``--curve`` measures the perplexity during training, too, at a constant learning rate; a run that is stopped
keeps the measurements so far. Computed with one thread, in bfloat16 autocast.
"""

# Longer than other modules because rows, recipe, measurements and picture of one study belong together.

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mhla_kernels.attention import without_autocast
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.machine import describe
from lightning_mhla import AttentionConfig, swap_attention
from lightning_mhla.attention.features import LearnedFeatures
from lightning_mhla.attention.inputs import AttentionInputs
from lightning_mhla.swap import layer_costs, swapped_layers, transfer_loss
from lightning_mhla.swap.adapters import LoraOptions, choose_trained
from lightning_mhla.system.figures import make_panels
from lightning_mhla.system.files import write_json
from lightning_mhla.system.modes import evaluation_mode

WINDOW: dict[str, Any] = {"kind": "mhla_window", "block_size": 128, "mixing": "exponential", "feature_map": "learned"}
"""Window of 128 to 256 tokens, and MHLA before it."""

FAR: dict[str, Any] = {"sinks": 4, "far_init": -4.0, "feature_positions": 1}
"""Options of the rows with MHLA for far tokens, whose features do not depend on positions."""

NOT_FAR: dict[str, Any] = {"sinks": 4, "far_init": -math.inf}
"""Options of the rows that read near tokens only."""

ROWS: dict[str, dict[str, Any] | None] = {
    "softmax": None,
    "mhla_window": {**WINDOW, "options": FAR},
    "mhla_window positions": {**WINDOW, "options": {**FAR, "feature_positions": None}},
    "window": {**WINDOW, "options": NOT_FAR},
    "window without sinks": {**WINDOW, "options": {**NOT_FAR, "sinks": 0}},
    "mhla_window 256": {**WINDOW, "block_size": 256, "options": FAR},
    "mhla_window 512": {**WINDOW, "block_size": 512, "options": FAR},
    "mhla_window 64": {**WINDOW, "block_size": 64, "options": FAR},
    "window 64": {**WINDOW, "block_size": 64, "options": NOT_FAR},
    "mhla_window 32": {**WINDOW, "block_size": 32, "options": FAR},
    "window 32": {**WINDOW, "block_size": 32, "options": NOT_FAR},
    "mhla_window frozen": {**WINDOW, "mixing_trainable": False, "options": FAR},
    "mhla_window uniform": {
        **WINDOW, "mixing": "dense", "mixing_init": "uniform", "mixing_trainable": False, "options": FAR,
    },
    "mhla_window dense": {**WINDOW, "mixing": "dense", "options": FAR},
    "mhla_window norms": {**WINDOW, "options": FAR},
    "mhla": {**WINDOW, "kind": "mhla"},
    "linear": {"kind": "linear", "feature_map": "learned"},
}  # fmt: skip
"""Options of the new attention by row; None for the original one. A number is the block size, if it is not 128. In the row
"mhla_window norms", features keep the norms of queries and keys (:class:`NormKeepingFeatures`)."""

CONTEXT = 1024
"""Tokens of a training sample, unless ``--length`` gives others for the second stage."""

HELD_OUT = {1024: 8, 4096: 3}
"""Held-out documents by the number of tokens that are read of each."""

LONG = (8192, 16_384, 32_768)
"""Tokens of the long texts, each the beginning of all held-out documents that are longer than 1,024 tokens."""

NEEDLES = {1024: 20, 4096: 5, 8192: 5}
"""Texts with a hidden number by their length in tokens; the number stands at equally spaced places."""

NEEDLE, QUESTION = "\n\nThe access code of the archive is {}.\n\n", "\n\nThe access code of the archive is"
"""Sentence with the hidden number, and the beginning of that sentence at the end of the text."""

HEAD_CHUNK = 2048
"""Tokens whose scores of all words are in memory at once."""

COST_DOCUMENTS = 2
"""Documents on which the cost of replacing each layer is measured."""

DRAWN, LARGEST_DRAWN = ("softmax", "mhla_window", "window", "linear"), 50.0
"""Rows of the picture, without those that have a higher perplexity."""

STEPS = (24, 40)
"""Optimizer steps of the two stages: matching the layers, and training all weights."""

RECIPE: dict[str, tuple[float, str]] = {
    "match_lr": (0.03, "learning rate of the first stage"),
    "tune_lr": (1e-4, "learning rate of the second stage"),
    "new_lr": (10.0, "learning rate of what was added in the second stage, as a multiple of tune_lr"),
    "length": (CONTEXT, "tokens of a sample of the second stage"),
    "lora": (0, "rank of adapters to train in place of all weights in the second stage, 0 for all weights"),
    "distill": (0.0, "weight of the divergence from the original's predictions in the second stage, 0 for none"),
    "choose": (
        0,
        "tokens of two training documents on which layers are chosen for --keep, 0 for held-out ones of 1,024",
    ),
    "weights": (0.0, "weight of the cross-entropy of attention weights in the first stage, 0 for none"),
    "curve": (
        0,
        "number of measurements in the second stage, each after twice the steps of the one before it; 0 for one",
    ),
}
"""Default and help of the options that vary the training."""

LOWEST_LR = 0.05
"""Share of the peak learning rate at the end of the cosine schedule."""

SMALLEST_WEIGHT = 1e-6
"""Attention weight below which the cross-entropy of attention weights does not grow."""


class NormKeepingFeatures(LearnedFeatures):
    """Learned features whose norm is that of the query or key that they come from.

    The idea is that of the norm-preserving features of STILL (arXiv 2602.02180): the learned map gives the direction only, and
    the norm, which says how sharply softmax would attend, is that of the original.
    """

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute features as :class:`LearnedFeatures` does; the logarithm of the divisor of each query is 0."""
        f, divisor, g = super().forward(q, k)
        f, g = (
            F.normalize(features, dim=-1) * x.to(features.dtype).norm(dim=-1, keepdim=True)
            for features, x in ((f, q), (g, k))
        )
        return f, torch.zeros_like(divisor), g


def read_tokens(texts: Path, stage: str, tokenizer: Any) -> list[Tensor]:
    """Return the tokens of all documents of a stage, ``[N]`` each, in random order."""
    lines = (texts / f"documents-{stage}.jsonl").read_text().splitlines()
    documents = [json.loads(line)["text"] for line in lines]
    random.Random(0).shuffle(documents)
    return [torch.tensor(tokenizer(document).input_ids) for document in documents]


def batches(stream: Tensor, seed: int, length: int = CONTEXT) -> Iterator[Tensor]:
    """Yield random pieces of the training text, ``[1, length + 1]``, the same for every row with the same seed."""
    source = random.Random(seed)
    while True:
        start = source.randrange(len(stream) - length - 1)
        yield stream[start : start + length + 1][None]


def autocast() -> torch.autocast:
    """Return a context manager in which products are computed in bfloat16."""
    return torch.autocast("cpu", torch.bfloat16)


@torch.no_grad()
def losses(model: Any, documents: list[Tensor], tokens: int) -> Tensor:
    """Return the mean loss at each of ``tokens`` positions over held-out documents, in nats."""
    total = torch.zeros(tokens, dtype=torch.float64)
    for document in documents:
        with autocast():
            hidden = model.model(document[None, :tokens], use_cache=False).last_hidden_state[0]
            parts = zip(hidden.split(HEAD_CHUNK), document[1 : tokens + 1].split(HEAD_CHUNK), strict=True)
            values = [F.cross_entropy(model.lm_head(part).float(), words, reduction="none") for part, words in parts]
        total += torch.cat(values).double()
    return total / len(documents)


def perplexities(model: Any, held_out: dict[int, list[Tensor]]) -> dict[str, list[float]]:
    """Return the perplexity by length, and in each quarter of the positions: ``[all, first, second, third, fourth]``."""
    result = {}
    for tokens, documents in held_out.items():
        mean = losses(model, documents, tokens)
        result[str(tokens)] = [math.exp(part.mean()) for part in (mean, *mean.chunk(4))]
    return result


@torch.no_grad()
def recall(model: Any, tokenizer: Any, text: Tensor, tokens: int, count: int) -> dict[str, float]:
    """Hide a number in a text and ask for it: share of digits, and of complete numbers, that get the highest score.

    Args:
        model: language model.
        tokenizer: its tokenizer, which must make one token of each digit.
        text: tokens between which the number is hidden, ``[N]``.
        tokens: number of tokens of the complete text, at most N.
        count: number of texts; the number stands at another of ``count`` equally spaced places in each.
    """
    source, digits, numbers = random.Random(0), 0, 0
    for place in range(count):
        code = str(source.randrange(10_000, 100_000))
        needle, question, answer = (
            torch.tensor(tokenizer(words).input_ids) for words in (NEEDLE.format(code), QUESTION, " " + code)
        )
        rest = tokens - len(needle) - len(question) - len(answer)
        begin = place * (len(text) - rest) // count
        hay, depth = text[begin : begin + rest], round((place + 0.5) / count * rest)
        read = torch.cat([hay[:depth], needle, hay[depth:], question, answer])
        with autocast():
            hidden = model.model(read[None, :-1], use_cache=False).last_hidden_state[0, -len(code) :]
            right = model.lm_head(hidden).argmax(-1) == read[-len(code) :]
        digits, numbers = digits + int(right.sum()), numbers + int(right.all())
    return {"texts": count, "digits": digits / (5 * count), "numbers": numbers / count}


def read_long(model: Any, tokenizer: Any, text: Tensor) -> dict[str, Any]:
    """Return the perplexities on long texts, as :func:`perplexities`, and the recall of hidden numbers, by length."""
    return {
        "perplexity": perplexities(model, {tokens: [text[: tokens + 1]] for tokens in LONG}),
        "needle": {str(tokens): recall(model, tokenizer, text, tokens, count) for tokens, count in NEEDLES.items()},
    }


def weight_distance(inputs: AttentionInputs, compute: Callable[[AttentionInputs], Tensor]) -> Tensor:
    """Return the cross-entropy between the weights of softmax and those of a replaced layer, in nats, averaged over queries.

    Args:
        inputs: queries, keys and values of the layer.
        compute: function that computes the new attention of the layer, which is causal. Its outputs for one-hot values are its
            weights.
    """
    with without_autocast("cpu"):
        units = torch.eye(inputs.v.shape[1])[None, :, None].expand(*inputs.v.shape[:3], -1)
        inputs = replace(inputs, q=inputs.q.float(), k=inputs.k.float(), v=units)
        q, k = inputs.q.transpose(1, 2), inputs.k.transpose(1, 2)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        right = scores.masked_fill(later, -math.inf).softmax(-1)
        weights = compute(inputs).transpose(1, 2)
        return -(right * weights.clamp(min=SMALLEST_WEIGHT).log()).sum(-1).mean()


def matching_loss(model: Any, batch: Tensor, weight: float) -> Tensor:
    """Return the loss of the first stage: the distance of outputs, and ``weight`` times the cross-entropy of weights."""
    distances: list[Tensor] = []
    layers = swapped_layers(model).values() if weight else ()

    def attend(inputs: AttentionInputs, compute: Callable[[AttentionInputs], Tensor]) -> Tensor:
        distances.append(checkpoint(partial(weight_distance, inputs, compute), use_reentrant=False))
        return compute(inputs)

    for layer in layers:
        layer.attend = partial(attend, compute=layer.attend)  # type: ignore[method-assign]
    try:
        with autocast():
            loss = transfer_loss(model, lambda: model.model(batch[:, :-1], use_cache=False))
    finally:
        for layer in layers:
            del layer.attend  # the method of the class again
    return loss + weight * torch.stack(distances).mean() if distances else loss


def measured_steps(steps: int, count: int) -> list[int]:
    """Return ``count`` numbers of steps, each half of the next, and the last ``steps``."""
    return [steps // 2 ** (count - number) for number in range(1, count + 1)]


def train(
    parameters: list[dict[str, Any]],
    steps: int,
    loss_of: Callable[[Tensor], Tensor],
    data: Iterator[Tensor],
    measured: Callable[[int, float], None] | None = None,
) -> float:
    """Train with AdamW and warm-up, and return the seconds of this process.

    Args:
        parameters: groups of parameters of the optimizer.
        steps: number of optimizer steps.
        loss_of: function that returns the loss of a batch.
        data: batches.
        measured: function that is called after each step with the number of steps and of seconds so far; its own seconds do not
            count. The learning rate then stays constant after warm-up, so that each step could be the last one. With None, the
            learning rate falls by a cosine.
    """
    seconds, optimizer = 0.0, torch.optim.AdamW(parameters, weight_decay=0.0, betas=(0.9, 0.95))
    warmup = max(1, (STEPS[1] if measured else steps) // 10)

    def rate(step: int) -> float:
        done = 0.0 if measured else max(0, step - warmup) / max(1, steps - warmup)
        return min(1.0, (step + 1) / warmup) * (LOWEST_LR + (1 - LOWEST_LR) * 0.5 * (1 + math.cos(math.pi * done)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    trained = [parameter for group in parameters for parameter in group["params"]]
    for step, batch in zip(range(1, steps + 1), data, strict=False):
        begin = time.process_time()
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        seconds += time.process_time() - begin
        if measured:
            measured(step, seconds)
    return seconds


def load(source: str) -> Any:
    """Load the model in float32, in evaluation mode."""
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, trust_remote_code=False).eval()


def choose_layers(model: Any, documents: list[Tensor], keep: float) -> list[int]:
    """Return the layers whose replacement alone costs most, a share ``keep`` of all."""
    tokens = len(documents[0]) - 1
    costs = layer_costs(model, lambda: losses(model, documents, tokens).mean().item())
    return costs.worst(round(keep * len(swapped_layers(model))))


def run_row(
    name: str,
    options: argparse.Namespace,
    stream: Tensor,
    held_out: dict[int, list[Tensor]],
    long_text: Tensor,
    cost_documents: list[Tensor],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Replace, match, train and measure one row. ``save`` gets the results so far after each measurement of a curve."""
    torch.manual_seed(options.seed)
    model, data, config = load(options.source), batches(stream, options.seed), ROWS[name]
    short = {CONTEXT: held_out[CONTEXT]}
    row: dict[str, Any] = {"row": name, "seed": options.seed, "keep": options.keep}
    row |= {name: getattr(options, name) for name in RECIPE if getattr(options, name) != RECIPE[name][0]}
    added: list[Tensor] = []
    if config is not None:
        swap_attention(model, AttentionConfig(**config))
        if options.keep:
            expensive = choose_layers(model, cost_documents, options.keep)
            model = load(options.source)
            count = len(model.model.layers)
            kinds = ["keep" if layer in expensive else "replace" for layer in range(count)]
            swap_attention(model, AttentionConfig(**config), layer_kinds=kinds)
            row["kept"] = expensive
        added = [parameter for layer in swapped_layers(model).values() for parameter in layer.parameters()]
        if name.endswith("norms"):
            for layer in swapped_layers(model).values():
                layer.features.__class__ = NormKeepingFeatures
        row["swapped"] = perplexities(model, short)
        distance = partial(matching_loss, model, weight=options.weights)
        if not name.startswith("window"):  # without far tokens, nothing was added that could be matched
            groups = [{"params": added, "lr": options.match_lr}]
            row["match"] = {"steps": options.steps[0], "seconds": train(groups, options.steps[0], distance, data)}
            row["matched"] = perplexities(model, short)
    else:
        row["swapped"] = perplexities(model, short)
    new = {id(parameter) for parameter in added}
    if options.lora:
        choose_trained(model, "lora", LoraOptions(rank=options.lora, alpha=2 * options.lora))
    model.get_input_embeddings().weight.requires_grad_(False)
    others = [parameter for parameter in model.parameters() if id(parameter) not in new and parameter.requires_grad]
    teacher = load(options.source) if options.distill else None
    if options.length != CONTEXT:
        data = batches(stream, options.seed, options.length)
    if options.length > CONTEXT:
        # The activations of all layers for 4,096 tokens do not fit into 16 GB beside the scores.
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # transformers recomputes activations in training mode only; Llama has no dropout

    def text_loss(batch: Tensor) -> Tensor:
        with autocast():
            scores = model(batch[:, :-1], use_cache=False).logits[0].float()
        loss = F.cross_entropy(scores, batch[0, 1:])
        if teacher is None:
            return loss
        with torch.no_grad(), autocast():
            targets = teacher(batch[:, :-1], use_cache=False).logits[0].float().log_softmax(-1)
        distance = F.kl_div(scores.log_softmax(-1), targets, log_target=True, reduction="batchmean")
        return loss + options.distill * distance

    groups = [{"params": others, "lr": options.tune_lr}, {"params": added, "lr": options.new_lr * options.tune_lr}]
    groups = [group for group in groups if group["params"]]
    steps = measured_steps(options.steps[1], options.curve)
    curve: dict[str, Any] = {}

    def measure(step: int, seconds: float) -> None:
        if step not in steps:
            return
        with evaluation_mode(model):
            curve[str(step)] = perplexities(model, held_out)
        print(f"{name}, step {step}: {json.dumps(curve[str(step)])}", flush=True)
        save(row | {"tune": {"steps": step, "seconds": seconds}, "steps": curve, "tuned": curve[str(step)]})

    seconds = train(groups, options.steps[1], text_loss, data, measure if steps else None)
    row["tune"] = {"steps": options.steps[1], "seconds": seconds}
    if steps:
        row["steps"] = curve
    row["tuned"] = curve[str(options.steps[1])] if steps else perplexities(model.eval(), held_out)
    if options.long:
        row["long"] = read_long(
            model, AutoTokenizer.from_pretrained(options.source, trust_remote_code=False), long_text
        )
    return row


def write_row(file: Path, row: dict[str, Any]) -> None:
    """Write the results of a row and a description of the machine as JSON."""
    write_json(file, {**describe(torch.device("cpu")), **row}, indent=1)


def describe_row(name: str, options: argparse.Namespace) -> str:
    """Return the name of a row with its seed and the options that differ from their defaults."""
    label = f"{name}, seed {options.seed}" + (f", {options.keep:g} kept" if options.keep else "")
    for option, (default, *_) in RECIPE.items():
        if (value := getattr(options, option)) != default:
            label += f", {option} {value:g}"
    return label if tuple(options.steps) == STEPS else f"{label}, {options.steps[0]} and {options.steps[1]} steps"


def draw(folder: Path, picture: Path) -> None:
    """Draw the perplexity by position of all rows in a folder of results, up to 4,096 tokens."""
    figure, (axis,) = make_panels(1, 1, (7.2, 4.2))
    rows = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    colors = {name: f"C{number}" for number, name in enumerate(DRAWN)}
    for row in sorted(rows, key=lambda row: row["tuned"]["4096"][0]):
        values, is_long = row["tuned"]["4096"][1:], row["tune"]["steps"] > STEPS[1]
        if (
            row["row"] in DRAWN
            and max(values) < LARGEST_DRAWN
            and not row["seed"]
            and row["tune"]["steps"]
            and not RECIPE.keys() & row.keys()
        ):
            label = row["row"] + (f", {row['keep']:.0%} of the layers softmax" if row["keep"] else "")
            style = {"color": colors[row["row"]], "linestyle": ":" if row["keep"] else "--" if is_long else "-"}
            label += f", {row['tune']['steps']} steps"
            axis.plot([512 + 1024 * part for part in range(4)], values, marker="o", label=label, **style)
    axis.set_xlabel("position, tokens (mean of each quarter)")
    axis.set_ylabel("perplexity after training")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Run the rows, print each, write it to a file of results, and draw all rows that the folder has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder of a causal language model of transformers")
    parser.add_argument("--texts", type=Path, required=True, help="folder that lightning bench real_texts wrote")
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS), help="rows to run (default: all)")
    parser.add_argument("--keep", type=float, default=0.0, help="share of the layers that keep softmax (default: 0)")
    parser.add_argument("--steps", type=int, nargs=2, default=STEPS, metavar="N", help="steps of the two stages")
    for name, (default, text) in RECIPE.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (default: {default:g})")
    parser.add_argument("--long", action="store_true", help="also read 8,192 to 32,768 tokens, and find hidden numbers")
    parser.add_argument("--seed", type=int, default=0, help="seed of the batches and of new parameters (default: 0)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.source, trust_remote_code=False)
    held_out_documents = read_tokens(options.texts, "val", tokenizer)
    held_out = {
        tokens: [document[: tokens + 1] for document in held_out_documents if len(document) > tokens][:count]
        for tokens, count in HELD_OUT.items()
    }
    long_text = torch.cat([document for document in held_out_documents if len(document) > CONTEXT])
    documents = read_tokens(options.texts, "train", tokenizer)
    stream, cost_documents = torch.cat(documents), held_out[CONTEXT][:COST_DOCUMENTS]
    if options.choose:
        cost_documents = [x[: options.choose + 1] for x in documents if len(x) > options.choose][:COST_DOCUMENTS]
    for name in options.rows:
        label = describe_row(name, options)
        file = options.out / "real-language" / f"{label.replace(', ', '-').replace(' ', '-')}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        save = partial(write_row, file)
        row = run_row(name, options, stream, held_out, long_text, cost_documents, save)
        print(
            label,
            json.dumps({stage: row[stage] for stage in ("swapped", "matched", "tuned", "long") if stage in row}),
            flush=True,
        )
        save(row)
        draw(file.parent, options.out / "real-language.png")
