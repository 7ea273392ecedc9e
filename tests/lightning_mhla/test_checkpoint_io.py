"""Checkpoints are written atomically; damaged and hostile ones are reported, and the previous one is used."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import re
import resource
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fork_server import ForkServer
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from lightning_mhla.checkpoints.io import WholeCheckpointIO, check_checkpoint, read_file, resolve_checkpoint
from lightning_mhla.checkpoints.sharded import LAYOUT, MANIFEST, REST, check_sharded
from lightning_mhla.checkpoints.sharded_tensors import load_tensors, load_whole, save_sharded

CONTENT = {"state_dict": {"w": torch.arange(2000.0)}, "epoch": 1, "global_step": 7}


class Harmful:
    """Object that creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def save(path: Path, content: Any = CONTENT) -> Path:
    WholeCheckpointIO().save_checkpoint(content, path)
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = save(tmp_path / "deep/er/a.ckpt")
    assert torch.equal(WholeCheckpointIO().load_checkpoint(path)["state_dict"]["w"], CONTENT["state_dict"]["w"])
    assert [each.name for each in path.parent.iterdir()] == ["a.ckpt"], "nothing is left beside it"


def test_a_process_that_is_killed_while_writing_leaves_the_old_one(server: ForkServer, tmp_path: Path) -> None:
    path = save(tmp_path / "a.ckpt")
    before = path.read_bytes()
    script = (
        "import sys, torch; from pathlib import Path; from lightning_mhla.checkpoints.io import WholeCheckpointIO\n"
        "content = {'state_dict': {str(i): torch.zeros(1 << 20) for i in range(64)}}\n"
        "while True: WholeCheckpointIO().save_checkpoint(content, Path(sys.argv[1]) / 'b.ckpt')"
    )
    for _ in range(2):
        process = server.start(script, str(tmp_path), module="-c", output=tmp_path / "said.txt")
        until = time.monotonic() + 60
        while not list(tmp_path.glob(f"b.ckpt.*.{process.pid}.part")) and time.monotonic() < until:
            assert process.poll() is None
            time.sleep(0.001)
        assert time.monotonic() < until, "it has not written"
        process.kill()
        process.wait()
        assert path.read_bytes() == before
        whole = tmp_path / "b.ckpt"
        if whole.exists():
            check_checkpoint(whole)


def test_a_full_disk_leaves_the_old_one(tmp_path: Path) -> None:
    """A limit on the size of files fails a write as a full disk does."""
    path = save(tmp_path / "a.ckpt")
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match=r"could not be written .*Earlier checkpoints"):
            save(path, {"state_dict": {"w": torch.zeros(1 << 20)}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["a.ckpt"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, flip, empty])
def test_the_newest_whole_one_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    for number in range(3):
        path = save(tmp_path / f"sub/step={number}.ckpt", {**CONTENT, "global_step": number})
        os.utime(path, (number, number))
    damage(path)
    os.utime(path, (9, 9))
    with caplog.at_level(logging.WARNING):
        assert resolve_checkpoint(tmp_path).name == "step=1.ckpt"
    assert "Skipped a damaged checkpoint" in caplog.text
    assert "step=2.ckpt" in caplog.text
    with pytest.raises(ValueError, match=r"step=2\.ckpt"):
        WholeCheckpointIO().load_checkpoint(path)


def test_nothing_whole(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        resolve_checkpoint(tmp_path)
    cut(save(tmp_path / "a.ckpt"))
    with pytest.raises(ValueError, match=r"none of the 1 checkpoints in .* is complete"):
        resolve_checkpoint(tmp_path)


def test_code_in_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "x": Harmful(tmp_path / "made")}, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="it holds more than plain data"):
        WholeCheckpointIO().load_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    assert not (tmp_path / "made").exists()


