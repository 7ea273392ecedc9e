"""The data pipeline: order, splits, shards, and what happens to broken data.

Longer than other files: the whole pipeline, from a shard to a batch.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import signal
import subprocess
import sys
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor

from lightning_mhla.data import BrokenSampleError, ResumableLoader, ShardReader, find_shards, write_shards
from lightning_mhla.data.images import FolderImages, ShardImages
from lightning_mhla.data.loader import Progress
from lightning_mhla.data.sampling import epoch_order, evaluation_batches, training_batches

CLASSES = 5


def jpeg(seed: int, size: int = 12) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (size, size, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG")
    return stream.getvalue()


def members(seed: int) -> dict[str, Any]:
    return {"jpg": jpeg(seed), "cls": seed % CLASSES}


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Shards of four, four and two samples."""
    return write_shards(range(10), members, tmp_path / "shards", "train", per_shard=4)


def images(paths: list[Path]) -> ShardImages:
    return ShardImages(ShardReader(paths), pil_to_tensor, CLASSES)


def add_to_tar(path: Path, samples: list[dict[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for number, sample in enumerate(samples):
            for extension, data in sample.items():
                info = tarfile.TarInfo(f"{number:03d}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


# --- order


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 7),
    seed=st.integers(0, 9),
)
def test_an_epoch_is_a_permutation_that_seed_and_epoch_decide(sizes: list[int], window: int | None, seed: int) -> None:
    order = epoch_order(sizes, seed, 3, window)
    assert sorted(order) == list(range(sum(sizes)))
    assert (order == epoch_order(sizes, seed, 3, window)).all()
    if sum(sizes) > 20:
        assert (order != epoch_order(sizes, seed, 4, window)).any(), "two epochs in one order"
        assert (order != epoch_order(sizes, seed + 1, 3, window)).any(), "two seeds in one order"


def test_a_window_keeps_reads_close_together() -> None:
    order = epoch_order([100] * 20, seed=0, epoch=0, window=2)
    for first in range(0, 2000, 200):
        assert len({int(i) // 100 for i in order[first : first + 200]}) == 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(samples=st.integers(1, 70), share=st.integers(1, 6), world=st.integers(1, 5))
def test_evaluation_sees_every_sample_once_in_equally_many_batches(samples: int, share: int, world: int) -> None:
    plans = [list(evaluation_batches(samples, share * world, rank, world)) for rank in range(world)]
    assert len({len(plan) for plan in plans}) == 1, "processes run unequally many batches and would hang"
    assert all(0 < len(batch) <= share for plan in plans for batch in plan)
    counted = Counter(ticket.index for plan in plans for batch in plan for ticket in batch if ticket.valid)
    assert counted == Counter(range(samples))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(samples=st.integers(12, 60), world=st.sampled_from([1, 2, 3, 4]))
def test_a_global_batch_is_the_same_on_any_number_of_processes(samples: int, world: int) -> None:
    order = epoch_order([samples], 0, 0)
    plans = [list(training_batches(order, 0, 12, rank, world, np.zeros_like(order))) for rank in range(world)]
    for number, shares in enumerate(zip(*plans, strict=True)):
        together = [ticket.index for share in shares for ticket in share]
        assert together == order[number * 12 : (number + 1) * 12].tolist()


class Noise:
    """Data set whose samples consist of random numbers from all three generators."""

    def __init__(self, samples: int) -> None:
        self.shard_sizes = [samples]

    def __len__(self) -> int:
        return self.shard_sizes[0]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "noise": torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_from_any_position(workers: int) -> None:
    def batches(start: int, count: int, workers: int) -> list[list[float]]:
        trained = start
        loader = ResumableLoader(
            Noise(23), 4, train=True, seed=7, progress=lambda: Progress(*divmod(trained, 5)), num_workers=workers
        )
        out: list[list[float]] = []
        while len(out) < count:
            for batch in loader:
                out.append([*batch["index"].tolist(), *batch["noise"].flatten().tolist()])
                trained += 1
        return out[:count]

    whole = batches(0, 12, 0)
    assert len({str(batch[:4]) for batch in whole}) == 12
    for start in (0, 3, 5, 8):
        assert batches(start, 12 - start, workers) == whole[start:], f"other samples after {start} batches"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_repeated_samples_are_read_anew_and_a_loader_goes_on_among_them(workers: int, world: int) -> None:
    """Three looks at each sample, next to each other over all processes; on any number of these the same."""

    def batches(start: int, count: int, workers: int, world: int) -> list[list[tuple[int, tuple[float, ...]]]]:
        """Return the batches of all processes together."""
        found: list[list[tuple[int, tuple[float, ...]]]] = [[] for _ in range(count)]
        for rank in range(world):
            trained, number = start, 0

            def progress() -> Progress:
                return Progress(*divmod(trained, 5))  # noqa: B023

            loader = ResumableLoader(
                Noise(30),
                6,
                train=True,
                seed=7,
                progress=progress,
                num_workers=workers,
                rank=rank,
                world=world,
                repeats=3,
            )
            assert len(loader) == 5
            while number < count:
                for batch in loader:
                    if number < count:
                        found[number] += zip(batch["index"].tolist(), map(tuple, batch["noise"].tolist()), strict=True)
                    trained, number = trained + 1, number + 1
        return found

    whole = batches(0, 10, 0, 1)
    epoch = [sample for batch in whole[:5] for sample in batch]
    assert [index for index, _ in epoch] == [index for index, _ in epoch[::3] for _ in range(3)]
    assert len({index for index, _ in epoch}) == 10, "an epoch is no longer than without"
    assert len({noise for _, noise in epoch}) == 30, "every look draws numbers of its own"
    for start in (0, 3, 5):
        assert batches(start, 10 - start, workers, world) == whole[start:]


def test_a_run_without_repeats_does_not_go_on_with_them() -> None:
    state = ResumableLoader(Noise(20), 4, train=True, seed=0).state_dict()
    del state["repeats"]  # as of a checkpoint from before there were any
    ResumableLoader(Noise(20), 4, train=True, seed=0).check_order(state)
    with pytest.raises(ValueError, match="trained with repeats=1, this run has repeats=3"):
        ResumableLoader(Noise(20), 4, train=True, seed=0, repeats=3).check_order(state)


def test_reading_leaves_the_random_state_of_the_training_process_alone() -> None:
    loader = ResumableLoader(Noise(8), 4, train=True, seed=0)
    before = random.getstate(), torch.get_rng_state()
    list(loader)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_checkpoint_of_another_order_is_refused() -> None:
    state = ResumableLoader(Noise(20), 4, train=True, seed=0).state_dict()
    with pytest.raises(ValueError, match="trained with batch_size=4, this run has batch_size=5"):
        ResumableLoader(Noise(20), 5, train=True, seed=0).check_order(state)
    with pytest.raises(ValueError, match="seed=0, this run has seed=1"):
        ResumableLoader(Noise(20), 4, train=True, seed=1).check_order(state)


def test_a_window_over_other_shards_is_another_order() -> None:
    class Sharded(Noise):
        def __init__(self, shard_sizes: list[int]) -> None:
            super().__init__(sum(shard_sizes))
            self.shard_sizes = shard_sizes

        def __len__(self) -> int:
            return sum(self.shard_sizes)

    def loader(shard_sizes: list[int], window: int | None) -> ResumableLoader:
        return ResumableLoader(Sharded(shard_sizes), 4, train=True, seed=0, window=window)

    for window in (None, 4):
        loader([10, 10], window).check_order(loader([5, 5, 10], window).state_dict())
    state = loader([10, 10], 1).state_dict()
    with pytest.raises(ValueError, match="was trained on shards of different sizes than those of this run"):
        loader([5, 15], 1).check_order(state)
    del state["shards"]  # as in a checkpoint of an earlier version
    loader([5, 15], 1).check_order(state)


@pytest.mark.parametrize(
    ("samples", "batch", "world", "message"),
    [(20, 5, 2, "multiple of their number, 2"), (3, 4, 1, "do not fill one batch"), (0, 4, 1, "holds no samples")],
)
def test_loader_refuses(samples: int, batch: int, world: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResumableLoader(Noise(samples), batch, train=True, seed=0, world=world)


# --- shards


def test_shards_hold_what_was_written(shards: list[Path]) -> None:
    assert [path.name for path in shards] == ["train-0000.tar", "train-0001.tar", "train-0002.tar"]
    reader = ShardReader(shards)
    assert reader.shard_sizes == [4, 4, 2]
    for index in range(10):
        assert reader.read(index, "jpg") == jpeg(index)
        assert int(reader.read(index, "cls")) == index % CLASSES


def test_webdataset_reads_our_shards_and_we_read_its(shards: list[Path], tmp_path: Path) -> None:
    seen = [
        (s["__key__"], s["jpg"], int(s["cls"])) for s in wds.WebDataset([str(p) for p in shards], shardshuffle=False)
    ]
    assert seen == [(f"{i:08d}", jpeg(i), i % CLASSES) for i in range(10)]
    with wds.ShardWriter(str(tmp_path / "theirs-%02d.tar"), maxcount=3, verbose=0) as writer:
        for i in range(5):
            writer.write({"__key__": f"part.a/{i}", **members(i)})
    theirs = images(find_shards(str(tmp_path / "theirs-{00..01}.tar")))
    assert [theirs[i]["label"] for i in range(5)] == [0, 1, 2, 3, 4]


def test_writing_goes_on_after_a_stop(tmp_path: Path) -> None:
    def stops(number: int) -> dict[str, Any]:
        if number == 6:
            raise KeyboardInterrupt
        return members(number)

    with pytest.raises(KeyboardInterrupt):
        write_shards(range(10), stops, tmp_path, "train", per_shard=4)
    assert [path.name for path in sorted(tmp_path.glob("*.tar"))] == ["train-0000.tar"], "half a shard was left"
    first = (tmp_path / "train-0000.tar").stat().st_mtime_ns
    paths = write_shards(range(10), members, tmp_path, "train", per_shard=4)
    assert first == paths[0].stat().st_mtime_ns, "a whole shard was written again"
    assert len(ShardReader(paths)) == 10
    assert not list(tmp_path.glob("*.part"))


def test_a_changed_shard_is_scanned_again(shards: list[Path]) -> None:
    ShardReader(shards)
    assert shards[0].with_name(shards[0].name + ".index.npz").exists()
    add_to_tar(shards[0], [{"jpg": jpeg(77), "cls": b"3"}])
    reader = ShardReader(shards)
    assert reader.shard_sizes == [1, 4, 2]
    assert reader.read(0, "jpg") == jpeg(77)


def test_find_shards(shards: list[Path]) -> None:
    folder = shards[0].parent
    assert find_shards(str(folder)) == shards
    assert find_shards(f"{folder}/train-000?.tar") == shards
    assert find_shards([f"{folder}/train-{{0000..0001}}.tar", str(shards[2])]) == shards
    for name in ("{a,b}", "{1..2}", "a\\b", "[x] 100% é"):
        renamed = folder.rename(folder.with_name(name))
        assert [path.name for path in find_shards(str(renamed))] == [path.name for path in shards]
        renamed.rename(folder)


@pytest.mark.parametrize("prefix", ["", ".hidden", "a/b", ".."])
def test_a_prefix_begins_a_visible_file_name(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be the beginning of a file name"):
        write_shards(range(1), lambda _: {"cls": b"0"}, tmp_path, prefix, 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("nowhere", FileNotFoundError, "nowhere does not exist"),
        ("empty", FileNotFoundError, r"holds no \*.tar files"),
        ("pipe:cat x.tar", ValueError, "nothing else is opened"),
        ("file:///etc/passwd", ValueError, "nothing else is opened"),
        ("http:x.tar", ValueError, "nothing else is opened"),
    ],
)
def test_find_shards_refuses(where: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(error, match=message):
        find_shards(str(tmp_path / where) if ":" not in where else where)


def test_a_copy_in_another_process_opens_its_own_files(shards: list[Path]) -> None:
    """Worker processes that are spawned get a pickled reader, which cannot hold open files."""
    reader = ShardReader(shards)
    read = [reader.read(index, "jpg") for index in range(10)]
    copy = pickle.loads(pickle.dumps(reader))
    assert not copy._open
    assert [copy.read(index, "jpg") for index in range(10)] == read


@pytest.fixture
def server(shards: list[Path]) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(shards[0].parent))) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def test_urls_are_downloaded_once_and_whole(server: str, shards: list[Path], tmp_path: Path) -> None:
    url, cache = f"{server}/train-{{0000..0002}}.tar", tmp_path / "cache"
    fetched = find_shards(url, cache)
    assert [path.read_bytes() for path in fetched] == [path.read_bytes() for path in shards]
    for path in shards:
        path.unlink()
    assert find_shards(url, cache) == fetched, "fetched a second time"
    with pytest.raises(FileNotFoundError):
        find_shards(f"{server}/absent.tar", cache)
    assert not list(cache.rglob("*.part"))


# --- broken data


def broken_jpeg(index: int) -> bytes:
    return jpeg(index, 64)[:400]


def test_a_broken_training_image_is_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = [{"jpg": jpeg(i), "cls": b"1"} for i in range(8)]
    good[3]["jpg"], good[5] = broken_jpeg(3), {"jpg": jpeg(5)}
    source = images([add_to_tar(tmp_path / "a.tar", good)])
    loader = ResumableLoader(source, 4, train=True, seed=0)
    batches = list(loader)
    assert [len(batch["label"]) for batch in batches] == [4, 4], "a batch came up short"
    assert len(loader.skipped) == 2
    assert "a.tar: sample 003: the image cannot be decoded" in caplog.text
    assert "a.tar: sample 005 has no .cls, only ['jpg']" in caplog.text


@pytest.mark.parametrize("workers", [0, 1])
def test_too_many_broken_images_stop_training(tmp_path: Path, workers: int) -> None:
    samples = [{"jpg": jpeg(i) if i % 2 else broken_jpeg(i), "cls": b"1"} for i in range(8)]
    source = images([add_to_tar(tmp_path / "a.tar", samples)])
    loader = ResumableLoader(source, 4, train=True, seed=0, max_skipped=2, num_workers=workers)
    with pytest.raises(BrokenSampleError, match="more than max_skipped=2"):
        list(loader)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"jpg": broken_jpeg(0), "cls": b"1"}, "a.tar: sample 000: the image cannot be decoded"),
        ({"jpg": b"no image", "cls": b"1"}, "a.tar: sample 000: the image cannot be decoded"),
        ({"jpg": jpeg(0)}, "a.tar: sample 000 has no .cls"),
        ({"cls": b"1"}, "a.tar: sample 000 has no .jpg or .jpeg or .png or .webp"),
        ({"jpg": jpeg(0), "cls": b"cat"}, "label b'cat' is not one of the classes 0 to 4"),
        ({"jpg": jpeg(0), "cls": b"5"}, "label b'5' is not one of the classes 0 to 4"),
    ],
    ids=["cut jpeg", "no jpeg", "no label", "no image", "text label", "large label"],
)
def test_a_broken_validation_sample_is_an_error(tmp_path: Path, sample: dict[str, bytes], message: str) -> None:
    source = images([add_to_tar(tmp_path / "a.tar", [sample])])
    with pytest.raises(BrokenSampleError, match=message):
        list(ResumableLoader(source, 1, train=False, seed=0))


