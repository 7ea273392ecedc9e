"""Shards, member tables, arrays and images that anybody may have written: a clear error, or a skipped sample; never more."""

from __future__ import annotations

import io
import pickle
import re
import tarfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lightning_mhla.data import BrokenSampleError, ShardReader
from lightning_mhla.data.images import decode_image, image_files
from lightning_mhla.data.tables import load_table, scan_shard
from lightning_mhla.system.untrusted import check_yaml, parse_array, read_json


def npy(array: np.ndarray, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def shard(path: Path, members: dict[str, bytes], **fields: Any) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(data))
    return path


def good(path: Path) -> Path:
    array = npy(np.arange(4, dtype=np.float32))
    return shard(path, {f"{i}.{kind}": data for i in range(3) for kind, data in (("cls", b"1"), ("x.npy", array))})


def header(**fields: bytes) -> bytes:
    """A tar header with some fields overwritten, its checksum right."""
    info = tarfile.TarInfo("a.cls")
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    places = {"name": (0, 100), "size": (124, 12), "type": (156, 1)}
    for name, value in fields.items():
        start, length = places[name]
        block[start : start + length] = value.ljust(length, b"\0")[:length]
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a whole tar file|cut short"),
        (b"\x1f\x8b" + bytes(2000), "not a whole tar file"),
        (header(size=b"\x80" + b"\xff" * 11) + bytes(1024), "not a whole tar file"),
        (header(size=b"\xff" * 10 + b"\xfc\x00") + bytes(1024), "not a whole tar file"),
        (header(size=b"77777777777\0") + bytes(1024), "cut short|not a whole tar file"),
        (header(type=b"S", size=b"00000000010\0") + bytes(1024), "sparse"),
        (header() + bytes(1024) + b"x" * 512, "no member where byte"),
    ],
    ids=["empty", "gzip", "size of 2^88", "negative size", "size of 8 GiB", "sparse", "something behind"],
)
def test_tar_files_that_are_none(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        scan_shard(path)


def test_a_long_tail_and_long_names_cost_no_time(tmp_path: Path) -> None:
    path = good(tmp_path / "a.tar")
    with path.open("r+b") as stream:
        stream.truncate(20 << 30)  # sparse on the disk
    begun = time.process_time()
    with pytest.raises(ValueError, match="bytes follow its last member"):
        scan_shard(path)
    path.unlink()
    with pytest.raises(ValueError, match="a name of 5004 characters"):
        scan_shard(shard(tmp_path / "b.tar", {"x" * 5000 + ".cls": b"1"}))
    with pytest.raises(ValueError, match="kinds of members"):
        scan_shard(shard(tmp_path / "c.tar", {f"a.x{number}": b"1" for number in range(100)}))
    assert time.process_time() - begun < 10


def test_members_are_read_and_never_unpacked_or_unpickled(tmp_path: Path) -> None:
    evil = pickle.dumps(print)
    path = shard(tmp_path / "a.tar", {"../../x.pkl": evil, "/etc/y.npy": evil, "z.cls": b"1"})
    with tarfile.open(path, "a") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo("link.cls")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    reader = ShardReader([path])
    keys = reader.tables[0].keys.tolist()
    assert keys == ["../../x", "/etc/y", "z"]
    with pytest.raises(BrokenSampleError, match="is no array"):
        reader.array(1, "npy")
    assert not (tmp_path.parent.parent / "x.pkl").exists()


@pytest.mark.parametrize(
    "text",
    [b"9" * 10**6, "\u0661".encode(), b"1_0", b"+1", b"-0", b"", b"0x1", b" " * 10**6],
    ids=lambda text: repr(text)[:12],
)
def test_labels_that_are_none(tmp_path: Path, text: bytes) -> None:
    reader = ShardReader([shard(tmp_path / "a.tar", {"a.cls": text})])
    with pytest.raises(BrokenSampleError, match="is not one of the classes 0 to 9") as error:
        reader.label(0, 10)
    assert len(str(error.value)) < 400


def forged(shape: str, dtype: str = "<f4", data: bytes = b"") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


@pytest.mark.parametrize(
    "data",
    [
        forged("(1000000000000,)"),
        forged("(" + "9" * 4000 + ",)"),
        forged("(-1,)"),
        forged("(True,)"),
        forged("(2.5,)"),
        forged("(1,)", "|O", pickle.dumps(1)),
        forged("(1,)", ">f4", bytes(4)),
        forged("(1,)", "<c8", bytes(8)),
        forged("(2,)", "<f4", bytes(9)),
        forged("(" * 2000),
        b"PK\x03\x04" + bytes(100),
        npy(np.array([None]), allow_pickle=True),
        npy(np.zeros(3, dtype=[("a", "f4")])),
        b"",
    ],
)
def test_arrays_that_are_none(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        parse_array(data)
    assert len(str(error.value)) < 400


@fuzz(300)
@given(data=st.binary(max_size=300) | st.binary(max_size=120).map(lambda tail: b"\x93NUMPY\x01\x00" + tail))
def test_fuzzed_arrays(data: bytes) -> None:
    with suppress(ValueError):
        parse_array(data)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return good(tmp_path_factory.mktemp("good") / "a.tar").read_bytes()


@fuzz(250)
@given(data=st.data())
def test_fuzzed_shards(template: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """Bytes changed, pieces cut out or doubled: the shard is refused, or its samples are read or refused one by one."""
    changed = bytearray(template)
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=6)):
        changed[place] = value
    start, end = sorted(data.draw(st.tuples(st.integers(0, len(changed)), st.integers(0, len(changed)))))
    path = tmp_path / "fuzzed.tar"
    path.write_bytes(changed[:start] + changed[end:] if data.draw(st.booleans()) else changed)
    path.with_name("fuzzed.tar.index.npz").unlink(missing_ok=True)
    try:
        reader = ShardReader([path])
    except ValueError as error:
        assert "fuzzed.tar" in str(error)  # noqa: PT017
        return
    for index in range(len(reader)):
        for read in (lambda i: reader.label(i, 10), lambda i: reader.array(i, "x.npy")):
            try:
                read(index)
            except BrokenSampleError as error:
                assert "fuzzed.tar" in str(error)  # noqa: PT017


def table_with(path: Path, **changes: Any) -> None:
    with np.load(path.with_name(path.name + ".index.npz")) as kept:
        arrays = {**kept, **changes}
    np.savez(path.with_name(path.name + ".index.npz"), **arrays)


@pytest.mark.parametrize(
    "changes",
    [
        {"keys": np.array(["a"] * 9)},
        {"keys": np.array("a")},
        {"keys": np.arange(3)},
        {"offsets": np.zeros(3, np.int64)},
        {"offsets": np.zeros((3, 2))},
        {"offsets": np.full((3, 2), 2**62)},
        {"sizes": np.full((3, 2), 2**40)},
        {"sizes": np.full((3, 2), -5)},
        {"stamp": np.zeros((0, 2), np.int64)},
        {"extensions": np.array([1, 2])},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_forged_member_table_is_read_anew(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = good(tmp_path / "a.tar")
    expected = load_table(path)
    table_with(path, **changes)
    found = load_table(path)
    assert (found.keys == expected.keys).all()
    assert (found.offsets == expected.offsets).all()


@fuzz(100)
@given(noise=st.binary(max_size=200))
def test_a_fuzzed_member_table_is_read_anew(tmp_path_factory: Any, noise: bytes) -> None:
    path = good(tmp_path_factory.mktemp("table") / "a.tar")
    load_table(path)
    kept = path.with_name("a.tar.index.npz")
    data = kept.read_bytes()
    kept.write_bytes(data[: len(data) // 2] + noise + data[len(data) // 2 :])
    assert load_table(path).keys.tolist() == ["0", "1", "2"]


def test_a_member_table_that_is_a_bomb_is_read_anew(tmp_path: Path) -> None:
    path = good(tmp_path / "a.tar")
    load_table(path)
    with zipfile.ZipFile(path.with_name("a.tar.index.npz"), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("keys.npy", bytes(1 << 28))
    assert len(load_table(path).keys) == 3


def png(width: int, height: int) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (width, height)).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (png(14000, 13000), "exceeds limit of 178956970 pixels"),
        (png(20000, 1), "20000 x 1 pixels is too large or too narrow"),
        (png(8, 8)[:40], "cannot be decoded"),
        (b"GIF89a" + bytes(50), "not JPEG, PNG or WebP"),
        (b"", "not JPEG, PNG or WebP"),
    ],
    ids=["large", "narrow", "cut", "gif", "empty"],
)
def test_images_that_are_none(data: bytes, message: str) -> None:
    with pytest.raises(BrokenSampleError, match=message):
        decode_image(data, "a.png")


@fuzz(150)
@given(place=st.integers(0, 60), value=st.integers(0, 255), cut=st.integers(0, 80))
def test_fuzzed_images(place: int, value: int, cut: int) -> None:
    data = bytearray(png(8, 8))
    data[min(place, len(data) - 1)] = value
    try:
        decode_image(bytes(data[: len(data) - cut]), "a.png")
    except BrokenSampleError as error:
        assert "a.png" in str(error)  # noqa: PT017


@pytest.mark.parametrize("kind", ["EPS", "BMP", "GIF", "TIFF", "PPM", "ICO", "PCX", "PDF"])
def test_no_other_format_reaches_its_decoder(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was started"))
    stream = io.BytesIO()
    Image.new("RGB", (16, 16)).save(stream, kind)
    with pytest.raises(BrokenSampleError, match=r"a\.png.*not JPEG, PNG or WebP"):
        decode_image(stream.getvalue(), "a.png")


def test_images_are_opened_in_one_place() -> None:
    root = Path(__file__).parents[2]
    files = [
        file for part in ("lightning_mhla", "tasks", "benchmarks", "kernels") for file in (root / part).rglob("*.py")
    ]
    opening = [str(file.relative_to(root)) for file in files if re.search(r"Image\.open\(", file.read_text())]
    assert opening == ["lightning_mhla/data/images.py"], "Pillow without a list of formats starts Ghostscript"


def test_a_folder_of_images_holds_files_only(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "x.png")
    (tmp_path / "dir.jpg").mkdir()
    (tmp_path / "a.png").write_bytes(png(8, 8))
    assert [path.name for path in image_files(tmp_path)] == ["a.png"]


BOMB = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{new}: &{new} [{','.join(['*' + old] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "values once its aliases are followed"),
        ("a: &t [*t]\n", "names itself, or nothing"),
        ("[" * 5000 + "]" * 5000, "nested more than 50 deep"),
        ("# x\n" * 500_000, "no configuration"),
    ],
    ids=["aliases", "itself", "deep", "large"],
)
def test_yaml_that_takes_readers_apart(text: str, message: str) -> None:
    begun = time.process_time()
    with pytest.raises(ValueError, match=message):
        check_yaml(text)
    assert time.process_time() - begun < 3


@fuzz(200)
@given(text=st.text(alphabet="ab:-[]{}&*!|>\n \"'#%@,0123", max_size=80))
def test_fuzzed_yaml(text: str) -> None:
    try:
        check_yaml(text)
        yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        pass


@pytest.mark.parametrize("text", ["[1]", "5", "{", "\udcff", "[" * 100_000])
def test_json_that_is_no_object(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"a\.json"):
        read_json(path)