def test_compressed_records_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(1 << 24))
    with pytest.raises(ValueError, match="compressed records"):
        check_checkpoint(path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"state_dict": [1]}, "holds no state_dict"),
        ({"state_dict": {"w": 1}}, "'w' in its state_dict is not a plain tensor"),
        ({"state_dict": {1: torch.ones(1)}}, "'1' in its state_dict is not a plain tensor"),
        ({"state_dict": {}, "hyper_parameters": "x"}, "its hyper_parameters is a str, not a dict"),
        ({"state_dict": {}, "loops": []}, "its loops is a list, not a dict"),
        ([1], "holds no state_dict"),
    ],
)
def test_other_contents_are_refused(tmp_path: Path, entries: Any, message: str) -> None:
    torch.save(entries, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=message):
        WholeCheckpointIO().load_checkpoint(tmp_path / "a.ckpt")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return save(tmp_path_factory.mktemp("whole") / "a.ckpt").read_bytes()


@fuzz(150)
@given(data=st.data())
def test_a_changed_byte_is_found_or_harmless(whole: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """Fuzzed: any change of a file gives ValueError, or the same numbers."""
    changed = bytearray(whole)
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=4)):
        changed[place] = value
    path = tmp_path / "fuzzed.ckpt"
    path.write_bytes(changed[: data.draw(st.integers(0, len(whole)) | st.just(len(whole)))])
    try:
        content = WholeCheckpointIO().load_checkpoint(path)
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017
    else:
        assert torch.equal(content["state_dict"]["w"], CONTENT["state_dict"]["w"])


