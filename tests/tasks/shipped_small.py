"""Small versions of the shipped configurations, and generated data for them.

Loggers, callbacks and classes stay those of the file. Sizes are reduced, and names of remote models (a VAE, a text encoder,
Inception's weights) are replaced by small local models of the same kind.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import sana
import yaml
from grouped import grouped
from mhla_tasks.language.tokenizer import train_tokenizer
from PIL import Image
from tiny import save_vae
from wan import save_pipeline, video_file

QUESTIONS: dict[str, dict[str, Any]] = {
    "mqar": {
        "vocab_size": 128,
        "train": [{"tokens": 24, "pairs": 2, "samples": 40}],
        "val": [{"tokens": 24, "pairs": 2, "samples": 8}, {"tokens": 32, "pairs": 4, "samples": 8}],
    },
    "needle": {"tokens": 32, "vocab_size": 60, "samples": 40, "val_samples": 4},
}
"""Options that reduce the data of generated sequences, which have no text to export with."""

WAN = {
    "num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 4, "out_channels": 4, "text_dim": 16,
    "freq_dim": 32, "ffn_dim": 64, "num_layers": 3, "rope_max_seq_len": 32,
}  # fmt: skip


WORDS = [f"The {kind} river number {n} runs through the town.\n" for n in range(300) for kind in ("old", "new")]


def save_images(folder: Path, classes: tuple[str, ...], counts: dict[str, int]) -> None:
    """Write images of noise to ``PART/CLASS/N.png``.

    Args:
        folder: folder to write to.
        classes: names of the classes.
        counts: number of images of each class, by part.
    """
    draw = np.random.default_rng(0)
    for part, count in counts.items():
        for label in classes:
            (folder / part / label).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 256, (24, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / label / f"{number}.png")


def save_texts(folder: Path) -> None:
    """Write six text files."""
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text("".join(WORDS[number * 100 : number * 100 + 100]))


def save_clips(folder: Path, count: int = 8) -> None:
    """Write videos with captions."""
    folder.mkdir()
    for number in range(count):
        video_file(folder / f"{number}.mp4", seed=number)
        (folder / f"{number}.txt").write_text("a one moving up")


def save_models(folder: Path) -> None:
    """Write a VAE, a Wan pipeline, a SANA pipeline and a tokenizer in the layouts of the hub."""
    save_vae(folder / "vae")
    save_pipeline(folder / "wan")
    sana.save_pipeline(folder / "sana")
    train_tokenizer(WORDS, 300).save_pretrained(folder / "tokenizer")


def shrunk(path: Path, world: Path, start: Path | None = None) -> dict[str, Any]:
    """Return a shipped configuration with smaller sizes and local names.

    Args:
        path: path of the configuration.
        world: folder of the data and models.
        start: replacement for the weights from which the configuration starts; None if it starts from none.
    """
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    model, data, trainer = config["model"]["init_args"], config["data"]["init_args"], config["trainer"]
    domain = path.parent.name
    if "max_steps" in trainer and "val_check_interval" in trainer:
        trainer |= {"max_steps": 4, "val_check_interval": 2}
    else:
        trainer |= {"max_epochs": 2, "limit_train_batches": 2, "check_val_every_n_epoch": 1}
    trainer |= {"limit_val_batches": 1, "log_every_n_steps": 1, "accelerator": "cpu", "num_sanity_val_steps": 0}
    data["batch_size"] = 4
    if "num_workers" in data:
        data["num_workers"] = 1
    if domain == "classification" and "model_args" in model:
        model["model_args"] |= {"embed_dim": 32, "depth": 2, "num_heads": 2}
        if "pretrained" in model:
            model |= {"pretrained": str(start or model["pretrained"]), "distillation": {"layer_steps": 2}}
    elif domain == "classification":
        if "vlt" in model:
            model["vlt"] = {"dims": [8, 16], "depths": [1, 1], "heads": [1, 2], "linear_stages": 1, "head_width": 16,
                            "patch_size": 2}  # fmt: skip
        else:
            model |= grouped(model, depth=2, heads=2, dim=16)
        model.pop("size", None)
        if data.get("train"):
            model |= {"num_classes": 3}
            data["num_workers"] = 2
            if path.stem == "folder":
                data |= {"train": f"{world}/images/train", "val": f"{world}/images/val"}
                model |= grouped(model, heads=4, dim=32)
            else:
                model["image_size"] = 28
                model |= {} if "vlt" in model else grouped(model, pad_to=32, patch_size=2)
                data |= {"train": f"{world}/shards/train-*.tar", "val": f"{world}/shards/val-*.tar"}
    elif domain == "diffusion":
        model |= grouped(model, depth=2, heads=2, dim=16)
        model.pop("size", None)
        model["sampling"]["steps"] = 3
        if "pretrained" in model:
            model["pretrained"] = str(start or model["pretrained"])
        if path.stem == "folder":
            data |= {"train": f"{world}/images/train", "val": f"{world}/images/val"}
        elif data.get("train"):
            model |= {"num_classes": 3, "sample_size": 8, "vae": f"{world}/vae"}
            data |= {"train": f"{world}/latents/train-*.tar", "val": f"{world}/latents/val-*.tar", "sample_size": 8}
    elif domain == "language":
        context = 64 if data.get("train") else 32
        model |= {"context": context} | ({} if "pretrained" in model else {"vocab_size": 300})
        if "pretrained" in model:
            model |= {"pretrained": str(start or model["pretrained"]), "distillation": {"layer_steps": 2}}
            model["attention"]["block_size"] = 8
        elif "network" in model:
            sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
                     "state_size": 4, "num_heads": 4, "head_dim": 16, "time_step_rank": 2}  # fmt: skip
            model["network"]["init_args"] |= {k: v for k, v in sizes.items() if k in model["network"]["init_args"]}
        else:
            model |= grouped(model, dim=32, depth=2, mlp_width=48)
            model |= grouped(model, **{name: 8 for name in ("key_width", "value_width") if name in model["shape"]})
            model["attention"] |= {"block_size": 8} if "block_size" in model["attention"] else {}
        if path.stem in QUESTIONS:
            data |= QUESTIONS[path.stem]
            return config
        model["generation"] = {"max_new_tokens": 4}
        data["context"] = context
        if data.get("train"):
            data |= {"train": f"{world}/tokens/train-*.tar", "val": f"{world}/tokens/val-*.tar"}
        else:
            data["vocab_size"] = 300
    elif domain == "text_to_image":
        model["sampling"] |= {"steps": 2}
        if path.stem == "folder":
            data |= {"train": f"{world}/pictures", "val": f"{world}/caption-shards/val-*.tar"}
        elif data.get("train"):
            model |= {"transformer": sana.SHAPE, "pretrained": f"{world}/sana", "vae": f"{world}/sana"}
            model["text"] |= {"encoder": f"{world}/sana", "length": 16}
            model["attention"]["block_grid"] = [2, 2]
            model["sampling"] |= {"height": 16, "width": 16}
            data |= {"train": f"{world}/caption-latents/train-*.tar", "val": f"{world}/caption-latents/val-*.tar"}
            data["prompts"] = {"prompts": ["a red three"]}
        if path.stem == "folder" or not data.get("train"):
            model["transformer"] |= {"num_attention_heads": 2, "num_cross_attention_heads": 2, "cross_attention_dim": 32,
                                     "num_layers": 2}  # fmt: skip
            if "pretrained" in model:
                model["pretrained"] = str(start or model["pretrained"])
    elif path.stem.startswith("continue"):
        model["shape"] |= {"dim": 16, "depth": 2, "heads": 2}
        model["sampling"] |= {"frames": 10}
        data |= {"clips": 2}
        if data.get("train"):
            data |= {"train": f"{world}/clips", "val": f"{world}/clips"}
    else:
        small = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 3}
        model["sampling"] |= {"steps": 2}
        if path.stem == "folder":
            model["transformer"] |= small
            data |= {"train": f"{world}/clip-shards/train-*.tar", "val": f"{world}/clip-shards/val-*.tar"}
        elif data.get("train"):
            model |= {"transformer": WAN, "pretrained": f"{world}/wan", "vae": f"{world}/wan"}
            model["text"] |= {"encoder": f"{world}/wan", "length": 16}
            model["attention"]["block_grid"] = [2, 2, 3]
            model["sampling"] |= {"frames": 5, "height": 32, "width": 48}
            data |= {"train": f"{world}/clip-latents/train-*.tar", "val": f"{world}/clip-latents/val-*.tar"}
            data["prompts"] = {**data.get("prompts", {}), "prompts": ["a one moving up"], "per_prompt": 1}
        else:
            model["transformer"] |= small
            size = (
                {"height": 24, "width": 28} if "Mnist" in config["data"]["class_path"] else {"height": 10, "width": 14}
            )
            model["sampling"] |= {"frames": 3, **size}
            data |= {"frames": 3, **size}
            if "pretrained" in model:
                model["pretrained"] = str(start or model["pretrained"])
                model["attention"]["block_grid"] = [1, 2, 2]
    for callback in trainer["callbacks"]:
        options = callback.setdefault("init_args", {})
        if callback["class_path"].endswith("GenerationMetrics"):
            options |= {"samples": 6, "batch_size": 50, "every_n_steps": 3}
            if data.get("train"):
                options |= {
                    "reference": f"{world}/images/val",
                    "features": {"class_path": "mhla_tasks.diffusion.RandomFeatures"},
                }
            else:
                options["features"]["init_args"] = {"epochs": 1}
        for name in ("every_n_train_steps", "every_n_steps"):
            if options.get(name) and not callback["class_path"].endswith("GenerationMetrics"):
                options[name] = 2
        if callback["class_path"].endswith("SceneScores"):
            options["prompts"] = ["a red three"]
        if "prompts" in options:
            options["prompts"] = options["prompts"][:1]
    return config


ARC = ("ARC-Easy", "ARC-Challenge")


def task_rows() -> dict[str, dict[str, dict[str, Any]]]:
    """Return a row for every subset of every data set that the overlays of configs/eval use, in the format of the hub."""
    tasks = Path(lm_eval.__file__).parent / "tasks"

    def subsets(pattern: str) -> list[str]:
        found = [re.search(r"^.?dataset_name.?: (.*)", path.read_text(), re.MULTILINE) for path in tasks.glob(pattern)]
        return sorted({match[1].strip("\"' ") for match in found if match})

    four = {"text": ["red", "green", "blue", "white"], "label": ["A", "B", "C", "D"]}
    subject = {"question": "Which bone is it?", "subject": "bones", "choices": four["text"], "answer": 2}
    letter = {
        "question": "who wrote it?", "input": "who wrote it?", "context": "Maria wrote it. " * 40, "answers": ["Paragraph 3, 段落3"],
        "length": 60, "dataset": "any", "language": "en", "all_classes": ["Maria"], "_id": "0",
    }  # fmt: skip
    return {
        "cais/mmlu": dict.fromkeys(subsets("mmlu/default/mmlu_*.yaml"), subject),
        "Xnhyacinth/LongBench": dict.fromkeys(subsets("longbench/*.yaml"), letter),
        "EleutherAI/wikitext_document_level": {
            "wikitext-2-raw-v1": {"page": " = River = \n\n It runs through the town . "}
        },
        "EleutherAI/lambada_openai": {"default": {"text": "the old river runs through the town"}},
        "baber/piqa": {"default": {"goal": "cross it", "sol1": "a bridge", "sol2": "a song", "label": 0}},
        "allenai/winogrande": {
            "winogrande_xl": {"sentence": "The _ runs.", "option1": "river", "option2": "town", "answer": "1"}
        },
        "allenai/ai2_arc": {name: {"question": "Which?", "choices": four, "answerKey": "B"} for name in ARC},
        "allenai/openbookqa": {"main": {"question_stem": "It is", "choices": four, "answerKey": "B"}},
        "aps/super_glue": {"boolq": {"passage": "It runs.", "question": "does it run", "label": 1}},
    }


def save_task_data(root: Path) -> None:
    """Write the rows of :func:`task_rows` to folders in the layout of ``--data_dir``."""
    for name, subsets in task_rows().items():
        lines = ["---", "configs:"]
        for subset, row in subsets.items():
            (root / name).mkdir(parents=True, exist_ok=True)
            (root / name / f"{subset}.jsonl").write_text(5 * (json.dumps(row) + "\n"))
            lines += [f"- config_name: {subset}", "  data_files:"]
            for split in ("train", "validation", "test", "dev"):
                lines += [f"  - split: {split}", f"    path: {subset}.jsonl"]
        (root / name / "README.md").write_text("\n".join([*lines, "---", ""]))
