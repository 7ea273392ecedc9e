"""Every shipped configuration, as it is shipped, from the first command to the exported model, on data made on the spot.

Loggers, callbacks and classes are those of the file. What changes: sizes, and names of remote things (a VAE, a text encoder,
Inception's weights), which become small local ones of the same kind.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import pytest
import torch
import yaml
from fork_server import ForkServer
from mhla_tasks.classification.prepare import images_to_shards
from mhla_tasks.language.tokenizer import train_tokenizer
from PIL import Image
from tiny import save_vae
from wan import save_pipeline, video_file

from lightning_mhla.checkpoints.io import read_header, resolve_checkpoint

ROOT = Path(__file__).parents[2]
MODELS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name not in ("eval", "trainer"))
OVERLAYS = sorted((ROOT / "configs/trainer").glob("*.yaml"))
EVALUATIONS = sorted((ROOT / "configs/eval").glob("*.yaml"))
EXPORTS: dict[str, list[Path]] = {}
"""Folders that the tests below have exported, by domain."""

QUESTIONS: dict[str, dict[str, Any]] = {
    "mqar": {
        "vocab_size": 128,
        "train": [{"tokens": 24, "pairs": 2, "samples": 40}],
        "val": [{"tokens": 24, "pairs": 2, "samples": 8}, {"tokens": 32, "pairs": 4, "samples": 8}],
    },
    "needle": {"tokens": 32, "vocab_size": 60, "samples": 40, "val_samples": 4},
}
"""Data of made-up sequences in small; they have no text to export with."""

WAN = {
    "num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 4, "out_channels": 4, "text_dim": 16,
    "freq_dim": 32, "ffn_dim": 64, "num_layers": 3, "rope_max_seq_len": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def world(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small data in every layout that the configurations ask for, made by the commands that the documentation names."""
    world = tmp_path_factory.mktemp("world")
    draw = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 4)):
        for label in range(3):
            folder = world / "images" / part / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 256, (24, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
        images_to_shards(world / "images" / part, world / "shards", part, 10, 0)
    save_vae(world / "vae")
    save_pipeline(world / "wan")
    words = [f"The {kind} river number {n} runs through the town.\n" for n in range(300) for kind in ("old", "new")]
    train_tokenizer(words, 300).save_pretrained(world / "tokenizer")
    (world / "texts").mkdir()
    for number in range(6):
        (world / "texts" / f"{number}.txt").write_text("".join(words[number * 100 : number * 100 + 100]))
    (world / "clips").mkdir()
    for number in range(8):
        video_file(world / "clips" / f"{number}.mp4", seed=number)
        (world / "clips" / f"{number}.txt").write_text("a one moving up")
    (world / "prompts.txt").write_text("The old river\nThe town\n")
    for part in ("train", "val"):
        commands = {
            "latents": ("images/" + part, "latents", "--vae", "vae", "--image_size", "16"),
            "text": ("tokens", "texts", "--tokenizer", "tokenizer"),
            "clip-latents": (
                "clips", "clip-latents", "--model", "wan", "--frames", "5", "--height", "32", "--width", "48",
                "--fps", "8", "--text_length", "16",
            ),
        }  # fmt: skip
        for what, arguments in commands.items():
            status, text = server.run("prepare", what, *arguments, "--prefix", part, module="mhla_tasks", folder=world)
            assert status == 0, text[-3000:]
    return world


def shrunk(path: Path, world: Path) -> dict[str, Any]:
    """A shipped configuration with smaller sizes and local names."""
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
    if domain == "classification":
        model |= {"depth": 2, "heads": 2, "dim": 16}
        model.pop("size", None)
        if data.get("train"):
            model |= {"num_classes": 3, "image_size": 28, "pad_to": 32, "patch_size": 2}
            data |= {"train": f"{world}/shards/train-*.tar", "val": f"{world}/shards/val-*.tar", "num_workers": 2}
    elif domain == "diffusion":
        model |= {"depth": 2, "heads": 2, "dim": 16}
        model.pop("size", None)
        model["sampling"]["steps"] = 3
        if "pretrained" in model:
            model["pretrained"] = str(world / "exported/diffusion/dit_s2_256")  # exported before this one's turn
        if data.get("train"):
            model |= {"num_classes": 3, "sample_size": 8, "vae": f"{world}/vae"}
            data |= {"train": f"{world}/latents/train-*.tar", "val": f"{world}/latents/val-*.tar", "sample_size": 8}
    elif domain == "language":
        context = 64 if data.get("train") else 32
        model |= {"vocab_size": 300, "context": context}
        if "network" in model:
            sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
                     "state_size": 4, "num_heads": 4, "head_dim": 16, "time_step_rank": 2}  # fmt: skip
            model["network"]["init_args"] |= {k: v for k, v in sizes.items() if k in model["network"]["init_args"]}
        else:
            model |= {"dim": 32, "depth": 2, "mlp_width": 48}
            model |= {name: 8 for name in ("key_width", "value_width") if name in model}
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
    else:
        small = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 3}
        model["sampling"] |= {"steps": 2}
        if data.get("train"):
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
                (start,) = (
                    folder for folder in EXPORTS["video"] if folder.name == path.stem.replace("finetune", "pretrain")
                )
                model["pretrained"] = str(start)  # comes before, as in the README
                model["attention"]["block_grid"] = [1, 2, 2]
    for callback in trainer["callbacks"]:
        options = callback.setdefault("init_args", {})
        if callback["class_path"].endswith("GenerationMetrics"):
            options |= {"samples": 6, "batch_size": 4, "every_n_steps": 3}
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
        if "prompts" in options:
            options["prompts"] = options["prompts"][:1]
    return config


