"""The command line: training, exact resume, predict on any number of processes, and errors a user meets."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from mhla_tasks.commandline import parser
from mhla_tasks.diffusion import ClassToImage, DiTShape, GenerationMetrics
from PIL import Image
from processes import run_cli
from tiny import ROOT, digits_config

from lightning_mhla import AttentionConfig
from lightning_mhla.generative.drawing import draw_grid

DRESSED = {"kind": "mhla", "block_grid": [2, 2], "lepe": 3, "gate": True}
DDP = ["--config", str(ROOT / "configs/trainer/ddp.yaml"), "--trainer.accelerator=cpu", "--trainer.devices=2"]
FSDP = ["--config", str(ROOT / "configs/trainer/fsdp.yaml"), "--trainer.accelerator=cpu", "--trainer.devices=2"]


def losses(folder: Path) -> dict[int, str]:
    with (folder / "log/metrics.csv").open() as stream:
        return {int(row["step"]): row["train/loss"] for row in csv.DictReader(stream) if row.get("train/loss")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Undisturbed run of eight steps, over the end of an epoch."""
    folder = tmp_path_factory.mktemp("whole")
    parser.main(["fit", "--config", str(digits_config(folder)), "--trainer.max_steps=8"])
    return folder


@pytest.mark.parametrize("step", [3, 6])
def test_resume_is_bitwise_exact(whole: Path, tmp_path: Path, step: int) -> None:
    checkpoint = whole / f"checkpoints/step={step}.ckpt"
    parser.main(["fit", "--config", str(digits_config(tmp_path)), "--trainer.max_steps=8", f"--ckpt_path={checkpoint}"])
    assert losses(tmp_path) == {k: v for k, v in losses(whole).items() if k >= step}
    one, two = (torch.load(f / "checkpoints/step=8.ckpt", weights_only=True) for f in (whole, tmp_path))
    for key in ("state_dict", "current_model_state"):
        assert all(torch.equal(value, two[key][name]) for name, value in one[key].items()), key
    drawn = [(f / "log/generation.jsonl").read_text() for f in (whole, tmp_path)]
    assert drawn[0] == drawn[1]


def test_samples_that_fill_up_a_batch_do_not_count(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ClassToImage.load_from_checkpoint(whole / "checkpoints/step=8.ckpt", weights_only=True).eval()
    monkeypatch.setattr(module, "log", lambda *_, **__: None)
    samples = {"image": torch.rand(3, 1, 8, 8), "label": torch.tensor([1, 2, 3]), "index": torch.arange(3)}
    losses = []
    for rows in ([0, 1, 2], [0, 2]):
        module.val_loss.reset(), module.val_samples.reset()
        batch = {name: values[rows] for name, values in samples.items()}
        module.validation_step({**batch, "valid": torch.tensor([row != 1 for row in rows])}, 0)
        losses.append(float(module.val_loss.compute()))
        assert module.val_samples.compute() == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    samples["image"][0] = torch.nan
    module.validation_step({**samples, "valid": torch.ones(3, dtype=torch.bool)}, 0)
    assert module.val_loss.compute().isnan(), "a mean of the other samples would look like a good result"


def test_validation_is_the_same_each_time_and_counts_every_sample(whole: Path) -> None:
    checkpoint = str(whole / "checkpoints/step=8.ckpt")
    values = []
    for batch_size in (240, 100):
        module = ClassToImage.load_from_checkpoint(checkpoint, weights_only=True)
        from lightning import Trainer
        from mhla_tasks.diffusion import DigitImages

        trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
        values += trainer.validate(module, DigitImages(batch_size=batch_size), verbose=False)
    assert values[0]["val/samples"] == values[1]["val/samples"] == 360
    assert values[0]["val/loss"] == pytest.approx(values[1]["val/loss"], rel=1e-5)


def predict(folder: Path, checkpoint: Path, *options: str, processes: int = 1) -> Path:
    """Draw samples from a checkpoint, and return the log folder of the run."""
    logger = yaml.safe_dump(
        {
            "trainer": {
                "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": str(folder), "name": "", "version": ""}}
            }
        }
    )
    folder.mkdir()
    (folder / "logger.yaml").write_text(logger)
    places = [f"--ckpt_path={checkpoint}", "--config", str(folder / "logger.yaml")]
    arguments = [
        "predict",
        *places,
        "--model.sampling.steps=4",
        *options,
        "--trainer.enable_progress_bar=false",
    ]
    if processes > 1:
        run_cli(*arguments, *DDP)
    else:
        parser.main([*arguments, "--trainer.accelerator=cpu"])
    return folder