@fuzz(100)
@given(noise=st.binary(max_size=400))
def test_noise_is_refused(tmp_path: Path, noise: bytes) -> None:
    path = tmp_path / "noise.ckpt"
    path.write_bytes(noise)
    with pytest.raises(ValueError, match=r"noise\.ckpt"):
        WholeCheckpointIO().load_checkpoint(path)
    with pytest.raises(ValueError, match=r"noise\.ckpt"):
        read_file(path)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sharded checkpoint of one process."""
    folder = tmp_path_factory.mktemp("sharded")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    try:
        tensors = {
            "state_dict": {"a.weight": torch.arange(6.0), "b": torch.ones(2)},
            "optimizer_0": {
                "state": {"a.weight": {"step": torch.tensor(3.0)}, "b": {"step": torch.tensor(4.0)}},
                "param_groups": [{"params": ["b"], "lr": 0.1}, {"params": ["a.weight"], "lr": 0.2}],
            },
        }
        save_sharded(folder / "a.ckpt", tensors, {"epoch": 3})
        save_sharded(folder / "a.ckpt", tensors, {"epoch": 4})
        into = {"state_dict": {"b": torch.zeros(2)}}
        load_tensors(folder / "a.ckpt", into)
        assert into["state_dict"]["b"].tolist() == [1, 1]
        (folder / "file").touch()
        with pytest.raises(OSError, match=r"checkpoint .*file/b\.ckpt could not be written: NotADirectoryError"):
            save_sharded(folder / "file" / "b.ckpt", tensors, {})
    finally:
        dist.destroy_process_group()
    return folder / "a.ckpt"


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def signed(folder: Path) -> Path:
    """Write a manifest that matches the files of a checkpoint, as an attacker would."""
    from lightning_mhla.checkpoints.sharded import checksum

    files = [file for file in folder.iterdir() if file.name != MANIFEST]
    listed = {file.name: {"bytes": file.stat().st_size, "crc32": checksum(file)} for file in files}
    (folder / MANIFEST).write_text(json.dumps(listed))
    return folder


def test_a_sharded_one_is_replaced_and_read_whole(sharded: Path) -> None:
    content = load_whole(sharded)
    assert content["epoch"] == 4
    assert content["state_dict"]["a.weight"].tolist() == [0, 1, 2, 3, 4, 5]
    (optimizer,) = content["optimizer_states"]
    assert [group["params"] for group in optimizer["param_groups"]] == [[0], [1]]
    assert optimizer["state"][1]["step"] == 3, "numbered in the order of the groups"
    assert sorted(path.name for path in sharded.parent.glob("a.ckpt*")) == ["a.ckpt"]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", LAYOUT, REST, MANIFEST])
def test_a_damaged_shard_is_found(sharded: Path, tmp_path: Path, name: str) -> None:
    folder = copied(sharded, tmp_path / "a.ckpt")
    (folder / name).unlink()
    with pytest.raises(ValueError, match=r"missing|not written completely"):
        check_sharded(folder)
    if name != MANIFEST:
        folder = copied(sharded, tmp_path / "b.ckpt")
        flip(folder / name)
        with pytest.raises(ValueError, match="is damaged"):
            load_whole(folder)


def test_code_in_a_sharded_one_does_not_run(sharded: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    folder = copied(sharded, tmp_path / "a.ckpt")
    (folder / ".metadata").write_bytes(pickle.dumps(Harmful(made)))
    assert load_whole(signed(folder))["epoch"] == 4, "torch's own list is left alone"
    folder = copied(sharded, tmp_path / "b.ckpt")
    torch.save({"x": Harmful(made)}, folder / REST)
    with pytest.raises(ValueError, match="cannot be read safely"):
        load_whole(signed(folder))
    folder = copied(sharded, tmp_path / "c.ckpt")
    stream = io.BytesIO()
    torch.save(Harmful(made), stream)
    shard = folder / "__0_0.distcp"
    whole = (sharded / "__0_0.distcp").read_bytes()
    shard.write_bytes(stream.getvalue() + whole[len(stream.getvalue()) :])
    with pytest.raises(ValueError, match="cannot be read safely"):
        load_whole(signed(folder))
    assert not made.exists()


@fuzz(60)
@given(noise=st.binary(max_size=300), name=st.sampled_from([LAYOUT, REST, "__0_0.distcp"]))
def test_noise_in_a_sharded_one_is_refused(sharded: Path, tmp_path_factory: Any, noise: bytes, name: str) -> None:
    folder = copied(sharded, tmp_path_factory.mktemp("fuzz") / "a.ckpt")
    (folder / name).write_bytes(noise)
    with pytest.raises(ValueError, match=r"a\.ckpt"):
        load_whole(signed(folder))


@fuzz(100)
@given(data=st.data(), name=st.sampled_from([LAYOUT, REST, "__0_0.distcp"]))
def test_a_changed_shard_is_found_or_harmless(
    sharded: Path, tmp_path_factory: Any, data: st.DataObject, name: str
) -> None:
    """Fuzzed, with a manifest that fits: ValueError, or entries that are read; nothing else."""
    folder = copied(sharded, tmp_path_factory.mktemp("fuzz") / "a.ckpt")
    changed = bytearray((folder / name).read_bytes())
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(changed) - 1), st.integers(0, 255)), max_size=4)
    ):
        changed[place] = value
    (folder / name).write_bytes(changed)
    try:
        content = load_whole(signed(folder))
    except ValueError as error:
        assert "a.ckpt" in str(error)  # noqa: PT017
    else:
        assert isinstance(content, dict)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda listed: listed["paths"].update({"state_dict.b": ["state_dict", 10**12]}), "is kept under"),
        (lambda listed: listed["paths"].update({"c": ["c"]}), "'c' is kept under"),
        (lambda listed: listed["entries"]["state_dict.b"].update(size=[10**9]), "more than all"),
        (lambda listed: listed["entries"]["state_dict.b"].update(size=[True]), "'True' is not a number"),
        (lambda listed: listed["entries"]["state_dict.b"].update(size=[-1]), "'-1' is not a number"),
        (lambda listed: listed["entries"]["state_dict.b"].update(dtype="load"), "has an unknown dtype: load"),
        (lambda listed: listed["places"][0].__setitem__(2, "../../x"), "names a file outside its folder: ../../x"),
        (lambda listed: listed["places"][0].__setitem__(3, 1 << 70), "is not a number of elements or bytes"),
        (lambda listed: listed.pop("places"), "places"),
        (lambda listed: listed.update(entries=[1]), "'list' object"),
    ],
)
def test_layouts_that_are_none(sharded: Path, tmp_path: Path, change: Any, message: str) -> None:
    folder = copied(sharded, tmp_path / "a.ckpt")
    listed = json.loads((folder / LAYOUT).read_text())
    change(listed)
    (folder / LAYOUT).write_text(json.dumps(listed))
    with pytest.raises(ValueError, match=rf"a\.ckpt/{LAYOUT} cannot be read.*{re.escape(message)}"):
        load_whole(signed(folder))