def predict_options(domain: str, world: Path) -> list[str]:
    return {
        "classification": [f"--data.init_args.predict_dir={world}/images/val"],
        "diffusion": ["--data.init_args.samples.classes=[0,2]"],
        "language": [f"--data.init_args.prompts={world}/prompts.txt", "--model.init_args.generation.max_new_tokens=4"],
        "video": ["--data.init_args.prompts.prompts=['a one moving up']"],
    }[domain]


def named(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", sorted(MODELS, key=lambda path: "finetune" in path.stem), ids=named)
def test_a_shipped_configuration_from_fit_to_export(
    path: Path, world: Path, server: ForkServer, cache_home: Path, tmp_path: Path
) -> None:
    domain = path.parent.name
    config = tmp_path / path.name
    config.write_text(yaml.safe_dump(shrunk(path, world)))
    cache = {"XDG_CACHE_HOME": str(cache_home), "HF_HUB_OFFLINE": "1"}

    def run(*arguments: str, **options: Any) -> tuple[int, str]:
        return server.run(*arguments, folder=tmp_path, **options, **cache)

    fit = ("fit", "--config", str(config), "--run_dir=run")
    status, text = run(*fit, kill_at=3)
    assert status == -9, text[-4000:]
    status, text = run(*fit)
    assert status == 0, text[-4000:]
    assert "Restored all states" in text, text[-4000:]
    assert read_header(resolve_checkpoint(tmp_path / "run"))["global_step"] == 4
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))
    assert (tmp_path / "run/checkpoints/learning_curves.png").exists()
    commands: dict[str, list[str]] = {"validate": [], "predict": predict_options(domain, world)}
    if path.stem in QUESTIONS:
        assert "val/accuracy" in text
        del commands["predict"]
    for command, options in commands.items():
        status, text = run(command, "--run_dir=run", *options)
        assert status == 0, text[-4000:]
    if path.stem in QUESTIONS:
        return
    assert [file for file in (tmp_path / "run/predict").rglob("*") if file.is_file()]
    exported = world / "exported" / domain / path.stem
    status, text = run("export", "run", str(exported), module="mhla_tasks")
    assert status == 0, text[-4000:]
    EXPORTS.setdefault(domain, []).append(exported)


USES = {
    "classification": "assert model.eval()",
    "diffusion": "assert len(images) == 2",
    "language": "assert model.generate(tokenizer('The river', return_tensors='pt')['input_ids'], max_new_tokens=3) is not None",
    "video": "assert model.eval()",
}


@pytest.mark.parametrize("domain", USES)
def test_all_exports_load_in_a_new_process_as_their_cards_say(domain: str, server: ForkServer, tmp_path: Path) -> None:
    """After the tests above, which export."""
    folders = [str(folder) for folder in EXPORTS.get(domain, [])]
    if not folders:
        pytest.skip("nothing was exported: run the whole file")
    program = (
        "import os, re, sys\nfrom pathlib import Path\nfor folder in map(Path, sys.argv[1:]):\n    os.chdir(folder.parent)\n"
        "    (code,) = re.findall(r'```python\\n(.*?)```', Path(folder.name, 'README.md').read_text(), re.DOTALL)\n"
        f"    exec(code + {USES[domain]!r})\n"
    )
    status, said = server.program(program, *folders, folder=tmp_path)
    assert status == 0, said[-3000:]


