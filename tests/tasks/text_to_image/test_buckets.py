"""Images of several sizes: a batch holds one size, and everything else stays as it is with one."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from fork_server import ForkServer
from hypothesis import given, settings
from hypothesis import strategies as st
from mhla_tasks.captioned.encoded import EncodedSource, encode_samples
from mhla_tasks.commandline import registry
from mhla_tasks.text_to_image import CaptionedImageShards, ImageLatentShards
from mhla_tasks.text_to_image import buckets as buckets_module
from mhla_tasks.text_to_image.buckets import EXTENSIONS, nearest_bucket, parse_buckets, sort_into_buckets
from PIL import Image
from sana import save_pipeline
from test_text_to_image_training import config

from lightning_mhla.data import (
    BrokenSampleError,
    ResumableLoader,
    ShardOptions,
    ShardReader,
    ShardUnavailableError,
    write_shards,
)
from lightning_mhla.data.captioned import FolderFiles, ShardFiles
from lightning_mhla.data.loader import Progress
from lightning_mhla.data.sampling import grouped_order

BUCKETS = ["16x16", "8x24", "24x8"]
SHAPES = [(40, 44), (20, 70), (64, 20), (33, 30), (18, 40), (31, 32)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with 30 images of six shapes; three are nearly square, and one is broken."""
    home = tmp_path / "pictures"
    home.mkdir()
    for number in range(30):
        height, width = SHAPES[number % 6]
        Image.new("RGB", (width, height), (8 * number, 0, 0)).save(home / f"{number:02d}.png")
        (home / f"{number:02d}.txt").write_text(f"picture {number}")
    whole = (home / "07.png").read_bytes()
    (home / "07.png").write_bytes(whole[: len(whole) // 2])
    return home


def data(folder: Path, batch_size: int = 3, buckets: list[str] | None = None) -> CaptionedImageShards:
    where = str(folder)
    return CaptionedImageShards(where, where, buckets=buckets or BUCKETS, batch_size=batch_size, num_workers=0)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(groups=st.lists(st.integers(0, 3), min_size=0, max_size=50), batch=st.integers(1, 5), seed=st.integers(0, 5))
def test_batches_of_one_group(groups: list[int], batch: int, seed: int) -> None:
    kinds, order = np.array(groups, np.int64), np.random.default_rng(seed).permutation(len(groups))
    found = grouped_order(order, kinds, batch)
    assert len(set(found)) == len(found) == sum(count // batch * batch for count in Counter(groups).values())
    assert all(len(set(kinds[part])) == 1 for part in found.reshape(-1, batch))
    places = np.argsort(order) if len(order) else order
    assert (np.diff([places[part[-1]] for part in found.reshape(-1, batch)]) > 0).all(), "not as early as it is full"


def test_the_nearest_ratio() -> None:
    sizes = parse_buckets(["512x512", "384x640", "640x384"])
    assert [nearest_bucket(*shape, sizes) for shape in ((700, 800), (100, 170), (1000, 500), (512, 512))] == [
        0,
        1,
        2,
        0,
    ]


@pytest.mark.parametrize("world", [1, 3])
def test_a_batch_has_one_size_and_an_epoch_every_sample(
    folder: Path, world: int, caplog: pytest.LogCaptureFixture
) -> None:
    source = data(folder).source("train")
    loaders = [ResumableLoader(source, 3, train=True, seed=0, rank=rank, world=world) for rank in range(world)]
    batches = [list(loader) for loader in loaders]
    assert {len(each) for each in batches} == {len(loaders[0])} == {9}
    together = [torch.cat([part["index"] for part in parts]).tolist() for parts in zip(*batches, strict=True)]
    alone = [batch["index"].tolist() for batch in ResumableLoader(source, 3, train=True, seed=0)]
    assert together == alone
    assert all(len({tuple(part["image"].shape[1:]) for part in parts}) == 1 for parts in zip(*batches, strict=True))
    shapes = Counter(tuple(batch["image"].shape[2:]) for batch in batches[0])
    assert shapes == {(16, 16): 5, (8, 24): 3, (24, 8): 1}
    assert "07.png: the image cannot be decoded" in caplog.text
    rest = ResumableLoader(source, 3, train=True, seed=0, progress=lambda: Progress(0, 4, 9))
    assert [batch["index"].tolist() for batch in rest] == alone[4:]


def test_evaluation_sees_every_sample_once(folder: Path) -> None:
    (folder / "07.png").unlink()
    (folder / "07.txt").unlink()
    source = data(folder).source("validate")
    seen: Counter[int] = Counter()
    for rank in range(2):
        for batch in ResumableLoader(source, 4, train=False, seed=0, rank=rank, world=2):
            seen.update(batch["index"][batch["valid"]].tolist())
    assert seen == Counter(range(29))


def test_a_size_whose_images_are_all_broken_ends_training(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(2, 30, 6):  # those that are tall
        path = folder / f"{number:02d}.png"
        path.write_bytes(path.read_bytes()[:60])
    loader = ResumableLoader(data(folder).source("train"), 3, train=True, seed=0)
    with pytest.raises(BrokenSampleError, match="cannot be decoded"):
        list(loader)
    assert caplog.text.count("cannot be decoded") <= 5 + 1, "each is tried once; one more is of another size"


def test_a_run_resumes_with_the_sizes_that_it_had(folder: Path) -> None:
    several = ResumableLoader(data(folder).source("train"), 3, train=True, seed=0)
    one = ResumableLoader(data(folder, buckets=["16x16"]).source("train"), 3, train=True, seed=0)
    several.load_state_dict(several.state_dict())
    before = {name: value for name, value in one.state_dict().items() if name != "groups"}
    one.load_state_dict(before)
    for loader, state in ((several, one.state_dict()), (several, before), (one, several.state_dict())):
        with pytest.raises(ValueError, match="was trained on samples of different shapes"):
            loader.check_order(state)


def test_what_is_wrong_with_buckets(folder: Path) -> None:
    for buckets, message in (
        (["16x16", "16*24"], r"'16\*24' is not a size; write HEIGHTxWIDTH"),
        (["16x16", "16x16"], "must be different sizes"),
        (["16x16", "800x8"], "bucket 800x8: no images are nearest to it"),
    ):
        with pytest.raises(ValueError, match=message):
            data(folder, 3, buckets).source("train")
    with pytest.raises(ValueError, match=r"bucket 24x8: only 5 images are nearest to it, fewer than batch_size=6"):
        data(folder, 6).source("train")
    with pytest.raises(ValueError, match="encode the images first"):
        CaptionedImageShards(
            "https://a/b-0.tar", "https://a/b-0.tar", buckets=BUCKETS, shards=ShardOptions(cache_bytes=1 << 30)
        )
    assert data(folder, 3).real_images("validate")[1]["image"].shape == (3, 16, 16)


@pytest.mark.parametrize("per_sample", [False, True], ids=["shards", "files"])
def test_a_wrong_number_of_samples_in_a_shard_deletes_nothing(per_sample: bool, tmp_path: Path) -> None:
    (tmp_path / "train-00000.tar").write_bytes(b"finished")
    source = EncodedSource([{}], "image", None, [], per_sample)  # type: ignore[arg-type,list-item]
    with pytest.raises(ValueError, match="per_shard=0"):
        encode_samples(source, {"model": "a"}, tmp_path, None, None, "train", 0, torch.device("cpu"), force=True)  # type: ignore[arg-type]
    assert (tmp_path / "train-00000.tar").read_bytes() == b"finished"


def test_latents_of_several_sizes(folder: Path, tmp_path: Path) -> None:
    pipeline, out = save_pipeline(tmp_path / "sana"), tmp_path / "latents"
    words = [str(folder), str(out), "--model", str(pipeline), "--text_length", "8", "--per_shard", "8"]
    assert registry.run("prepare caption-latents", [*words, "--buckets", *BUCKETS, "--max_skipped", "1"]) is None
    assert json.loads((out / "train-manifest.json").read_text())["buckets"] == BUCKETS
    module = ImageLatentShards(str(out), str(out), batch_size=3, num_workers=0)
    shapes = [tuple(batch["latent"].shape[2:]) for batch in module.train_dataloader()]
    assert len(set(shapes)) == 3
    assert len(shapes) == len(module.train_dataloader())
    with pytest.raises(SystemExit, match="is the source, so that new shards in it would be read as well"):
        registry.run("prepare caption-latents", [str(folder), f"{folder}/../{folder.name}", *words[2:]])
    assert not list(folder.glob("*.tar"))
    with pytest.raises(SystemExit, match="--buckets gives all sizes; leave out --height and --width"):
        registry.run("prepare caption-latents", [*words, "--buckets", *BUCKETS, "--width", "16"])
    for name, value in (("text_length", "4"), ("instruction", "a picture of")):
        other = [
            str(folder),
            str(tmp_path / name),
            *words[2:],
            f"--{name}",
            value,
            "--buckets",
            *BUCKETS,
            "--max_skipped",
            "1",
        ]
        registry.run("prepare caption-latents", other)
        for train, val in (([str(out), str(tmp_path / name)], str(out)), (str(out), str(tmp_path / name))):
            module = ImageLatentShards(train, val, batch_size=3, num_workers=0)
            with pytest.raises(ValueError, match=rf"captions have {name}=.* beside the first training shard"):
                [module.train_dataloader(), module.val_dataloader()]
    with pytest.raises(SystemExit, match=r"made from different files or options \(buckets was .* and is None\)"):
        registry.run("prepare caption-latents", [*words, "--max_skipped", "1"])
    with pytest.raises(ValueError, match=r"bucket \d+x\d+: only \d latents are nearest to it"):
        ImageLatentShards(str(out), str(out), batch_size=12, num_workers=0).train_dataloader()


def test_training_on_several_sizes(server: ForkServer, folder: Path, tmp_path: Path) -> None:
    path = config(tmp_path, "sizes", steps=6)
    data = ["--data=mhla_tasks.text_to_image.CaptionedImageShards"]
    options = {"train": folder, "val": folder, "batch_size": 3, "num_workers": 0, "buckets": "[16x16,8x24,24x8]"}
    words = ["fit", "--config", path, *data, *(f"--data.{name}={value}" for name, value in options.items())]
    status, said = server.run(*words, "--trainer.limit_val_batches=0", folder=tmp_path)
    assert status == 0, said[-4000:]
    status, said = server.run(*words[:-1], "--data.buckets=[16x16,8x26,24x8]", folder=tmp_path)
    assert status == 1
    assert "do not divide into patches" in said


def test_sizes_are_read_from_the_beginnings_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (300, 400, 3), dtype=np.uint8)
    for name in ("a.jpg", "b.jpg"):
        Image.fromarray(noise).save(tmp_path / name)
        (tmp_path / name).with_suffix(".txt").write_text("noise")
    files = FolderFiles(tmp_path, EXTENSIONS, "caption")
    monkeypatch.setattr(FolderFiles, "member", lambda *_: pytest.fail("read completely"))
    assert [buckets_module._image_size(files, index) for index in range(2)] == [(300, 400)] * 2


def test_a_shard_that_changes_is_not_taken_for_a_broken_image(tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (40, 20)).save(stream, "PNG")
    [shard] = write_shards(range(3), lambda _: {"png": stream.getvalue(), "txt": b"black"}, tmp_path, "train", 3)
    files = ShardFiles(ShardReader([shard]), "caption")
    assert sort_into_buckets(files, [(16, 16), (8, 16)], 0).tolist() == [1, 1, 1]
    os.utime(shard)
    with pytest.raises(ShardUnavailableError, match="was rewritten while it is in use"):
        sort_into_buckets(files, [(16, 16), (8, 16)], 0)