@pytest.mark.parametrize("damage", ["flipped", "zeroed", "joined"])
def test_a_tar_damaged_in_the_middle_is_an_error(shards: list[Path], damage: str) -> None:
    data = bytearray(shards[1].read_bytes())
    third = [i for i in range(0, len(data), 512) if data[i : i + 8].isdigit()][2]
    if damage == "flipped":
        data[third + 150] ^= 0xFF
    elif damage == "zeroed":
        data[third : third + 512] = bytes(512)
    else:
        data = bytearray(shards[0].read_bytes()) + data
    shards[1].write_bytes(data)
    with pytest.raises(ValueError, match=r"train-0001.tar: not a complete tar file"):
        ShardReader(shards)


def test_a_broken_member_table_is_read_anew(shards: list[Path]) -> None:
    ShardReader(shards)
    for path, junk in zip(shards, (b"", b"junk", b"PK\x03\x04"), strict=True):
        path.with_name(path.name + ".index.npz").write_bytes(junk)
    assert ShardReader(shards).shard_sizes == [4, 4, 2]


def test_shards_of_other_samples_are_not_mixed(shards: list[Path]) -> None:
    for items, per_shard in ((range(10), 5), (range(11), 4)):
        with pytest.raises(
            ValueError, match=r"made from different files or options \((per_shard was 4 and is 5|added: item 10)\)"
        ):
            write_shards(items, members, shards[0].parent, "train", per_shard)


