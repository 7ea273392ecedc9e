"""Data larger than the disk: the same samples in the same order as from local files, and never more bytes than allowed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np
import pytest
import torch
from http_server import served

from lightning_mhla.data import ResumableLoader, ShardOptions, ShardReader, ShardSets, write_shards
from lightning_mhla.data import cache as cache_module
from lightning_mhla.data import remote as remote_files
from lightning_mhla.data.cache import ShardCache
from lightning_mhla.data.source import ShardUnavailableError

SHARDS, EACH, VALUES = 40, 18, 1200
SEED, WINDOW, BATCH = 3, 2, 12


def members(index: int) -> dict[str, Any]:
    return {"npy": np.random.default_rng(index).standard_normal(VALUES)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with 720 samples of 10 kB in 40 shards, 7 MB."""
    home = tmp_path_factory.mktemp("remote")
    write_shards(range(SHARDS * EACH), members, home, "train", per_shard=EACH)
    return home


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "PAUSE", 0.01)
    monkeypatch.setattr(remote_files, "CHUNK", 1 << 16)  # several to a shard
    monkeypatch.setattr(cache_module, "PATIENCE", 10.0)


class Arrays:
    """Data set of the arrays in shards."""

    def __init__(self, reader: ShardReader) -> None:
        self.reader, self.shard_sizes = reader, reader.shard_sizes

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"values": self.reader.array(index, "npy"), "index": index}


def limit_of(folder: Path, part: int = 10) -> int:
    """Return a limit of a tenth of the shards: four of them fit, but not with all member tables."""
    return sum(path.stat().st_size for path in folder.glob("*.tar")) // part + 1000


def loader(
    where: str, cache: Path, limit: int | None, rank: int = 0, world: int = 1, workers: int = 0
) -> ResumableLoader:
    sets = ShardSets(where, where, ShardOptions(cache_dir=str(cache), cache_bytes=limit))
    source = Arrays(sets.reader("train"))
    ahead = sets.ahead("train", WINDOW)
    share: dict[str, Any] = {"rank": rank, "world": world}
    return ResumableLoader(
        source, BATCH, train=True, seed=SEED, window=WINDOW, num_workers=workers, ahead=ahead, **share
    )


def read(batches: Any) -> tuple[list[int], torch.Tensor]:
    kept = [(batch["index"], batch["values"]) for batch in batches]
    return torch.cat([index for index, _ in kept]).tolist(), torch.cat([values for _, values in kept])


def pattern(url: str) -> str:
    return f"{url}/train-{{0000..{SHARDS - 1:04d}}}.tar"


class Watch:
    """Maximum number of bytes in a watched folder."""

    most = 0


@contextmanager
def watched(folder: Path) -> Iterator[Watch]:
    watch, done = Watch(), threading.Event()

    def look() -> None:
        while not done.wait(0.005):  # and the lock is free meanwhile
            sizes = {}  # by inode, since a file may be renamed in between
            with ShardCache(folder / "streamed", 0)._changing():
                for path in folder.rglob("*"):
                    with suppress(FileNotFoundError):
                        stat = path.stat()
                        if S_ISREG(stat.st_mode):
                            sizes[stat.st_ino] = stat.st_size
            watch.most = max(watch.most, sum(sizes.values()))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield watch
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("index", [True, False], ids=["tables on the server", "tables scanned"])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_over_a_failing_server_is_that_from_local_files(
    folder: Path, tmp_path: Path, workers: int, index: bool
) -> None:
    expected = read(loader(str(folder), tmp_path / "none", None))
    assert sorted(expected[0]) == list(range(SHARDS * EACH))
    tables = list(folder.glob("*.index.npz"))
    aside = {path: path.read_bytes() for path in tables}
    if not index:
        for path in tables:
            path.unlink()
    cache, limit = tmp_path / "cache", limit_of(folder)
    with served(folder, drop_every=20) as server, watched(cache) as watch:
        found = read(loader(pattern(server.url), cache, limit, workers=workers))
    for path, content in aside.items():
        path.write_bytes(content)
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])
    assert 0 < watch.most <= limit
    fetched = [path for path in server.requests if path.endswith(".tar")]
    assert len(set(fetched)) == SHARDS


WORKER = """
import sys
from pathlib import Path
import torch
from torch import distributed
from lightning_mhla.data import remote
from test_streaming import loader, read
remote.PAUSE = 0.01
where, cache, limit, rank, world, target = sys.argv[1:]
distributed.init_process_group("gloo", f"file://{target.rpartition('/')[0]}/met", rank=int(rank), world_size=int(world))

def together(batches):
    for batch in batches:
        distributed.barrier()  # as the gradients' average is in training
        yield batch

torch.save(read(together(loader(where, Path(cache), int(limit), int(rank), int(world)))), target)
"""