def test_predict_draws_the_same_on_any_number_of_processes(whole: Path, tmp_path: Path) -> None:
    checkpoint = whole / "checkpoints/step=8.ckpt"
    classes = ["--data.samples.classes=[3,7]", "--data.samples.per_class=5"]
    one = predict(tmp_path / "one", checkpoint, *classes)
    batched = predict(tmp_path / "batched", checkpoint, *classes, "--data.batch_size=4")
    two = predict(tmp_path / "two", checkpoint, *classes, "--data.batch_size=6", processes=2)
    other = predict(tmp_path / "other", checkpoint, *classes, "--data.samples.seed=1")
    names = [f"{index:06d}-class{(3, 7)[index % 2]}.png" for index in range(10)]
    pictures = {}
    for folder in (one, batched, two, other):
        assert sorted(path.name for path in (folder / "samples").iterdir()) == names
        pictures[folder] = np.stack([np.array(Image.open(folder / "samples" / name)) for name in names]).astype(int)
    assert pictures[one].shape == (10, 8, 8)
    assert np.abs(pictures[batched] - pictures[one]).max() <= 1
    assert np.abs(pictures[two] - pictures[one]).max() <= 1
    assert np.abs(pictures[other] - pictures[one]).max() > 20
    array = predict(
        tmp_path / "npz",
        checkpoint,
        *classes,
        "--model.output=npz",
        "--data.batch_size=4",
        processes=2,
    )
    with np.load(array / "samples.npz") as content:
        assert content["arr_0"].shape == (10, 8, 8, 3)
        assert content["arr_0"].dtype == np.uint8
        assert np.abs(content["arr_0"].astype(int) - pictures[one][..., None]).max() <= 1
        assert content["arr_1"].tolist() == [3, 7] * 5
    assert not (array / "samples").exists()


def test_sharded_training_logs_the_same_samples(start: Path, tmp_path: Path) -> None:
    """Weights that do not move, on two processes that share them and on one."""
    still = {"optimizer": {"lr": 0.0, "weight_decay": 0.0}, "ema_decay": None}
    rows = []
    for name in ("one", "sharded"):
        folder = tmp_path / name
        config = digits_config(folder, **still, attention=DRESSED, pretrained=str(start))
        if name == "one":
            parser.main(["fit", "--config", str(config), "--trainer.max_steps=1"])
        else:
            run_cli("fit", "--config", str(config), *FSDP, "--trainer.max_steps=1")
        rows.append(json.loads((folder / "log/generation.jsonl").read_text()))
    assert rows[0]["fid"] == pytest.approx(rows[1]["fid"], rel=1e-4)
    assert rows[0]["kid"] == pytest.approx(rows[1]["kid"], rel=1e-4)


def test_weights_to_start_from_are_not_read_where_a_checkpoint_is(start: Path, tmp_path: Path) -> None:
    config = digits_config(tmp_path, attention=DRESSED, pretrained=str(start))
    parser.main(["fit", "--config", str(config), "--trainer.max_steps=1"])
    config = digits_config(tmp_path, attention=DRESSED, pretrained="gone")
    checkpoint = tmp_path / "checkpoints/step=1.ckpt"
    parser.main(["fit", "--config", str(config), "--trainer.max_steps=2", f"--ckpt_path={checkpoint}"])
    assert (tmp_path / "checkpoints/step=2.ckpt").exists()


def test_samples_are_scored_on_the_way_and_once_more_if_stopped_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = digits_config(tmp_path)
    config.write_text(config.read_text().replace("every_n_steps: null", "every_n_steps: 2"))

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GenerationMetrics, "on_train_end", stopped)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            parser.main(["fit", "--config", str(config), "--trainer.max_steps=4"])
    rows = tmp_path / "log/generation.jsonl"
    assert [json.loads(line)["step"] for line in rows.read_text().splitlines()] == [2]
    last = tmp_path / "checkpoints/step=4.ckpt"
    parser.main(["fit", "--config", str(config), "--trainer.max_steps=4", f"--ckpt_path={last}"])
    assert [json.loads(line)["step"] for line in rows.read_text().splitlines()] == [2, 4]