@pytest.mark.parametrize("left", [100, 700, 3000, -1024], ids=["header", "data", "later", "end marks"])
def test_a_cut_tar_is_an_error(shards: list[Path], left: int) -> None:
    data = shards[1].read_bytes()
    payload = max(i for i in range(0, len(data), 512) if any(data[i : i + 512])) + 512
    shards[1].write_bytes(data[:left] if left > 0 else data[:payload])
    with pytest.raises(ValueError, match=r"train-0001.tar: (cut short|not a complete tar)"):
        ShardReader(shards)


def test_a_thread_reads_its_shard_while_another_opens_more(shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_mhla.data.shards.OPEN_FILES", 1)
    reader, pread = ShardReader(shards), os.pread
    waiting = [9]

    def interrupted(descriptor: int, size: int, offset: int) -> bytes:
        for index in waiting[:]:
            waiting.clear()
            thread = threading.Thread(target=reader.read, args=(index, "jpg"))
            thread.start()
            thread.join()
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", interrupted)
    assert reader.read(0, "jpg") == jpeg(0)
    assert not waiting


def test_no_tar_at_all_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"hello" * 1000)
    with pytest.raises(ValueError, match=r"x\.tar: not a complete tar file"):
        ShardReader([tmp_path / "x.tar"])


