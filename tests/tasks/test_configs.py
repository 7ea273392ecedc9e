"""Every shipped configuration, as it is shipped, from the first command to the exported model, on data made on the spot.

Sizes are those of :mod:`shipped_small`.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import sana
import torch
import yaml
from fork_server import ForkServer
from mhla_tasks.classification.prepare import images_to_shards
from PIL import Image
from processes import run_in_turn
from shipped_small import QUESTIONS, save_clips, save_images, save_models, save_task_data, save_texts, shrunk

from lightning_mhla.checkpoints.io import read_header, resolve_checkpoint
from lightning_mhla.data.pack import Packing

ROOT = Path(__file__).parents[2]
MODELS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name not in ("eval", "trainer"))
OVERLAYS = sorted((ROOT / "configs/trainer").glob("*.yaml"))
EVALUATIONS = sorted((ROOT / "configs/eval").glob("*.yaml"))
EXPORTS: dict[str, list[Path]] = {}
"""Folders that the tests below have exported, by domain."""


def in_small(path: Path) -> str:
    """Return a configuration after :func:`shrunk`, without its name and the share of skipped blocks."""
    config = shrunk(path, Path("world"), Path("start"))
    for logger in config["trainer"]["logger"]:
        logger["init_args"].pop("name")
    config["model"]["init_args"].pop("drop_path", None)
    return json.dumps(config, sort_keys=True)


STARTS = {"digits_finetune": "digits_pretrain", "dit_xl2_adapt": "dit_s2_256", "linearize_stdlib": "llama_stdlib",
          "linearize_mnist": "mnist_timm"}  # fmt: skip
"""Configurations whose weights come from another one."""
ALIKE: dict[str, list[Path]] = {}
"""Configurations by their text in small: sizes of one model are the same one there, and one of them is run."""
for _path in sorted(MODELS, key=lambda path: path.stem not in STARTS.values()):
    ALIKE.setdefault(in_small(_path), []).append(_path)


@pytest.fixture(scope="module")
def world(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small data in every layout that the configurations require, made by the documented commands."""
    world = tmp_path_factory.mktemp("world")
    save_images(world / "images", ("class0", "class1", "class2"), {"train": 12, "val": 4})
    save_models(world)
    save_texts(world / "texts")
    save_clips(world / "clips")
    sana.save_pictures(world / "pictures")
    (world / "prompts.txt").write_text("The old river\nThe town\n")
    for part in ("train", "val"):
        images_to_shards(world / "images" / part, Packing(world / "shards", part, per_shard=10))
        commands = {
            "latents": ("images/" + part, "latents", "--vae", "vae", "--image_size", "16"),
            "text": ("tokens", "texts", "--tokenizer", "tokenizer"),
            "captions": ("pictures", "caption-shards"),
            "caption-latents": (f"caption-shards/{part}-*.tar", "caption-latents", "--model", "sana", "--height", "16",
                                "--width", "16", "--text_length", "16"),
            "clips": ("clips", "clip-shards"),
            "clip-latents": (
                "clips", "clip-latents", "--model", "wan", "--frames", "5", "--height", "32", "--width", "48",
                "--fps", "8", "--text_length", "16",
            ),
        }  # fmt: skip
        for what, arguments in commands.items():
            status, text = server.run("prepare", what, *arguments, "--prefix", part, module="mhla_tasks", folder=world)
            assert status == 0, text[-3000:]
    return world


def predict_options(path: Path, world: Path) -> list[str]:
    if path.stem.startswith("continue"):
        return ["--frames=12"]
    return {
        "classification": [f"--data.predict_dir={world}/images/val"],
        "diffusion": ["--data.samples.classes=[0,2]"],
        "language": [f"--data.prompts={world}/prompts.txt", "--model.generation.max_new_tokens=4"],
        "text_to_image": ["--data.prompts.prompts=['a red three']"],
        "video": ["--data.prompts.prompts=['a one moving up']"],
    }[path.parent.name]


