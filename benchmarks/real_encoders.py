"""Comparison of a linearized encoder of texts or images with its original: agreement, and time by length.

    lightning bench real_encoders minilm minilm-linear --texts texts --out benchmarks/results
    lightning bench real_encoders dinov2 dinov2-linear --photos photos/val --out benchmarks/results

Texts are held-out sections and passages of :mod:`benchmarks.real_texts`, cut to 64, 128 and 512 tokens. Their embeddings are
means of the token vectors. Two measures compare them: the cosine similarity, and the share of the ten nearest neighbors that
are also found if the linearized model embeds all texts, or only the query. Images are compared by the cosine similarity of the
vectors of patches and class token at four sizes, with the numbers of blocks in ``--blocks``. In addition, a linear probe (ridge
regression of the class token) names the picture from which a quarter of the area was cut at random. It is trained on some cuts
of each picture and tested on others. All models compute in float32 with one thread.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from benchmarks.machine import describe
from lightning_mhla import load_swapped
from lightning_mhla.data.images import decode_file
from lightning_mhla.swap import resize_blocks, swapped_layers
from lightning_mhla.system.files import write_json
from lightning_mhla.training.neighbors import EmbeddingPairs

TOKENS = {64: 2000, 128: 2000, 512: 605}
"""Number of held-out texts by the number of tokens to which they are cut."""

PIXELS = {224: 64, 518: 16, 756: 8, 1022: 4}
"""Number of held-out pictures by the side in pixels to which they are resized."""

PROBED, TRAIN_CUTS, TEST_CUTS, RIDGE = 48, 6, 4, 1.0
"""Options of the linear probe: pictures, training cuts and test cuts of each picture, and weight of the ridge penalty."""

BATCH, REPEATS = 16, 5
"""Number of texts to embed at once, and number of timed calls of each model."""


def seconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Measure the median time of several functions in seconds. The functions alternate, and their first calls do not count.

    Args:
        calls: functions by name.

    Returns:
        Seconds by name.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    return {name: median(values[1:]) for name, values in times.items()}


def embed(model: Any, tokenizer: Any, texts: list[str], tokens: int) -> Tensor:
    """Compute the embeddings of texts: means of their token vectors, normalized to unit length.

    Args:
        model: encoder of transformers.
        tokenizer: tokenizer of the encoder.
        texts: texts to embed. Texts of similar length share a batch.
        tokens: maximum number of tokens of a text.

    Returns:
        Embeddings ``[n, dim]`` of the n texts, in their order.
    """
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    rows = []
    for start in range(0, len(order), BATCH):
        chosen = [texts[index] for index in order[start : start + BATCH]]
        batch = tokenizer(chosen, padding=True, truncation=True, max_length=tokens, return_tensors="pt")
        mask = batch["attention_mask"][..., None]
        vectors = model(**batch).last_hidden_state * mask
        rows.append(F.normalize(vectors.sum(1) / mask.sum(1), dim=-1))
    return torch.cat(rows)[torch.tensor(order).argsort()]


def compare_texts(models: dict[str, Any], source: str, folder: Path) -> dict[str, Any]:
    """Measure the agreement and the time of a text encoder by number of tokens.

    Args:
        models: the original and the linearized encoder, in this order.
        source: folder of the tokenizer.
        folder: folder that ``lightning bench real_texts`` wrote.

    Returns:
        A row by number of tokens: agreement of the embeddings, number of texts, and seconds per text of each model.
    """
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    texts = []
    for kind in ("sections", "passages"):
        lines = (folder / f"{kind}-val.jsonl").read_text().splitlines()
        texts += [json.loads(line)["text"] for line in lines]
    results = {}
    for tokens, count in TOKENS.items():
        original, linearized = (embed(model, tokenizer, texts[:count], tokens) for model in models.values())
        pairs = EmbeddingPairs()
        pairs.update(linearized, original)
        row: dict[str, Any] = {name: value.item() for name, value in pairs.compute().items()}
        row["cosine"] = (original * linearized).sum(-1).mean().item()
        row["texts"] = len(original)
        ids = torch.arange(1000, 1000 + tokens)[None]
        row["seconds"] = seconds({name: partial(model, ids) for name, model in models.items()})
        results[str(tokens)] = row
        print(tokens, "tokens", json.dumps(row), flush=True)
    return results


def read_picture(file: Path, pixels: int, box: tuple[float, float, float, float] | None = None) -> Tensor:
    """Read a picture, resize it to a square, and normalize it as for ImageNet: ``[3, pixels, pixels]``.

    Args:
        file: file of the picture.
        pixels: side of the square.
        box: left, upper, right and lower edge of the part to read, as shares of the picture; None for all of it.
    """
    picture = decode_file(file)
    if box is not None:
        # The doubled size is the tuple of width, height, width and height.
        left, upper, right, lower = (round(share * side) for share, side in zip(box, picture.size * 2, strict=True))
        picture = picture.crop((left, upper, right, lower))
    resized = picture.resize((pixels, pixels), Image.Resampling.BICUBIC)
    values = torch.from_numpy(np.asarray(resized, dtype=np.float32) / 255).permute(2, 0, 1)
    mean, std = (
        torch.tensor(numbers)[:, None, None]
        for numbers in (timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD)
    )
    return (values - mean) / std


def probe(models: dict[str, Any], files: list[Path]) -> dict[str, float]:
    """Measure how often a linear probe of class tokens names the picture from which a test cut was taken.

    Args:
        models: image encoders by name.
        files: files of the pictures.

    Returns:
        Share of correctly named test cuts, from 0 to 1, by name of the model.
    """
    draw, cuts = random.Random(0), []
    for file in files[:: max(1, len(files) // PROBED)][:PROBED]:
        corners = [(draw.uniform(0, 0.5), draw.uniform(0, 0.5)) for _ in range(TRAIN_CUTS + TEST_CUTS)]
        cuts += [read_picture(file, 224, (left, top, left + 0.5, top + 0.5)) for left, top in corners]
    result = {}
    for name, model in models.items():
        batches = torch.stack(cuts).split(BATCH)
        tokens = torch.cat([model(pixel_values=batch).last_hidden_state[:, 0] for batch in batches])
        vectors = F.normalize(tokens, dim=-1).view(-1, TRAIN_CUTS + TEST_CUTS, tokens.shape[-1])
        pictures, train = len(vectors), vectors[:, :TRAIN_CUTS].flatten(0, 1)
        wanted = torch.eye(pictures).repeat_interleave(TRAIN_CUTS, 0)
        gram = train.T @ train + RIDGE * torch.eye(train.shape[-1])
        scores = vectors[:, TRAIN_CUTS:] @ torch.linalg.solve(gram, train.T @ wanted)
        result[name] = (scores.argmax(-1) == torch.arange(pictures)[:, None]).float().mean().item()
    return result


def compare_images(models: dict[str, Any], folder: Path, blocks: Sequence[int]) -> dict[str, Any]:
    """Measure the agreement and the time of an image encoder by image size.

    Args:
        models: the original and the linearized encoder, in this order.
        folder: folder of held-out pictures.
        blocks: number of blocks along each side, for each size in :data:`PIXELS`; empty to keep the blocks of the model.
    """
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".jpg", ".png", ".webp"))
    if not files:
        raise SystemExit(f"no pictures in {folder}")
    results: dict[str, Any] = {"probe": probe(models, files)}
    print("linear probe", json.dumps(results["probe"]), flush=True)
    for number, (pixels, count) in enumerate(PIXELS.items()):
        if blocks:
            resize_blocks(models["linearized"], [blocks[number]] * 2)
        cosines = []
        for file in files[:: max(1, len(files) // count)][:count]:
            original, linearized = (
                model(pixel_values=read_picture(file, pixels)[None]).last_hidden_state[0] for model in models.values()
            )
            cosines.append(F.cosine_similarity(original, linearized, dim=-1))
        values = torch.stack(cosines)
        x = torch.zeros(1, 3, pixels, pixels)
        row = {
            "blocks": next(iter(swapped_layers(models["linearized"]).values())).config.block_grid,
            "pictures": len(values), "tokens": values.shape[1], "class_cosine": values[:, 0].mean().item(),
            "patch_cosine": values[:, 1:].mean().item(),
            "seconds": seconds({name: partial(model, pixel_values=x) for name, model in models.items()}),
        }  # fmt: skip
        results[str(pixels)] = row
        print(pixels, "pixels", json.dumps(row), flush=True)
    return results


@torch.no_grad()
def main() -> None:
    """Compare the two models, print a row for each number of tokens or image size, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("original", help="folder of an encoder of transformers")
    parser.add_argument("linearized", type=Path, help="folder that lightning linearize or lightning export wrote")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--texts", type=Path, help="folder that lightning bench real_texts wrote")
    data.add_argument("--photos", type=Path, help="folder of held-out pictures")
    parser.add_argument(
        "--blocks",
        type=int,
        nargs=len(PIXELS),
        default=[],
        metavar="N",
        help=f"blocks along a side of pictures of {', '.join(map(str, PIXELS))} pixels (default: those of the model)",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    original = AutoModel.from_pretrained(options.original, dtype=torch.float32, trust_remote_code=False).eval()
    models = {"original": original, "linearized": load_swapped(options.linearized, torch.float32).eval()}
    if options.texts is not None:
        results = compare_texts(models, options.original, options.texts)
    else:
        results = compare_images(models, options.photos, options.blocks)
    file = options.out / "real-encoders" / f"{options.linearized.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {**describe(torch.device("cpu")), "results": results}, indent=1)