@pytest.mark.parametrize("objective", ["ddpm", "flow"])
def test_true_half_precision_trains(tmp_path: Path, objective: str) -> None:
    config = digits_config(tmp_path, process={"objective": objective}, sampling={"steps": 3})
    config.write_text(config.read_text().replace("sampler: euler", "sampler: null"))
    parser.main(["fit", "--config", str(config), "--trainer.precision=bf16-true", "--trainer.max_steps=2"])
    assert json.loads((tmp_path / "log/generation.jsonl").read_text())["fid"] > 0


def test_ddpm_with_learned_variance_trains_and_samples(tmp_path: Path) -> None:
    config = digits_config(
        tmp_path, process={"objective": "ddpm", "learn_sigma": True}, sampling={"sampler": "ddpm", "steps": 5}
    )
    config.write_text(config.read_text().replace("sampler: euler", "sampler: ddim"))
    parser.main(["fit", "--config", str(config)])
    assert (tmp_path / "log/generation.jsonl").exists()
    state = torch.load(tmp_path / "checkpoints/step=3.ckpt", weights_only=True)["state_dict"]
    assert state["network.head.weight"].shape[0] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--model.training.optimizer.lr=1e30", "--trainer.max_steps=9"],
            "at step 1: first in the loss itself, every module's output is finite",
        ),
        (["--model.sample_size=16"], "images of channels and sides (1, 8, 8) for a model of (1, 16, 16)"),
        (
            ["--model.num_classes=5"],
            "model.num_classes=5 does not fit the data, which has num_classes=10; give --model.num_classes=10",
        ),
        (["--model.sampling.sampler=ddim"], "sampler='ddim' does not support objective 'flow'"),
        (["--model.pretrained=nowhere"], "pretrained nowhere is neither a file, nor a folder of a DiT"),
        (["--model.attention.block_grid=[9,4]"], "9"),
        (["--data.batch_size=2000"], "do not fill one batch of batch_size=2000"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser.main(["fit", "--config", str(digits_config(tmp_path)), *options])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


def test_predict_of_a_class_that_there_is_not(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        predict(tmp_path / "wrong", whole / "checkpoints/step=8.ckpt", "--data.samples.classes=[10]")
    assert "class 10 is not one of 0 to 9; see samples.classes" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / "configs/diffusion").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_configuration_builds_its_model(path: Path) -> None:
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    options = content["model"]["init_args"]
    options.pop("pretrained", None)
    options.setdefault("num_classes", 7)  # configurations of one's own folders leave it to the data
    with torch.device("meta"):
        model = ClassToImage(**{**options, "attention": AttentionConfig(**options["attention"])})
    data = content["data"]["init_args"]
    embedded = 28 if path.stem.startswith("mnist") else 8
    side = data.get("sample_size", data.get("image_size", embedded))  # latents, own images in pixels, embedded digits
    assert model.network.sides == (side, side)
    blocks = [layer.attn.layout.num_blocks for layer in model.network.backbone.layers]
    known = {"mnist": 49, "gla": 1, "mhla": 16}
    assert set(blocks) == {known["mnist" if path.stem == "mnist" else options["attention"]["kind"]]}


def test_grids_of_many_classes_are_in_order() -> None:
    images = torch.zeros(23, 3, 70, 70, dtype=torch.uint8)
    figure = draw_grid(images, 1000, "title")
    assert figure.axes[0].images[0].get_array().shape == (3 * 71 - 1, 10 * 71 - 1, 3)  # type: ignore[union-attr]
    labelled = draw_grid(torch.zeros(20, 1, 8, 8, dtype=torch.uint8), 10, "title")
    assert [text.get_text() for text in labelled.axes[0].get_yticklabels()] == [str(label) for label in range(10)]


def test_training_drops_labels() -> None:
    from mhla_tasks.diffusion.process import ProcessConfig
    from mhla_tasks.diffusion.sampling import DiTSamplingConfig

    made = ClassToImage(
        AttentionConfig(block_grid=[2, 2]), 10, 8, 1, shape=DiTShape(dim=16, depth=1, heads=2),
        process=ProcessConfig("flow", label_dropout=0.5), sampling=DiTSamplingConfig("euler"),
    )  # fmt: skip
    made.log_loss = lambda loss, count: loss  # type: ignore[method-assign]
    seen: list[torch.Tensor] = []
    made.network.register_forward_pre_hook(lambda module, args: seen.append(args[2]))
    made.training_step({"image": torch.rand(200, 1, 8, 8), "label": torch.full((200,), 3)}, 0)
    assert set(seen[0].tolist()) == {3, 10}
    assert 60 < int((seen[0] == 10).sum()) < 140