@pytest.mark.parametrize("overlay", OVERLAYS, ids=named)
def test_a_shipped_overlay_on_one_process(overlay: Path, world: Path, server: ForkServer, tmp_path: Path) -> None:
    """Two processes are the matter of other tests; here the file itself."""
    config = tmp_path / "digits.yaml"
    config.write_text(yaml.safe_dump(shrunk(ROOT / "configs/classification/digits.yaml", world)))
    slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
             "SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1", "SLURM_NTASKS_PER_NODE": "1", "MASTER_PORT": "29517"}  # fmt: skip
    environment = slurm if overlay.stem == "slurm" else {}
    options = ["--trainer.accelerator=cpu", "--trainer.devices=1"]
    fit = ("fit", "--config", str(config), "--config", str(overlay), "--run_dir=run", *options)
    assert server.run(*fit, folder=tmp_path, kill_at=3, **environment)[0] == -9
    status, text = server.run(*fit, folder=tmp_path, **environment)
    assert status == 0, text[-4000:]
    assert read_header(resolve_checkpoint(tmp_path / "run"))["global_step"] == 4


ARC = ("ARC-Easy", "ARC-Challenge")


def task_rows() -> dict[str, dict[str, dict[str, Any]]]:
    """A row for every subset of every data set that the overlays of configs/eval ask for, as the hub lays them out."""
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


@pytest.fixture(scope="module")
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tasks")
    for name, subsets in task_rows().items():
        lines = ["---", "configs:"]
        for subset, row in subsets.items():
            (root / name).mkdir(parents=True, exist_ok=True)
            (root / name / f"{subset}.jsonl").write_text(5 * (json.dumps(row) + "\n"))
            lines += [f"- config_name: {subset}", "  data_files:"]
            for split in ("train", "validation", "test", "dev"):
                lines += [f"  - split: {split}", f"    path: {subset}.jsonl"]
        (root / name / "README.md").write_text("\n".join([*lines, "---", ""]))
    return root


@pytest.mark.timeout(600)
@pytest.mark.parametrize("overlay", EVALUATIONS, ids=named)
def test_a_shipped_evaluation_scores_all_its_tasks(
    overlay: Path, world: Path, task_data: Path, server: ForkServer, cache_home: Path, tmp_path: Path
) -> None:
    """Its own list of tasks, one document of each."""
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(shrunk(ROOT / "configs/language/stdlib.yaml", world)))
    evaluation = yaml.safe_load(overlay.read_text())
    (callback,) = evaluation["trainer"]["callbacks+"]
    options = callback["init_args"]
    options |= {"limit": 1, "data_dir": str(task_data), "max_length": 600}
    (tmp_path / "evaluation.yaml").write_text(yaml.safe_dump(evaluation))
    fit = ("fit", "--config", "model.yaml", "--config", "evaluation.yaml", "--run_dir=run")
    status, text = server.run(*fit, folder=tmp_path, XDG_CACHE_HOME=str(cache_home), HF_HUB_OFFLINE="1")
    assert status == 0, text[-4000:]
    (file,) = (tmp_path / "run/lm_eval").glob("step*.json")
    scored = {name.partition("/")[0] for name in json.loads(file.read_text())["scores"]}
    assert set(options["tasks"]) <= scored
    if overlay.stem == "mmlu":
        assert len([task for task in scored if task.startswith("mmlu_")]) >= 57


def test_augmentation_of_the_imagenet_recipe_takes_every_image() -> None:
    """RandAugment asks Pillow for no bits at all, once in some hundred images, and newer ones refuse."""
    from mhla_tasks.classification import ImageNetShards

    transform = ImageNetShards("a.tar", "b.tar", image_size=32)._transform(train=True)
    torch.manual_seed(0)
    np.random.seed(0)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8))
    steps = [step for step in transform.transforms if hasattr(step, "ops")]
    posterize = [operation for step in steps for operation in step.ops if operation.name.startswith("Posterize")]
    assert posterize
    for bits in (0, 1, 8):
        assert posterize[0].aug_fn(image, bits).size == image.size
    for _ in range(400):
        assert transform(image).shape == (3, 32, 32)
