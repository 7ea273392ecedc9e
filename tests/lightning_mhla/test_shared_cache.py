"""A cache folder that others may write to: links that somebody planted are not followed, others' files are not used."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from mhla_kernels.own_files import ForeignFileError, open_own, own_folder

from lightning_mhla.data.cache import ShardCache
from lightning_mhla.data.remote import kept_at
from lightning_mhla.data.shards import find_shards
from lightning_mhla.data.tables import INDEX, load_table
from lightning_mhla.system.files import write_whole

STRANGER = 12345
"""A user who runs nothing here."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Address of a shard on a server."""
    folder = tmp_path / "served"
    folder.mkdir()
    with tarfile.open(folder / "train-0000.tar", "w") as tar:
        member = tarfile.TarInfo("0.cls")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"1"))
    (folder / "train-classes.txt").write_text("a\n")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/train-0000.tar"
        http.shutdown()


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """Folder of the user outside the cache, which must not change."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "authorized_keys").write_text("precious")
    (folder / "thesis.tar").write_text("precious")
    yield folder
    assert {path.name for path in folder.iterdir()} == {"authorized_keys", "thesis.tar"}
    assert {path.read_text() for path in folder.iterdir()} == {"precious"}


def streamed(url: str, cache: Path) -> int:
    shards = ShardCache(cache / "streamed", 1 << 26)
    (path,) = shards.add([url])
    return len(shards.table(path).keys)


def downloaded(url: str, cache: Path) -> int:
    (path,) = find_shards(url, cache)
    return len(load_table(path, cache).keys)


READERS = {"streamed": streamed, "shards": downloaded}


@pytest.mark.parametrize("ending", ["", ".part", INDEX, f"{INDEX}.part", ".1.part"])
@pytest.mark.parametrize("folder", READERS)
def test_a_planted_link_in_place_of_a_file_is_not_followed(
    url: str, victim: Path, tmp_path: Path, folder: str, ending: str
) -> None:
    cache = tmp_path / "cache"
    shard = kept_at(url, cache / folder)
    shard.parent.mkdir(parents=True)
    shard.with_name(shard.name + ending).symlink_to(victim / "authorized_keys")
    used = {"streamed": ("", ".part", INDEX), "shards": ("",)}[folder]
    if ending in used:
        with pytest.raises(ForeignFileError, match=r"is a link, .*: remove it, or choose another folder for the cache"):
            READERS[folder](url, cache)
    else:
        assert READERS[folder](url, cache) == 1


@pytest.mark.parametrize("depth", ["lock", "side file", "folder of a server", "folder of the cache"])
@pytest.mark.parametrize("folder", READERS)
def test_a_planted_link_elsewhere_is_an_error(url: str, victim: Path, tmp_path: Path, folder: str, depth: str) -> None:
    cache = tmp_path / "cache"
    shard = kept_at(url, cache / folder)
    link, target = {
        "lock": (cache / folder / "lock", victim / "authorized_keys"),
        "side file": (shard.with_name("train-classes.txt"), victim / "authorized_keys"),
        "folder of a server": (shard.parent, victim),
        "folder of the cache": (cache / folder, victim),
    }[depth]
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    if (folder, depth) == ("shards", "lock"):  # downloads that are kept need no lock
        assert downloaded(url, cache) == 1
        return
    with pytest.raises(ForeignFileError, match=f"{link.name} is a link"):
        READERS[folder](url, cache)


def test_a_second_name_of_a_file_is_not_written_to(url: str, victim: Path, tmp_path: Path) -> None:
    shard = kept_at(url, tmp_path / "cache/streamed")
    shard.parent.mkdir(parents=True)
    os.link(victim / "authorized_keys", shard.with_name(f"{shard.name}.part"))
    assert streamed(url, tmp_path / "cache") == 1
    os.link(victim / "authorized_keys", tmp_path / "second")
    with pytest.raises(ForeignFileError, match="has a second name"):
        open_own(victim / "authorized_keys", os.O_RDWR)


def test_shards_of_the_user_in_the_cache_folder_are_not_evicted(url: str, victim: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache/streamed"
    (folder / "mine").mkdir(parents=True)
    (folder / "mine/train-0000.tar").write_bytes(bytes(1 << 16))
    (folder / "mine/thesis.zip.part").write_bytes(bytes(1 << 16))
    (folder / ("0" * 16)).symlink_to(victim)
    shards = ShardCache(folder, 1 << 15)
    (path,) = shards.add([url])
    assert len(shards.table(path).keys) == 1
    assert sorted(file.name for file in (folder / "mine").iterdir()) == ["thesis.zip.part", "train-0000.tar"]


@as_root
@pytest.mark.parametrize(
    ("folder", "what"),
    [(folder, what) for folder in READERS for what in ("shard", "folder")]
    + [("streamed", "side file"), ("streamed", "table")],
)
def test_files_of_another_user_are_not_used(url: str, tmp_path: Path, folder: str, what: str) -> None:
    cache = tmp_path / "cache"
    READERS[folder](url, cache)
    shard = kept_at(url, cache / folder)
    owned = {
        "shard": shard, "table": shard.with_name(shard.name + INDEX), "folder": shard.parent,
        "side file": shard.with_name("train-classes.txt"),
    }[what]  # fmt: skip
    if what == "shard":
        shard.with_name(shard.name + INDEX).unlink()
    os.chown(owned, STRANGER, STRANGER)
    with pytest.raises(ForeignFileError, match=rf"belongs to another user \({STRANGER}\)"):
        READERS[folder](url, cache)


@as_root
def test_a_table_of_another_user_beside_a_kept_shard_is_made_again(url: str, tmp_path: Path) -> None:
    downloaded(url, tmp_path / "cache")
    shard = kept_at(url, tmp_path / "cache/shards")
    table = shard.with_name(shard.name + INDEX)
    os.chown(table, STRANGER, STRANGER)
    assert downloaded(url, tmp_path / "cache") == 1
    assert table.stat().st_uid == os.geteuid()


@as_root
def test_a_table_of_another_user_is_made_again(tmp_path: Path) -> None:
    """Tables of shards in a folder that cannot be written lie in the cache."""
    shard = tmp_path / "train-0000.tar"
    with tarfile.open(shard, "w") as tar:
        tar.addfile(tarfile.TarInfo("0.cls"))
    (tmp_path / f"{shard.name}{INDEX}").mkdir()  # as if it could not be written
    cache = tmp_path / "cache"
    load_table(shard, cache)
    (kept,) = (cache / "tables").iterdir()
    before = kept.stat().st_ino
    os.chown(kept, STRANGER, STRANGER)
    assert len(load_table(shard, cache).keys) == 1
    assert kept.stat().st_uid == os.geteuid()
    assert kept.stat().st_ino != before


def test_a_pipe_in_place_of_a_file_is_an_error_and_no_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY):
        with pytest.raises(ForeignFileError, match="is not of the expected type"):
            open_own(tmp_path / "pipe", flags)


def test_a_file_that_is_rejected_is_closed(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    os.link(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ForeignFileError, match="has a second name"):
        open_own(tmp_path / "b", os.O_RDWR)
    opened = {os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}
    assert os.path.realpath(tmp_path / "b") not in opened


def test_the_folder_that_the_user_chose_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    own_folder(tmp_path / "cache/a/b", tmp_path / "cache")
    assert (tmp_path / "disk/a/b").is_dir()


@as_root
def test_a_file_system_that_shows_one_owner_for_all_files_is_no_other_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    os.chown(tmp_path / "file", STRANGER, STRANGER)
    monkeypatch.setattr("mhla_kernels.own_files._owner_of_new_files", lambda folder: STRANGER)
    with open(open_own(tmp_path / "file"), "rb") as stream:
        assert stream.read() == b"x"


def test_an_unfinished_file_that_is_there_already_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: Path
) -> None:
    """Its name cannot be guessed; here it is known."""
    monkeypatch.setattr("secrets.token_hex", lambda count: "0" * 2 * count)
    path = tmp_path / "file"
    path.with_name(f"file.mhla-{'0' * 12}.{os.getpid()}.part").symlink_to(victim / "authorized_keys")
    with pytest.raises(FileExistsError):
        write_whole(path, "new")