def test_a_pickle_in_a_shard_is_never_opened(tmp_path: Path) -> None:
    bomb = b"cos\nsystem\n(S'touch " + str(tmp_path / "owned").encode() + b"'\ntR."
    source = images(
        [add_to_tar(tmp_path / "a.tar", [{"jpg": jpeg(0), "cls": b"1", "pkl": bomb, "pyd": bomb, "pth": bomb}])]
    )
    assert source[0]["label"] == 1
    assert not (tmp_path / "owned").exists()


def test_a_shard_cut_while_training_is_named(shards: list[Path]) -> None:
    source = images(shards)
    shards[2].write_bytes(shards[2].read_bytes()[:1000])
    with pytest.raises(BrokenSampleError, match=r"train-0002.tar: sample 00000009: .cls is cut short"):
        source[9]


def test_folder_of_images(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        FolderImages(tmp_path / "absent", pil_to_tensor)
    with pytest.raises(FileNotFoundError, match="holds no files"):
        FolderImages(tmp_path, pil_to_tensor)
    (tmp_path / "b").mkdir()
    for name in ("b/2.JPG", "1.jpg"):
        (tmp_path / name).write_bytes(jpeg(1))
    source = FolderImages(tmp_path, pil_to_tensor)
    assert [path.name for path in source.paths] == ["1.jpg", "2.JPG"]
    assert source[1]["image"].shape == (3, 12, 12)
    (tmp_path / "1.jpg").unlink()
    assert [source[index]["broken"] for index in range(2)] == [True, False], "the other images are still predicted"


def test_a_sample_is_augmented_otherwise_in_every_epoch() -> None:
    def noise(epoch: int) -> dict[int, float]:
        (batch,) = ResumableLoader(Noise(8), 8, train=True, seed=7, progress=lambda: Progress(epoch))
        return dict(zip(batch["index"].tolist(), batch["noise"].sum(1).tolist(), strict=True))

    first, second, again = noise(0), noise(1), noise(0)
    assert first == again
    assert all(first[index] != second[index] for index in range(8))


def test_samples_are_shuffled_inside_a_window() -> None:
    order = epoch_order([100] * 20, seed=0, epoch=0, window=2)
    assert (np.diff(order) == 1).mean() < 0.1, "samples of a shard follow each other"
    first = order[:200]
    assert len({int(index) // 100 for index in first[:50]}) == 2, "the shards of a window are not mixed"


def test_a_cut_download_is_not_kept(server: str, shards: list[Path], tmp_path: Path) -> None:
    whole = shards[0].read_bytes()
    shards[0].write_bytes(whole[:2000])
    with pytest.raises(ValueError, match=r"cut short|not a complete tar"):
        find_shards(f"{server}/train-0000.tar", tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    shards[0].write_bytes(whole)
    assert find_shards(f"{server}/train-0000.tar", tmp_path / "cache")[0].read_bytes() == whole


def test_a_rewritten_shard_of_the_same_size_is_scanned_again(tmp_path: Path) -> None:
    path = add_to_tar(tmp_path / "a.tar", [{"jpg": b"picture", "cls": b"3"}])
    size = path.stat().st_size
    assert ShardReader([path]).read(0, "cls") == b"3"
    written = path.stat().st_mtime_ns
    add_to_tar(path, [{"cls": b"4", "jpg": b"picture"}])  # the other way round
    os.utime(path, ns=(written, written + 10**9))  # clocks of file systems are coarse
    assert path.stat().st_size == size
    assert ShardReader([path]).read(0, "cls") == b"4"


def test_shards_of_as_many_other_samples_are_not_mixed(shards: list[Path]) -> None:
    shards[2].unlink()
    with pytest.raises(
        ValueError, match=r"made from different files or options \(changed: item 0, item 1, item 2 and 5 more"
    ):
        write_shards(range(1, 11), members, shards[0].parent, "train", per_shard=4)
    assert write_shards(range(10), members, shards[0].parent, "train", per_shard=4) == shards


@pytest.mark.parametrize("rest", ["", "list(batches)", "del batches"], ids=["one batch", "all", "dropped"])
def test_a_program_that_took_a_batch_ends_at_once(rest: str) -> None:
    """Workers outlive a signal by two minutes, but not the signal of their own program, which waits for them at its end."""
    program = f"""
from lightning_mhla.data import ResumableLoader
class Source(list):
    shard_sizes = [40]
source = Source({{"index": index}} for index in range(40))
batches = iter(ResumableLoader(source, 4, train=False, seed=0, num_workers=2))
print(len(next(batches)["index"]), flush=True)
{rest}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


def test_the_first_batch_needs_no_workers() -> None:
    class Source(list):
        shard_sizes = (40,)

    source = Source({"index": index, "noise": torch.rand(2)} for index in range(40))
    loader = ResumableLoader(source, 4, train=False, seed=0, num_workers=2)
    state = torch.get_rng_state()
    batch = loader.first_batch()
    assert loader._loader._iterator is None
    assert torch.equal(torch.get_rng_state(), state)
    for name, values in next(iter(loader)).items():
        assert torch.equal(batch[name], values), name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda number: number.name)
def test_a_worker_outlives_the_signal_of_another_process(number: signal.Signals) -> None:
    class Source(list):
        shard_sizes = (40,)

    loader = ResumableLoader(Source({"index": index} for index in range(40)), 4, train=False, seed=0, num_workers=1)
    batches = iter(loader)
    next(batches)
    (worker,) = loader._loader._iterator._workers
    subprocess.run(["kill", f"-{number}", str(worker.pid)], check=True)
    assert len(list(batches)) == 9
    worker.terminate()
    worker.join()
    assert worker.exitcode == 0