@pytest.mark.parametrize("world", [2, 3])
def test_processes_of_a_machine_share_the_limit(folder: Path, tmp_path: Path, world: int) -> None:
    expected = read(loader(str(folder), tmp_path / "none", None))
    cache, limit = tmp_path / "cache", limit_of(folder)
    targets = [tmp_path / f"{rank}.pt" for rank in range(world)]
    with served(folder, drop_every=20) as server, watched(cache) as watch:
        words = [pattern(server.url), str(cache), str(limit)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, *words, str(rank), str(world), str(target)], env=environment()
            )
            for rank, target in enumerate(targets)
        ]
        assert [process.wait() for process in processes] == [0] * world
    parts = [torch.load(target, weights_only=True) for target in targets]
    share = BATCH // world
    together = [
        list(zip(*(ids[i : i + share] for ids, _ in parts), strict=True)) for i in range(0, len(parts[0][0]), share)
    ]
    found = [index for batch in together for index in np.array(batch).T.flatten().tolist()]
    assert found == expected[0]
    assert watch.most <= limit
    fetched = [path for path in server.requests if path.endswith(".tar")]
    assert len(fetched) < 4 * SHARDS, "shards are fetched over and over"


def environment() -> dict[str, str]:
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "tests"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def test_what_a_killed_process_left_is_removed(folder: Path, tmp_path: Path) -> None:
    cache, limit = tmp_path / "cache", limit_of(folder)
    with served(folder) as server:
        words = [pattern(server.url), str(cache), str(limit), "0", "1", str(tmp_path / "x.pt")]
        process = subprocess.Popen([sys.executable, "-c", WORKER, *words], env=environment())
        while len([path for path in server.requests if path.endswith(".tar")]) < 3:
            time.sleep(0.01)
        process.kill()
        process.wait()
        left = next(iter((cache / "streamed").glob("*/*.tar*"))).parent / "train-0029.tar.part"
        left.write_bytes(bytes(limit))
        found = read(loader(pattern(server.url), cache, limit))
    assert not left.exists()
    assert sorted(found[0]) == list(range(SHARDS * EACH))


def test_a_server_that_knows_no_ranges(folder: Path, tmp_path: Path) -> None:
    with served(folder, drop_every=7, ranges=False) as server:
        found = read(loader(pattern(server.url), tmp_path, limit_of(folder)))
    assert sorted(found[0]) == list(range(SHARDS * EACH))


