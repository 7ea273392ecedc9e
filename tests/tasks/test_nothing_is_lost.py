"""Commands that replace or tidy what they wrote leave the user's files beside it alone."""

from __future__ import annotations

import errno
import json
import os
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from mhla_tasks.commandline import registry
from mhla_tasks.commandline.parser import main
from mhla_tasks.language.prepare import write_token_shards
from mhla_tasks.language.tokenizer import save_tokenizer, train_tokenizer
from mhla_tasks.text_to_image.writer import ImageWriter
from mhla_tasks.video.clips import write_clip
from PIL import Image

from lightning_mhla.callbacks.best import complete, relocate
from lightning_mhla.callbacks.recovery import set_aside
from lightning_mhla.checkpoints.runs import LogFiles, step_of
from lightning_mhla.data.write import shard_writer, write_shards
from lightning_mhla.generative.images import SampleWriter
from lightning_mhla.swap.saved import remove_stale
from lightning_mhla.system import files
from lightning_mhla.system.files import beside, exchange, give_second_name, rebuilt_folder, written_whole

ROOT = Path(__file__).parents[2]


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_text(errors="replace") for path in files}


def untouched(folder: Path, *names: str) -> bool:
    return all((folder / name).read_text() == name for name in names)


# Folders and files that are replaced


def test_a_backup_beside_an_export_stays(tmp_path: Path) -> None:
    """A folder that the user has called ``.old``, and a download of the same name."""
    names = ("model.old/weights.bin", "model.part", "model.mhla.old/x")
    make(tmp_path, "model/earlier", *names)
    with rebuilt_folder(tmp_path / "model") as aside:
        (aside / "new").write_text("new")
    assert untouched(tmp_path, *names)
    assert contents(tmp_path / "model") == {"earlier": "model/earlier", "new": "new"}


def test_a_model_that_the_user_has_moved_away_is_not_brought_back(tmp_path: Path) -> None:
    make(tmp_path, "model.old/weights.bin")
    with rebuilt_folder(tmp_path / "model") as aside:
        (aside / "new").write_text("new")
    assert contents(tmp_path) == {"model.old/weights.bin": "model.old/weights.bin", "model/new": "new"}


def test_a_folder_that_a_killed_export_was_replacing_is_brought_back(tmp_path: Path) -> None:
    make(tmp_path, "model/mine")
    (tmp_path / "model").rename(beside(tmp_path / "model", "old"))
    with rebuilt_folder(tmp_path / "model") as aside:
        (aside / "new").write_text("new")
    assert contents(tmp_path) == {"model/mine": "model/mine", "model/new": "new"}


def test_what_is_written_into_a_folder_while_it_is_replaced_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note that an editor saves, and a new file, between the copy of the user's files and the exchange of the folders."""
    target = tmp_path / "model"
    make(target, "notes", "weights", "sub/kept")
    (target / "empty").mkdir()

    def late(new: Path, path: Path, keep: bool = False) -> Path | None:
        (path / "new notes").write_text("late")
        (path / "editor").write_text("late")
        (path / "editor").rename(path / "notes")
        return exchange(new, path, keep)

    monkeypatch.setattr("lightning_mhla.system.files.exchange", late)
    with rebuilt_folder(target) as aside:
        (aside / "weights").write_text("new")
    assert contents(target) == {"new notes": "late", "notes": "late", "sub/kept": "sub/kept", "weights": "new"}
    assert (target / "empty").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_file_of_the_user_where_a_folder_belongs_is_an_error(tmp_path: Path) -> None:
    make(tmp_path, "model/tokenizer")
    with pytest.raises(FileExistsError, match="tokenizer"), rebuilt_folder(tmp_path / "model") as aside:
        make(aside, "tokenizer/vocab")
    assert contents(tmp_path) == {"model/tokenizer": "model/tokenizer"}


def test_downloads_and_backups_beside_files_that_are_written_stay(tmp_path: Path) -> None:
    names = ("a.part", "a.host.1.part", "a.old/x", "c.ckpt.part", "c.ckpt.old/x", "d.mp4.part", "e.png.part")
    make(tmp_path, *names)
    with written_whole(tmp_path / "a") as aside:
        aside.write_text("new")
    (tmp_path / "c.ckpt").mkdir()
    (tmp_path / "state").mkdir()
    give_second_name(tmp_path / "state", tmp_path / "c.ckpt")
    write_clip(tmp_path / "d.mp4", torch.zeros(2, 3, 16, 16, dtype=torch.uint8), 8)
    ImageWriter.write(SimpleNamespace(), tmp_path / "e.png", torch.zeros(3, 4, 4, dtype=torch.uint8), None)  # type: ignore[arg-type]
    assert untouched(tmp_path, *names)