def named(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


RUN = sorted((alike[0] for alike in ALIKE.values()), key=lambda path: (path.stem in STARTS, named(path)))
"""Configurations to run, those that start from another one last."""


def classes(path: Path) -> tuple[str, ...]:
    """Return the classes of the model, of the data module and of the callbacks of a configuration."""
    config = yaml.safe_load(path.read_text())
    parts = [config["model"], config["data"], *config["trainer"]["callbacks"]]
    return (
        *(part["class_path"] for part in parts),
        *sorted(config["model"]["init_args"].keys() & {"pretrained", "vae"}),
    )


KILLED = {classes(path): path for path in reversed(RUN)}.values()
"""First configuration of each combination of classes. It is killed and resumed; the others differ in their options only."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", RUN, ids=named)
def test_a_shipped_configuration_from_fit_to_export(
    path: Path, world: Path, server: ForkServer, cache_home: Path, tmp_path: Path
) -> None:
    domain = path.parent.name
    config = tmp_path / path.name
    start = world / "exported" / domain / STARTS.get(path.stem, "")  # exported before, as in the documentation
    config.write_text(yaml.safe_dump(shrunk(path, world, start)))
    cache = {"XDG_CACHE_HOME": str(cache_home), "HF_HUB_OFFLINE": "1"}
    fit = ["fit", "--config", str(config), "--run_dir=run"]
    if path in KILLED:
        status, text = server.run(*fit, folder=tmp_path, kill_at=3, **cache)
        assert status == -9, text[-4000:]
    asks = path.stem in QUESTIONS  # its sequences have no text to predict and to export with
    exported = world / "exported" / domain / path.stem
    commands = [fit]
    if asks or path.stem.startswith(("digits", "stdlib", "linearize")):  # as fit validates, in all others
        commands.append(["validate", "--run_dir=run"])
    if not asks:
        commands.append(["predict", "--run_dir=run", *predict_options(path, world)])
        commands.append(["export", "run", str(exported)])
    results = run_in_turn(*commands, folder=tmp_path, **cache)
    for status, text in results:
        assert status == 0, text[-4000:]
    _, fitted = results[0]
    assert ("Restored all states" in fitted) == (path in KILLED), fitted[-4000:]
    assert read_header(resolve_checkpoint(tmp_path / "run"))["global_step"] == 4
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))
    assert (tmp_path / "run/checkpoints/learning_curves.png").exists()
    if asks:
        assert "val/accuracy" in fitted
        return
    assert [file for file in (tmp_path / "run/predict").rglob("*") if file.is_file()]
    EXPORTS.setdefault(domain, []).append(exported)


@pytest.mark.parametrize("path", MODELS, ids=named)
def test_a_shipped_configuration_builds_its_model_in_full_size(path: Path) -> None:
    """On the meta device, for those whose sizes the test above shrinks: their own sizes fit together."""
    options = yaml.safe_load(path.read_text())["model"]
    package, _, name = options["class_path"].rpartition(".")
    if "pretrained" in options["init_args"]:
        pytest.skip("its model is made from weights")
    options["init_args"].pop("vae", None)
    if path.stem == "folder" and path.parent.name in ("classification", "diffusion"):
        options["init_args"]["num_classes"] = 3  # the number follows from the data
    with torch.device("meta"):
        module = getattr(import_module(package), name)(**options["init_args"])
    assert sum(parameter.numel() for parameter in module.parameters()) > 1000


USES = {
    "classification": "assert model.eval()",
    "diffusion": "assert len(images) == 2",
    "language": "assert model.generate(tokenizer('The river', return_tensors='pt')['input_ids'], max_new_tokens=3) is not None",
    "text_to_image": "assert model.eval()",
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


@pytest.fixture(scope="module")
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tasks")
    save_task_data(root)
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
    """RandAugment asks Pillow for zero bits, once in some hundred images, which newer versions of Pillow reject."""
    from mhla_tasks.classification import ImageNetShards

    transform = ImageNetShards("a.tar", "b.tar", image_size=32)._augmented()
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