def test_a_server_that_fails_is_asked_again_and_then_named(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with served(folder) as server:
        batches = iter(loader(pattern(server.url), tmp_path, limit_of(folder)))
        next(batches)
        server.failing = True
        with pytest.raises(ShardUnavailableError, match=r"train-00\d\d.tar cannot be read after 8 attempts .*503"):
            list(batches)
        assert "attempt 2 of 8 in" in caplog.text
        server.failing = False
        assert len(read(loader(pattern(server.url), tmp_path, limit_of(folder)))[0]) == SHARDS * EACH
    with pytest.raises(ShardUnavailableError, match=r"127.0.0.1:\d+/train-.* cannot be read after 4 attempts"):
        loader(pattern(server.url), tmp_path / "other", limit_of(folder))


def test_what_a_worker_meets_is_one_line(folder: Path, tmp_path: Path) -> None:
    with served(folder) as server:
        batches = iter(loader(pattern(server.url), tmp_path, limit_of(folder), workers=1))
        next(batches)
        server.failing = True
        with pytest.raises(
            ShardUnavailableError, match=r"^http://\S+/train-00\d\d.tar cannot be read after 8 attempts [^\n]*$"
        ):
            list(batches)


def test_a_pass_that_rests_does_not_fetch_against_the_one_that_moves(folder: Path, tmp_path: Path) -> None:
    with served(folder) as server:
        options = ShardOptions(cache_dir=str(tmp_path), cache_bytes=limit_of(folder))
        sets = ShardSets(pattern(server.url), f"{server.url}/train-{{0000..0019}}.tar", options)
        ours = loader(pattern(server.url), tmp_path, limit_of(folder))
        streamed = sets.ahead("validate", 1)
        assert streamed is not None
        assert sets.streamed is not None
        validation = ResumableLoader(Arrays(sets.reader("validate")), BATCH, train=False, seed=0, ahead=streamed)
        ours.ahead, begun = sets.ahead("train", WINDOW), iter(validation)
        next(begun)  # and never closed, as after Lightning's sanity check
        assert len(read(ours)[0]) == SHARDS * EACH
        fetched = [path for path in server.requests if path.endswith(".tar")]
        assert len(fetched) < 4 * SHARDS


def test_urls_of_all_sorts(folder: Path, tmp_path: Path) -> None:
    expected = read(loader(str(folder), tmp_path / "none", None))
    names = [f"train-{number:04d}.tar" for number in range(SHARDS)]
    plain = tmp_path / "data" / "my-set"
    plain.mkdir(parents=True)
    for number, name in enumerate(names):  # names without a prefix in a folder with a dash, and an own ending
        (plain / f"{number:04d}.shard").write_bytes((folder / name).read_bytes())
    with served(folder) as server, served(tmp_path / "data") as other:
        sorts: list[list[str]] = [
            [f"{server.url}/{name}?download=true" for name in names],
            [f"{server.url}/{name}" for name in names[:20]] + [str(folder / name) for name in names[20:]],
            [f"{other.url}/my-set/{number:04d}.shard" for number in range(SHARDS)],
        ]
        for number, where in enumerate(sorts):
            found = read(loader(where, tmp_path / str(number), 2 * limit_of(folder)))
            assert found[0] == expected[0]
            assert torch.equal(found[1], expected[1])
    assert not [path for path in [*server.requests, *other.requests] if "my-manifest" in path]


@pytest.mark.parametrize("change", ["many keys", "no extensions", "outside"])
def test_a_hostile_table_is_not_believed(
    folder: Path, tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "remote"
    home.mkdir()
    shard = home / "train-0000.tar"
    shard.write_bytes((folder / "train-0000.tar").read_bytes())
    ShardReader([shard])
    with np.load(f"{shard}.index.npz") as kept:
        arrays = dict(kept)
    if change == "many keys":
        empty = np.zeros((20_000, 1), np.int64)
        arrays |= {"keys": np.zeros(20_000, "<U0"), "offsets": empty, "sizes": empty}
    elif change == "no extensions":
        empty = np.zeros((EACH, 0), np.int64)
        arrays |= {"extensions": np.zeros(0, "<U1"), "offsets": empty, "sizes": empty}
    else:
        arrays["offsets"] = arrays["offsets"] + 10**6
    np.savez(f"{shard}.index.npz", **arrays)
    with served(home) as server:
        options = ShardOptions(cache_dir=str(tmp_path / "cache"), cache_bytes=1 << 22)
        reader = ShardSets(f"{server.url}/train-0000.tar", "", options).reader("train")
    assert len(reader) == EACH
    assert "is rebuilt" in caplog.text


def test_limits_that_are_too_small(folder: Path, tmp_path: Path) -> None:
    shard = (folder / "train-0000.tar").stat().st_size
    with served(folder) as server:
        where = pattern(server.url)
        with pytest.raises(
            ValueError, match=rf"cache_bytes={shard} is less than two shards: http.*/train-00\d\d.tar has"
        ):
            loader(where, tmp_path / "a", shard)
        with pytest.raises(ValueError, match=r"shuffle_window=2 shuffles more shards .* set shuffle_window to 1,"):
            loader(where, tmp_path / "b", 3 * shard)
        sets = ShardSets(where, where, ShardOptions(cache_dir=str(tmp_path / "c"), cache_bytes=8 * shard))
        sets.reader("train")
        with pytest.raises(ValueError, match="shuffle_window=null shuffles more shards"):
            sets.ahead("train", None)
    for options, message in (
        ({"cache_bytes": 0}, "cache_bytes=0 must be a number of bytes"),
        ({"shuffle_window": 0}, "shuffle_window=0 must be at least 1, or null"),
        ({"max_skipped": -1}, "max_skipped=-1 must not be negative"),
    ):
        with pytest.raises(ValueError, match=message):
            ShardOptions(**options)


def test_side_files_come_with_their_shards(folder: Path, tmp_path: Path) -> None:
    with served(folder) as server:
        streamed = ShardCache(tmp_path, 1 << 30)
        (path, *_) = streamed.add([f"{server.url}/train-0000.tar"])
    manifest = path.with_name("train-manifest.json")
    assert manifest.read_bytes() == (folder / "train-manifest.json").read_bytes()
    assert not path.exists()


@pytest.mark.parametrize("each", [EACH - 6, EACH + 6])
def test_a_shard_that_changed_on_the_server_is_an_error_once(each: int, tmp_path: Path) -> None:
    home, cache = tmp_path / "remote", tmp_path / "cache"
    write_shards(range(SHARDS * EACH), members, home, "train", per_shard=EACH)
    with served(home) as server:
        limit = 2 * limit_of(home)
        loader(pattern(server.url), cache, limit)  # reads the member tables
        for file in home.iterdir():
            file.unlink()
        write_shards(range(SHARDS * each), members, home, "train", per_shard=each)
        with pytest.raises(ShardUnavailableError, match=r"it has changed on the server; start again"):
            list(loader(pattern(server.url), cache, limit))
        again = read(loader(pattern(server.url), cache, limit))
    assert sorted(again[0]) == list(range(SHARDS * each))
