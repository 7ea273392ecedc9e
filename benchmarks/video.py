"""Kinds of attention in place of a pretrained video model's: fine-tunes each, prints a table, writes JSON and pictures.

    python -m benchmarks.video --out benchmarks/results --pictures docs

First ``lightning fit --config configs/video/digits_pretrain.yaml``, softmax attention from scratch; then, for each variant,
``configs/video/digits_finetune.yaml`` from its checkpoint with another attention, everything else equal. What is done is not
done again: a stopped report resumes from the last checkpoint of the model that it was training.

Beside the held-out loss, clips drawn for every caption are looked at by program: whether what is lit moves as the caption
says, and whether a classifier of real digits names the caption's digit in the middle frame. The same is asked of real
clips that were held out, for comparison.
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from mhla_tasks.video import VideoDiffusion
from mhla_tasks.video.clips import to_frames
from mhla_tasks.video.digits import MOVES, MovingDigitSamples, every_caption
from mhla_tasks.video.pretrained import load_weights
from mhla_tasks.video.strips import draw_strips
from sklearn.svm import SVC
from torch import Tensor
from torch.nn import functional as F

from benchmarks.machine import describe
from benchmarks.runs import Row, train
from lightning_mhla.system.files import write_whole
from lightning_mhla.training.loading import load_module

PRETRAIN, FINETUNE = "configs/video/digits_pretrain.yaml", "configs/video/digits_finetune.yaml"

SIDE = 8
"""Pixels of a digit's side."""

FIRST = "softmax, pretrained"
VARIANTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "softmax": ({"kind": "softmax", "gate": False}, []),
    "linear": ({"kind": "linear"}, []),
    "mhla": ({"kind": "mhla"}, []),
    "mhla, 72 blocks": ({"kind": "mhla", "block_grid": "[8,3,3]"}, []),
    "mhla in 2 of 3 layers": ({"kind": "mhla"}, ["--model.init_args.layer_kinds=[keep,replace,replace]"]),
}
"""Attention options, and other options, by name."""

SHOWN = "a five moving up"
"""Caption of the clips in the picture."""

CLIPS_EACH = 5
"""Clips drawn for each caption."""

START = "swapped, not trained"


def draw(module: VideoDiffusion, prompts: list[str]) -> Tensor:
    """A clip ``[F, C, H, W]`` for each prompt, the noise that of its number."""
    parts = range(0, len(prompts), 40)
    return torch.cat([module.draw(prompts[i : i + 40], list(range(i, min(i + 40, len(prompts)))), 0) for i in parts])


def moves_as_said(frames: Tensor, caption: str) -> bool:
    """Whether the centre of what is lit goes at least two pixels where the caption says, and less across."""
    lit = frames[:, 0].double()
    mass = lit.sum((1, 2)).clamp(min=1)
    rows = (lit.sum(2) * torch.arange(lit.shape[1])).sum(1) / mass
    columns = (lit.sum(1) * torch.arange(lit.shape[2])).sum(1) / mass
    down, right = float(rows[-1] - rows[0]), float(columns[-1] - columns[0])
    wanted = MOVES[caption.split()[-1]]
    along = down * wanted[0] + right * wanted[1]
    across = abs(right if wanted[0] else down)
    return along >= 2 and along > 2 * across


def brightest_square(image: Tensor) -> Tensor:
    """Where a digit is, ``[64]``: of the squares of a digit's size, the brightest; the first of those that are alike."""
    squares = F.avg_pool2d(image[None, None], SIDE, stride=1)[0, 0]
    top, left = divmod(int(squares.argmax()), squares.shape[1])
    return image[top : top + SIDE, left : left + SIDE].flatten()


@cache
def classifier(height: int, width: int) -> SVC:
    """Of real digits on a canvas, found in the same way; trained on the clips that the video model is trained on."""
    source = MovingDigitSamples(True, 1, height, width)
    torch.manual_seed(0)
    samples = [source[index] for index in range(len(source))]
    squares = torch.stack([brightest_square((sample["video"][0, 0] + 1) / 2) for sample in samples])
    return SVC(gamma="scale", C=10).fit(squares.numpy(), [sample["caption"].split()[1] for sample in samples])


