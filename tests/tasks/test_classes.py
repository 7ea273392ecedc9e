"""Classes belong to a data set by name: folders, shards, checkpoints and exports agree on them, whoever lacks one."""

from __future__ import annotations

import csv
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning import LightningDataModule
from mhla_tasks.classification import ImageNetShards, VisionTransformer
from mhla_tasks.commandline import registry
from mhla_tasks.commandline.parser import main
from mhla_tasks.diffusion.data import ImageShards as DiffusionImages
from PIL import Image

from lightning_mhla.data import ResumableDataModule, ShardOptions, ShardSets
from lightning_mhla.data.classes import read_classes

ROOT = Path(__file__).parents[2]
COLOURS = {"ant": (220, 20, 20), "polar bear": (20, 220, 20), "cat": (20, 20, 220)}
SMALL = [
    "--data.image_size=16", "--data.batch_size=6", "--data.num_workers=0",
    "--data.augment.color_jitter=0", "--model.shape.dim=16", "--model.shape.depth=1",
    "--model.shape.heads=1", "--model.attention.block_grid=[2,2]", "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
]  # fmt: skip


def save(folder: Path, classes: dict[str, int]) -> Path:
    """Write a number of images of one color for each class, ``CLASS/N.png``."""
    draw = np.random.default_rng(len(classes))
    for name, count in classes.items():
        place = folder / name
        place.mkdir(parents=True)
        for number in range(count):
            pixels = np.array(COLOURS.get(name, (90, 90, 90))) + draw.integers(-20, 20, (16, 16, 3))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with three training classes, a validation folder without the first one, and a run that has learned the colors."""
    folder = tmp_path_factory.mktemp("classes")
    save(folder / "train", dict.fromkeys(COLOURS, 12))
    save(folder / "val", {"cat": 3, "polar bear": 3})
    parts = [f"--data.{part}={folder / part}" for part in ("train", "val")]
    main(["fit", f"--config={ROOT}/configs/classification/folder.yaml", f"--run_dir={folder / 'run'}", *parts, *SMALL,
          "--trainer.max_epochs=8", "--model.training.optimizer.lr=0.003"])  # fmt: skip
    return folder


def loaded(data: LightningDataModule) -> Any:
    data.prepare_data()
    return data


def labels(data: Any, stage: str) -> list[int]:
    source = data.source(stage)
    return [source[index]["label"] for index in range(len(source))]


def test_a_few_validation_batches_have_images_of_all_classes(tmp_path: Path) -> None:
    save(tmp_path, {"ant": 8, "cat": 8})
    data = ImageNetShards(str(tmp_path), str(tmp_path), batch_size=4, num_workers=0, image_size=8)
    for loader in (data.val_dataloader(), data.test_dataloader()):
        batches = list(loader)
        assert set(batches[0]["label"].tolist()) == {0, 1}
        read = {name: torch.cat([batch[name] for batch in batches]) for name in ("label", "image")}
        assert sorted(read["label"].tolist()) == [0] * 8 + [1] * 8
        assert torch.equal(read["image"].mean((2, 3)).argmax(1), 2 * read["label"]), "ants are red, cats are blue"


def test_locations_may_be_paths_and_are_saved_as_text(tmp_path: Path) -> None:
    save(tmp_path / "data", {"ant": 1, "cat": 2})
    locations: list[Any] = [tmp_path / "data", [tmp_path / "data"], [str(tmp_path / "data")]]

    class Remote:
        """Remote path, which has no local one."""

        def __str__(self) -> str:
            return "s3://bucket/train.tar"

        def __fspath__(self) -> str:
            raise NotImplementedError

    remote: Any = [tmp_path / "data", Remote()]
    assert ShardSets(remote, "").locations["train"] == [str(tmp_path / "data"), "s3://bucket/train.tar"]
    for where in locations:
        options: Any = {"cache_dir": tmp_path / "cache"}
        data = ImageNetShards(where, where, image_size=8, shards=ShardOptions(**options))
        assert labels(data, "train") == [0, 1, 1]
        assert data.class_names == ["ant", "cat"]
        torch.save({**data.hparams}, tmp_path / "hparams")
        saved = torch.load(tmp_path / "hparams", weights_only=True)
        assert saved["train"] in (str(tmp_path / "data"), [str(tmp_path / "data")])
        assert saved["shards"]["cache_dir"] == str(tmp_path / "cache")


def test_a_data_module_may_save_an_empty_dict() -> None:
    class Empty(ResumableDataModule):
        def __init__(self) -> None:
            super().__init__(batch_size=1)
            self.save_hyperparameters({})

    assert not Empty().hparams


def test_a_validation_folder_without_a_class_keeps_the_labels(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["validate", f"--run_dir={world / 'run'}"])
    table = capsys.readouterr().out
    (accuracy,) = [line.split()[-2] for line in table.splitlines() if "val/accuracy" in line]
    assert float(accuracy) > 0.9


def test_the_number_of_classes_follows_from_the_data(world: Path) -> None:
    checkpoint = torch.load(world / "run/checkpoints/last.ckpt", weights_only=True)
    assert checkpoint["label_names"] == ["ant", "cat", "polar bear"]
    assert checkpoint["hyper_parameters"]["num_classes"] == 3
    config = yaml.safe_load((world / "run/config.yaml").read_text())
    assert config["model"]["init_args"]["num_classes"] in (None, 3)


@pytest.mark.parametrize("option", ["--data.num_classes=10", "--model.num_classes=4"])
def test_a_contradiction_is_an_error(world: Path, tmp_path: Path, option: str) -> None:
    parts = [f"--data.{part}={world / part}" for part in ("train", "val")]
    command = [
        "fit",
        f"--config={ROOT}/configs/classification/folder.yaml",
        f"--run_dir={tmp_path / 'run'}",
        *parts,
        *SMALL,
    ]
    with pytest.raises(SystemExit, match=r"holds 3 classes \(ant, cat, polar bear\), but .*num_classes=") as error:
        main([*command, option])
    assert "leave it out" in str(error.value)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"cat": 1, "dog": 1}, "has classes that the training data does not have: 'dog'; it has 'ant', 'cat', 'polar bear'"),
        ({"Cat": 1, "ant": 1}, "does not have: 'Cat'"),
        ({"polar_bear": 1}, "does not have: 'polar_bear'"),
    ],
    ids=["unknown", "case", "spelling"],
)  # fmt: skip
def test_unknown_classes_are_named(world: Path, tmp_path: Path, found: dict[str, int], message: str) -> None:
    save(tmp_path / "val", found)
    with pytest.raises(SystemExit, match=message):
        main(["validate", f"--run_dir={world / 'run'}", f"--data.val={tmp_path / 'val'}"])


def test_predictions_and_exports_have_the_names(world: Path, tmp_path: Path) -> None:
    new = save(tmp_path / "new", {"polar bear": 2})
    (new / "polar bear" / "notes.txt").write_text("not an image")
    main(["predict", f"--run_dir={world / 'run'}", f"--data.predict_dir={new}"])
    rows = list(csv.DictReader((world / "run/predict/predictions.csv").open()))
    assert [row["predicted"] for row in rows] == ["polar bear", "polar bear", ""]
    assert rows[2]["path"].endswith("notes.txt")
    registry.run("export", [str(world / "run"), str(tmp_path / "exported")])
    model = VisionTransformer.from_pretrained(str(tmp_path / "exported"))
    for image in (new / "polar bear/0.png", Image.open(new / "polar bear/0.png")):
        said = model.predict(image, top=2)
        assert next(iter(said)) == "polar bear"
        assert len(said) == 2
        assert abs(said["polar bear"] - float(rows[0]["polar bear"])) < 1e-5


def shard_labels(folder: Path, prefix: str) -> dict[int, set[bytes]]:
    """Return the colors in the images of each label: for each image, the index of its strongest color."""
    found: dict[int, set[Any]] = {}
    for path in sorted(folder.glob(f"{prefix}-*.tar")):
        with tarfile.open(path) as tar:
            files = {member.name: tar.extractfile(member) for member in tar}
            for name, stream in files.items():
                if name.endswith(".cls") and stream is not None:
                    picture = files[name.replace(".cls", ".png")]
                    assert picture is not None
                    pixels = np.asarray(Image.open(picture)).reshape(-1, 3).mean(0)
                    found.setdefault(int(stream.read()), set()).add(int(pixels.argmax()))
    return found


def test_shards_of_a_second_prefix_get_the_labels_of_the_first(world: Path, tmp_path: Path) -> None:
    for prefix in ("train", "val"):
        registry.run("prepare images", [str(world / prefix), str(tmp_path), "--prefix", prefix])
    assert shard_labels(tmp_path, "val") == {1: {2}, 2: {1}}
    assert read_classes(tmp_path / "val-classes.txt") == ["ant", "cat", "polar bear"]
    data = loaded(ImageNetShards(f"{tmp_path}/train-*.tar", f"{tmp_path}/val-*.tar", image_size=16, num_workers=0))
    assert data.num_classes == 3
    assert sorted(set(labels(data, "validate"))) == [1, 2]


def test_shards_with_a_list_of_their_own_are_matched_by_name(world: Path, tmp_path: Path) -> None:
    """Prepared apart, as before there was one list: the loader renumbers them."""
    for prefix in ("train", "val"):
        registry.run("prepare images", [str(world / prefix), str(tmp_path / prefix), "--prefix", prefix])
    assert shard_labels(tmp_path / "val", "val") == {0: {2}, 1: {1}}
    for kind in (ImageNetShards, DiffusionImages):
        data = loaded(kind(str(tmp_path / "train"), str(tmp_path / "val"), image_size=16, num_workers=0))
        source = data.source("validate")
        colours = {
            sample["label"]: int(sample["image"].mean((1, 2)).argmax()) for sample in map(source.__getitem__, range(6))
        }
        assert colours == {1: 2, 2: 1}
    mixed = loaded(ImageNetShards(str(tmp_path / "train"), str(world / "val"), image_size=16, num_workers=0))
    assert sorted(set(labels(mixed, "validate"))) == [1, 2], "a folder beside shards"


def test_a_list_of_classes_can_be_given(world: Path, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("zebra\ncat\npolar bear\nant\n")
    registry.run("prepare images", [str(world / "val"), str(tmp_path), "--classes", str(tmp_path / "names.txt")])
    assert shard_labels(tmp_path, "train") == {1: {2}, 2: {1}}
    (tmp_path / "few.txt").write_text("cat\n")
    with pytest.raises(SystemExit, match="does not have: 'polar bear'"):
        registry.run(
            "prepare images", [str(world / "val"), str(tmp_path / "b"), "--classes", str(tmp_path / "few.txt")]
        )
    with pytest.raises(SystemExit, match="is not a file; --classes takes a file"):
        registry.run(
            "prepare images", [str(world / "val"), str(tmp_path / "b"), "--classes", str(tmp_path / "none.txt")]
        )


def test_resuming_with_other_classes_is_an_error(world: Path, tmp_path: Path) -> None:
    save(tmp_path / "train", {"ant": 6, "cat": 6, "dog": 6})
    with pytest.raises(SystemExit, match=r"labels would mean other classes|data has 3, without \['polar bear'\]"):
        main(["fit", f"--run_dir={world / 'run'}", f"--data.train={tmp_path / 'train'}",
              f"--data.val={tmp_path / 'train'}", "--trainer.max_epochs=9"])  # fmt: skip