def test_without_hard_links_a_second_name_is_a_copy_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: Any, **__: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    flushed: list[str] = []
    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(files, "flush", lambda path: flushed.append(path.name))
    make(tmp_path, "state/a", "state/below/b", "one")
    (tmp_path / "state/c").symlink_to("a")
    give_second_name(tmp_path / "state", tmp_path / "again")
    assert {"a", "b"} <= set(flushed)
    assert "c" not in flushed, "the target of a link was flushed in its place"
    assert contents(tmp_path / "again") == contents(tmp_path / "state")
    assert os.readlink(tmp_path / "again/c") == "a"


def test_weights_of_the_user_in_the_folder_of_an_export_stay(tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "model"
    main(["fit", f"--config={ROOT}/configs/classification/digits.yaml", f"--run_dir={run}",
          "--model.init_args.shape.dim=16", "--model.init_args.shape.depth=1", "--model.init_args.shape.heads=1",
          "--trainer.max_epochs=1", "--trainer.limit_train_batches=1", "--trainer.limit_val_batches=1",
          "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"])  # fmt: skip
    names = ("my-lora.safetensors", "backup/model.safetensors", "notes/model.safetensors.index.json")
    make(target, *names)
    make(tmp_path, "model.old/weights")
    registry.run("export", [str(run), str(target)])
    assert untouched(target, *names)
    assert untouched(tmp_path, "model.old/weights")
    assert (target / "model.safetensors").stat().st_size > 1000


def test_an_index_cannot_name_files_that_are_no_weights(tmp_path: Path) -> None:
    names = ("thesis.zip", "model.py", "other-00001-of-00002.safetensors", "model-00001-of-00002.bin")
    shard = "model-00001-of-00002.safetensors"
    make(tmp_path, *names, shard)
    listed = {"weight_map": {str(number): name for number, name in enumerate((*names, shard, "../outside"))}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(listed))
    remove_stale(tmp_path, "model", None, "bin")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


# Shards and tokenizers that are prepared


def encode(item: int) -> dict[str, Any]:
    return {"cls": str(item)}


def test_shards_that_were_not_prepared_here_are_not_deleted(tmp_path: Path) -> None:
    """A downloaded data set whose files have the names that a preparation would give."""
    make(tmp_path, "train-0000.tar", "train-0001.tar", "train-0000.tar.index.npz")
    for force in (False, True):
        with pytest.raises(ValueError, match="move them away, or choose another folder or --prefix"):
            write_shards([1], encode, tmp_path, "train", 1, force=force)
    assert untouched(tmp_path, "train-0000.tar", "train-0001.tar", "train-0000.tar.index.npz")


@pytest.mark.parametrize("gone", [(), ("train-origins.jsonl.gz",), ("train-manifest.json",)])
def test_prepared_shards_are_made_again_where_one_file_says_that_they_are_ours(
    tmp_path: Path, gone: tuple[str, ...]
) -> None:
    write_shards([1, 2, 3], encode, tmp_path, "train", 1)
    make(tmp_path, "other-0000.tar", "train-final.tar", "train-0000.tar.part", "train.tar")
    for name in gone:
        (tmp_path / name).unlink()
    (path,) = write_shards([7], encode, tmp_path, "train", 1, force=True)
    with tarfile.open(path) as tar:
        assert tar.extractfile("00000000.cls").read() == b"7"  # type: ignore[union-attr]
    assert len(list(tmp_path.glob("train-0*.tar"))) == 1
    assert untouched(tmp_path, "other-0000.tar", "train-final.tar", "train-0000.tar.part", "train.tar")


def test_a_download_of_the_same_name_as_a_shard_stays(tmp_path: Path) -> None:
    names = ("train-0000.tar.part", "train-0000.tar.host.12.part")
    make(tmp_path, *names)
    left, other = beside(tmp_path / "train-0000.tar"), beside(tmp_path / "train-00001.tar")
    for path in (left, other):
        path.touch()
    with shard_writer(tmp_path / "train-0000.tar") as writer:
        writer.write({"__key__": "0", "cls": "1"})
    assert untouched(tmp_path, *names)
    assert not left.exists(), "of a process that was killed"
    assert other.exists(), "of another shard"


def test_a_tokenizer_of_the_user_is_set_aside(tmp_path: Path) -> None:
    texts = tmp_path / "a.txt"
    texts.write_text("some text " * 300)
    target = tmp_path / "shards"
    mine, new = train_tokenizer(["entirely different " * 50], 280), train_tokenizer(["some text " * 50], 270)
    make(target, "tokenizer.part/mine", "tokenizer-1/mine")
    save_tokenizer(mine, target / "tokenizer")
    before = (target / "tokenizer/tokenizer.json").read_text()
    write_token_shards(target, [str(texts)], new)
    assert (target / "tokenizer-2/tokenizer.json").read_text() == before
    assert (target / "tokenizer/tokenizer.json").read_text() != before
    assert untouched(target, "tokenizer.part/mine", "tokenizer-1/mine")


# Predictions


@pytest.mark.parametrize("output", ["png", "npz"])
def test_pictures_of_the_user_beside_samples_stay(tmp_path: Path, output: Any) -> None:
    names = ("photo.png", "class3.png", "000001-class3-edited.png", "images.npy.part", "labels.npy.part")
    make(tmp_path / "samples", *names)
    make(tmp_path, "samples.npz.part")
    Image.new("L", (2, 2)).save(tmp_path / "samples/000099-class1.png")
    trainer: Any = SimpleNamespace(
        fast_dev_run=False,
        log_dir=str(tmp_path), default_root_dir=str(tmp_path), is_global_zero=True,
        world_size=1, strategy=SimpleNamespace(barrier=lambda: None),
    )  # fmt: skip
    writer = SampleWriter(output)
    pixels = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    batch = {"pixels": pixels, "index": torch.arange(2), "label": torch.tensor([3, 4])}
    writer.on_predict_start(trainer, trainer)
    writer.on_predict_batch_end(trainer, trainer, batch)
    writer.on_predict_end(trainer, trainer)
    assert untouched(tmp_path / "samples", *names)
    assert untouched(tmp_path, "samples.npz.part")
    assert not (tmp_path / "samples/000099-class1.png").exists(), "a sample of an earlier call"
    if output == "npz":
        assert np.load(tmp_path / "samples.npz")["arr_1"].tolist() == [3, 4]
        assert len(list((tmp_path / "samples").iterdir())) == len(names)
    else:
        assert (tmp_path / "samples/000001-class4.png").exists()


# Checkpoints


def test_a_checkpoint_cannot_name_files_for_removal(tmp_path: Path) -> None:
    """ModelCheckpoint removes what a resumed state lists among its best, once something better comes."""
    callback = ModelCheckpoint(dirpath=tmp_path / "checkpoints", monitor="x", save_top_k=3)
    inside = [f"{tmp_path}/checkpoints/a={number}.ckpt" for number in range(2)]
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/link").symlink_to(tmp_path)
    outside = [
        f"{tmp_path}/checkpoints/../thesis.ckpt", f"{tmp_path}/thesis.ckpt", f"{tmp_path}/checkpoints/recovery",
        f"{tmp_path}/checkpoints/link/thesis.ckpt", f"{tmp_path}/checkpoints", "/etc/passwd",
    ]  # fmt: skip
    for worst in outside:
        state = {
            "dirpath": str(callback.dirpath), "best_k_models": {**dict.fromkeys(inside, 1.0), worst: 2.0},
            "best_model_path": worst, "kth_best_model_path": worst, "last_model_path": "", "best_model_score": 2.0,
        }  # fmt: skip
        found = relocate(state, callback)
        assert set(found["best_k_models"]) == set(inside), worst
        assert found["best_model_path"] in inside
        assert found["kth_best_model_path"] == "", "it is chosen again once there are three"


def test_a_plan_removes_nothing_behind_a_link(tmp_path: Path) -> None:
    folder = tmp_path / "run/checkpoints"
    make(folder, "old.ckpt", "state.ckpt", "notes.txt")
    make(tmp_path, "mine/thesis.ckpt")
    (folder / "link").symlink_to(tmp_path / "mine")
    removals = ["old.ckpt", "link/thesis.ckpt", "../../mine/thesis.ckpt", "notes.txt"]
    complete({"names": ["link/new.ckpt"], "removals": removals}, folder / "state.ckpt", folder)
    assert contents(tmp_path / "mine") == {"thesis.ckpt": "mine/thesis.ckpt"}
    assert sorted(path.name for path in folder.iterdir()) == ["link", "notes.txt", "state.ckpt"]


def test_only_names_of_states_count_as_older_states(tmp_path: Path) -> None:
    names = ("step=5.ckpt", "step=00000005-backup.ckpt", "step=00000005.ckpt.old", "my step=00000005.ckpt")
    assert [step_of(Path(name)) for name in names] == [None] * 4
    assert step_of(Path("step=00000005.ckpt")) == 5
    assert step_of(Path("step=123456789.ckpt")) == 123456789


def test_checkpoints_are_not_set_aside_over_a_link(tmp_path: Path) -> None:
    state = tmp_path / "recovery/step=00000005.ckpt"
    state.parent.mkdir()
    torch.save({"state_dict": {}, "global_step": 5}, state)
    (tmp_path / "set-aside-1").symlink_to(tmp_path / "nowhere")
    set_aside(tmp_path, 1)
    assert (tmp_path / "set-aside-2/recovery/step=00000005.ckpt").exists()


def test_the_log_folder_of_a_failed_start_goes_only_if_it_is_new(tmp_path: Path) -> None:
    written = ("config.yaml", "hparams.yaml", "metrics.csv", "events.out.tfevents.1.host.1.0")
    make(tmp_path / "earlier", *written)
    for name in ("earlier", "notes", "nested", "new"):
        logger = TensorBoardLogger(tmp_path, name="", version=name)
        logs = LogFiles(Trainer(logger=logger, accelerator="cpu", enable_progress_bar=False))
        make(tmp_path / name, *written, *(["notes.txt"] if name == "notes" else []))
        (tmp_path / name / "checkpoints").mkdir()
        if name == "nested":
            make(tmp_path / name / "checkpoints", "config.yaml")
        logs.remove(configuration=True)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    earlier = {f"earlier/{name}" for name in written}
    assert left == earlier | {
        "notes/config.yaml",
        "notes/notes.txt",
        "nested/config.yaml",
        "nested/checkpoints/config.yaml",
    }
    assert not (tmp_path / "new").exists()


def test_an_interrupted_start_leaves_its_configuration(tmp_path: Path) -> None:
    logs = LogFiles(
        Trainer(logger=CSVLogger(tmp_path, name="", version=0), accelerator="cpu", enable_progress_bar=False)
    )
    make(tmp_path / "version_0", "config.yaml", "metrics.csv")
    logs.remove(configuration=False)
    assert [path.name for path in (tmp_path / "version_0").iterdir()] == ["config.yaml"]


def test_states_of_another_run_in_the_same_folder_are_set_aside(tmp_path: Path) -> None:
    """Runs without a logger share a folder; a start from elsewhere would remove earlier states as superseded."""
    (tmp_path / "recovery").mkdir()
    for step in (3, 7):
        torch.save({"state_dict": {}, "global_step": step}, tmp_path / f"recovery/step={step:08d}.ckpt")
    set_aside(tmp_path, 10)
    assert len(list((tmp_path / "recovery").iterdir())) == 2, "of this run, and earlier"
    set_aside(tmp_path, 10, everything=True)
    assert len(list((tmp_path / "set-aside-1/recovery").iterdir())) == 2


def test_the_table_of_a_version_that_the_user_named_is_kept(tmp_path: Path) -> None:
    """Lightning deletes it, in a folder that is not that of a run."""
    for number in range(2):
        logger = CSVLogger(tmp_path, name="mine", version="one")
        LogFiles(Trainer(logger=logger, accelerator="cpu", enable_progress_bar=False))
        logger.log_metrics({"x": float(number)}, step=0)
        logger.save()
    assert [(tmp_path / f"mine/one/{name}.csv").read_text() for name in ("metrics-1", "metrics")] == [
        "step,x\n0,0.0\n", "step,x\n0,1.0\n"
    ]  # fmt: skip