def shows_its_digit(frames: Tensor, caption: str) -> bool:
    """Whether the classifier names the caption's digit in the middle frame."""
    square = brightest_square(frames[len(frames) // 2, 0].float() / 255)
    (name,) = classifier(*frames.shape[-2:]).predict(square[None].numpy())
    return bool(name == caption.split()[1])


def judge(clips: Tensor, captions: list[str]) -> dict[str, float]:
    """Shares of clips that move as said and that show their digit."""
    pairs = list(zip(clips, captions, strict=True))
    return {
        "moves_as_said": sum(moves_as_said(*pair) for pair in pairs) / len(pairs),
        "shows_its_digit": sum(shows_its_digit(*pair) for pair in pairs) / len(pairs),
    }


def measure(name: str, checkpoint: Path, seconds: float) -> Row:
    """One row of the table: the curves that training logged, and what clips of the last weights show."""
    module = load_module(VideoDiffusion, checkpoint)
    content = torch.load(checkpoint, weights_only=True, map_location="cpu", mmap=True)
    curves = content["callbacks"]["LearningCurves"]
    captions = every_caption() * CLIPS_EACH
    return {
        "variant": name,
        "val_loss": curves["val/loss"][-1][1],
        "val_loss_by_step": curves["val/loss"],
        "train_loss_by_step": curves.get("train/loss", []),
        **judge(draw(module, captions), captions),
        "clips": len(captions),
        "steps": content["global_step"],
        "seconds": round(seconds),
        "parameters": sum(parameter.numel() for parameter in module.network.parameters()),
    }


def measure_start(checkpoint: Path, pretrained: Path) -> VideoDiffusion:
    """The model of a fine-tuned checkpoint as fine-tuning began: pretrained weights, attention replaced."""
    module = load_module(VideoDiffusion, checkpoint)
    start = VideoDiffusion(**{key: value for key, value in module.hparams.items() if not key.startswith("_")}).eval()
    load_weights(start.network, str(pretrained))
    return start


def real_clips(module: VideoDiffusion) -> Row:
    """The same questions about clips that were held out."""
    size = module.sampling
    source = MovingDigitSamples(False, size.frames, size.height, size.width)
    samples = [source[index] for index in range(len(source))]
    clips = to_frames(torch.stack([sample["video"] for sample in samples]))
    return {"clips": len(samples), **judge(clips, [sample["caption"] for sample in samples])}


def table(rows: list[Row], real: Row) -> str:
    """Markdown."""
    lines = [
        "| attention | held-out loss | moves as said | shows its digit | steps | training |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        shares = [f"{row[key]:.0%}" for key in ("moves_as_said", "shows_its_digit")]
        loss, minutes = f"{row['val_loss']:.4f}", f"{row['seconds'] / 60:.1f} min"
        lines.append(f"| {' | '.join([row['variant'], loss, *shares, str(row['steps']), minutes])} |")
    shares = [f"{real[key]:.0%}" for key in ("moves_as_said", "shows_its_digit")]
    return "\n".join([*lines, f"| real clips, held out | | {' | '.join(shares)} | | |"])


def draw_curves(rows: list[Row]) -> Figure:
    """Held-out loss of each fine-tuned variant by step, and the pretrained model's."""
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axis = figure.subplots()
    for row in rows:
        if row["variant"] == FIRST:
            axis.axhline(row["val_loss"], color="black", linestyle="--", linewidth=1, label=FIRST)
        else:
            axis.plot(*zip(*row["val_loss_by_step"], strict=True), label=row["variant"], linewidth=1.4)
    axis.set(xlabel="optimiser step of fine-tuning", ylabel="held-out loss", yscale="log")
    axis.grid(alpha=0.3, which="both")
    axis.yaxis.set_minor_formatter("{x:.2f}")
    axis.yaxis.set_major_formatter("{x:.2f}")
    axis.legend()
    return figure


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for video-digits.json")
    parser.add_argument("--pictures", type=Path, help="folder for video-digits-curves.png and video-digits-strips.png")
    parser.add_argument("--runs", type=Path, default=Path("runs/report-video"), help="where the runs are kept")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="variants, all by default")
    parser.add_argument("options", nargs="*", help="options for every lightning fit, after --")
    args = parser.parse_args()
    path = None if args.out is None else args.out / "video-digits.json"
    known = json.loads(path.read_text()) if path is not None and path.exists() else {}
    rows: list[Row] = known["rows"] if known.get("options") == args.options else []
    first, seconds = train(PRETRAIN, FIRST, {"kind": "softmax"}, args.runs, args.options)
    pretrained = load_module(VideoDiffusion, first)
    real = real_clips(pretrained)
    clips = {FIRST: draw(pretrained, [SHOWN])[0]}
    done = [(FIRST, first, seconds)]
    for name in [None, *args.only]:
        if name is not None:
            attention, others = VARIANTS[name]
            start = f"--model.init_args.pretrained={first}"
            done.append((name, *train(FINETUNE, name, attention, args.runs, [start, *others, *args.options])))
        variant, checkpoint, seconds = done[-1]
        rows = [row for row in rows if row["variant"] != variant] + [measure(variant, checkpoint, seconds)]
        rows.sort(key=lambda row: [FIRST, *VARIANTS].index(row["variant"]))
        print(table(rows, real), flush=True)
        if path is not None:
            result = {
                "machine": describe(torch.device("cpu")),
                "options": args.options,
                "real_clips": real,
                "rows": rows,
            }
            write_whole(path, json.dumps(result, indent=2) + "\n")
        if name is not None and name != "softmax":
            clips[f"{name}, {START}"] = draw(measure_start(checkpoint, first), [SHOWN])[0]
        if name is not None:
            clips[f"{name}, fine-tuned"] = draw(load_module(VideoDiffusion, checkpoint), [SHOWN])[0]
    if args.pictures is not None:
        args.pictures.mkdir(parents=True, exist_ok=True)
        draw_curves(rows).savefig(args.pictures / "video-digits-curves.png", dpi=110)
        picture = draw_strips(list(clips.items()), title=f'"{SHOWN}"')
        picture.savefig(args.pictures / "video-digits-strips.png", dpi=110)


if __name__ == "__main__":
    main()
