"""Shards, member tables, arrays and images that anybody may have written: a clear error, or a skipped sample; never more."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import re
import resource
import tarfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from mhla_tasks.captioned.text import TextConfig, make_encoder
from PIL import Image

from lightning_mhla.data import BrokenSampleError, ShardReader, find_shards, origins
from lightning_mhla.data.captioned import FolderFiles
from lightning_mhla.data.classes import match_classes, read_classes
from lightning_mhla.data.images import LabelledFolder, decode_file, decode_image, image_files
from lightning_mhla.data.labelled import LabelledShards
from lightning_mhla.data.origins import ShardSet
from lightning_mhla.data.shards import expand_braces
from lightning_mhla.data.tables import MOST_MEMBERS, load_table, scan_shard
from lightning_mhla.system.untrusted import check_yaml, parse_array, parse_yaml, read_arrays, read_json, read_yaml
from lightning_mhla.training.classes import known_classes


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
    """Return a tar header with some fields overwritten and a correct checksum."""
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
        (b"", "not a complete tar file|cut short"),
        (b"\x1f\x8b" + bytes(2000), "not a complete tar file"),
        (header(size=b"\x80" + b"\xff" * 11) + bytes(1024), "not a complete tar file"),
        (header(size=b"\xff" * 10 + b"\xfc\x00") + bytes(1024), "not a complete tar file"),
        (header(size=b"77777777777\0") + bytes(1024), "cut short|not a complete tar file"),
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
    with pytest.raises(ValueError, match="different extensions"):
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
    with pytest.raises(BrokenSampleError, match="is not an array"):
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
    """A shard with changed, removed or repeated bytes is rejected, or its samples are read or rejected one by one."""
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
        (BOMB, "values after its aliases are expanded"),
        ("a: &t [*t]\n", "refers to itself or to an unknown anchor"),
        ("[" * 5000 + "]" * 5000, "nested more than 50 deep"),
        ("# x\n" * 500_000, "are too many for a configuration"),
    ],
    ids=["aliases", "itself", "deep", "large"],
)
def test_yaml_that_takes_readers_apart(text: str, message: str) -> None:
    begun = time.process_time()
    with pytest.raises(ValueError, match=message):
        check_yaml(text)
    assert time.process_time() - begun < 3


@pytest.mark.parametrize(
    "value", ["!!bool 5", "!!int ''", "!!int x", "!!float x", "!!timestamp x", "!!binary ü", "2026-13-01"]
)
def test_a_yaml_value_that_does_not_fit_its_tag_is_a_clear_error(value: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"trainer: {{max_steps: {value}}}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.yaml cannot be read \("):
        read_yaml(tmp_path / "config.yaml")


@fuzz(200)
@given(text=st.text(alphabet="ab:-[]{}&*!|>\n \"'#%@,0123", max_size=80))
def test_fuzzed_yaml(text: str) -> None:
    with suppress(yaml.YAMLError, ValueError):
        parse_yaml(text)


@pytest.mark.parametrize("text", ["[1]", "5", "{", "\udcff", "[" * 100_000])
def test_json_that_is_no_object(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"a\.json"):
        read_json(path)


@contextmanager
def cheap(seconds: float = 2.0) -> Iterator[None]:
    """Check that a ``with`` block uses no more processor time and memory than a decompression bomb may cost."""
    begun, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - begun < seconds
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 1 << 20, "KiB"


def further(kind: bytes, size: int, data: bytes = b"") -> bytes:
    """Return a tar header that announces ``size`` bytes for the next header."""
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512)


ATTRIBUTE = b"1000019 comment=" + b"x" * 1_000_002 + b"\n"


@pytest.mark.parametrize(
    "start",
    [
        further(tarfile.XHDTYPE, 100 << 20),
        further(tarfile.XGLTYPE, 100 << 20),
        further(tarfile.SOLARIS_XHDTYPE, 100 << 20),
        further(tarfile.GNUTYPE_LONGNAME, 100 << 20),
        further(tarfile.GNUTYPE_LONGLINK, 100 << 20),
        (further(tarfile.XGLTYPE, len(ATTRIBUTE), ATTRIBUTE)) * 20,
    ],
    ids=["PAX", "global PAX", "Solaris", "name", "link", "many"],
)
def test_headers_without_end_are_not_read(start: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(start + header() + bytes(512))
    with path.open("r+b") as stream:
        stream.truncate(len(start) + (200 << 20))  # sparse on the disk
    with cheap(), pytest.raises(ValueError, match=r"a\.tar: not a complete tar file \(a header of \d+ bytes, at most"):
        scan_shard(path)


def test_more_members_than_a_shard_has_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_mhla.data.tables.MOST_MEMBERS", 1000)
    blocks = [tarfile.TarInfo(f"{number}.cls").tobuf(tarfile.USTAR_FORMAT) for number in range(1001)]
    for count, name in ((1000, "fits.tar"), (1001, "many.tar")):
        (tmp_path / name).write_bytes(b"".join(blocks[:count]) + bytes(1024))
    assert len(ShardReader([tmp_path / "fits.tar"])) == 1000
    with pytest.raises(
        ValueError, match=r"many\.tar: not a complete tar file \(more than 1000 members; write smaller shards"
    ):
        ShardReader([tmp_path / "many.tar"])


def test_a_hundred_thousand_members_are_read_in_time() -> None:
    assert MOST_MEMBERS == 100_000, "what tarfile reads in two seconds"


@pytest.mark.parametrize(
    "pattern",
    [
        "a-{0..9999999999}.tar", "{a,b}" * 40 + ".tar", "{0..999}{0..999}{0..999}.tar", "{a..z}" * 9 + ".tar",
        "{0..99999999999..2}.tar", "{{0..9999999},{0..9999999}}.tar", "{-9999999..9999999}.tar", "{" * 2000 + "}" * 2000,
        "{" + "a," * 3000 + "}", f"{{{'0' * 3000}..999999}}.tar", "a{b",
    ],
)  # fmt: skip
def test_braces_that_stand_for_too_much(pattern: str, tmp_path: Path) -> None:
    with cheap(), pytest.raises(ValueError, match=rf"^{re.escape(pattern[:60])}") as caught:
        find_shards(pattern, tmp_path)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("train-{0000..1023}.tar", 1024), ("{a,b}-{0..9}", 20), ("{a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q,r,s,t,u,v,w,x,y}", 25),
        ("{x,{0..99}}", 101), ("{0..100..10}", 11), ("a,b", 1), (r"\{0..9\}", 1), ("{a}", 1), ("", 1), ("{a..e}", 5),
        ("{0..10000000..1000}", 10001),
    ],
)  # fmt: skip
def test_braces_as_bash_expands_them(pattern: str, count: int) -> None:
    assert len(expand_braces(pattern)) == count


def archive(path: Path, members: dict[str, bytes], packing: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", packing, compresslevel=1) as target:
        for name, data in members.items():
            with target.open(f"{name}.npy", "w") as stream:
                stream.write(data)
    return path


@pytest.mark.parametrize(
    "members",
    [
        {"mu": forged("(33554432,)", "<f8", bytes(1 << 28)), "sigma": npy(np.eye(2))},
        {"mu": npy(np.zeros(2)), "sigma": forged("(1048576, 1048576)", "<f8")},
        {"mu": forged("(1099511627776,)", "<f8", bytes(8)), "sigma": npy(np.eye(2))},
        {"mu": npy(np.zeros(2)), "sigma": npy(np.array([{}], object), allow_pickle=True)},
        {"arr_0": forged("(1000000, 1000, 1000, 3)", "|u1", bytes(8))},
        {"arr_0": forged("(64, 1024, 1024, 3)", "|u1", bytes(64 * 3 << 20))},
        {"mu": b"not an array", "sigma": npy(np.eye(2))},
    ],
    ids=["zeros", "no bytes", "2^40", "pickle", "images", "black images", "text"],
)
def test_statistics_that_are_a_bomb(members: dict[str, bytes], tmp_path: Path) -> None:
    path = archive(tmp_path / "reference.npz", members)
    with cheap(), pytest.raises(ValueError, match=r"reference\.npz is not an \.npz that can be read safely"):
        read_arrays(path, {"arr_0": 1 << 48, "mu": 1 << 28, "sigma": 1 << 28})


def test_statistics_as_evaluators_write_them(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"mu": np.zeros(2048), "sigma": np.eye(2048), "arr_0": np.zeros((3, 8, 8, 3), np.uint8)}
    for write in (np.savez, np.savez_compressed):
        write(tmp_path / "a.npz", **arrays, other=np.array([{}], object))
        if write is np.savez:
            found = read_arrays(tmp_path / "a.npz", dict.fromkeys(arrays, 1 << 28))
            assert all(np.array_equal(found[name], values) for name, values in arrays.items())
    (tmp_path / "b.npz").write_bytes(b"PK\x03\x04" + bytes(50))
    with pytest.raises(ValueError, match=r"b\.npz is not an \.npz"):
        read_arrays(tmp_path / "b.npz", {"mu": 1})
    with pytest.raises(FileNotFoundError):
        read_arrays(tmp_path / "none.npz", {"mu": 1})


@pytest.mark.parametrize("count", [2**40, 2**31, 2**25, 0, -1])
def test_classes_that_no_model_has(count: int) -> None:
    with pytest.raises(ValueError, match=rf"num_classes={count} must be 1 to 16777216"):
        known_classes(count)
    with pytest.raises(ValueError, match=rf"num_classes={count} must be 1 to 16777216"):
        LabelledShards().num_classes = count


def test_long_lists_of_classes_cost_no_time(tmp_path: Path) -> None:
    names = [f"class {number}" for number in range(100_000)]
    file = tmp_path / "train-classes.txt"
    file.write_text("\n".join([*names, names[-1]]))
    with cheap(), pytest.raises(ValueError, match="lists 'class 99999' twice"):
        read_classes(file)
    with cheap():
        assert match_classes(names[1:], names, "x") == list(range(1, 100_000))
    with file.open("r+b") as stream:
        stream.truncate(1 << 30)
    with cheap(), pytest.raises(ValueError, match=r"train-classes\.txt has 1073741824 bytes"):
        read_classes(file)


def test_json_and_records_without_end(tmp_path: Path) -> None:
    large = tmp_path / "config.json"
    large.touch()
    with large.open("r+b") as stream:
        stream.truncate(1 << 32)
    with cheap(), pytest.raises(ValueError, match=r"config\.json has 4294967296 bytes, at most"):
        read_json(large)
    shards = ShardSet(tmp_path, "train")
    for line in (b" " * (1 << 20), b"{}\n" * (1 << 18), b'{"name": "a", "note": "", "files": []}\n' * (1 << 15)):
        with gzip.open(shards.origins, "wb", compresslevel=9) as stream:
            stream.write(b"{}\n")
            for _ in range(100):
                stream.write(line)
        with cheap():
            assert origins._read(shards) is None


def test_a_sample_of_many_gigabytes_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "folder/one").mkdir(parents=True)
    image, video, tar = (tmp_path / name for name in ("folder/one/a.png", "folder/one/b.mp4", "a.tar"))
    for path in (image, video, tar):
        path.write_bytes(png(8, 8))
        with path.open("r+b") as stream:
            stream.truncate((40 << 30) + 2048)  # sparse on the disk
    (tmp_path / "folder/one/b.txt").write_text("a")
    readers: list[Any] = [
        lambda: LabelledFolder(tmp_path / "folder")[0],
        lambda: decode_file(image),
        lambda: FolderFiles(tmp_path / "folder", ["mp4"], "caption").member(0, ["mp4"]),
    ]
    for read in readers:
        with (
            cheap(),
            pytest.raises(BrokenSampleError, match=r"[ab]\.(png|mp4) has 42949675008 bytes, at most 1073741824"),
        ):
            read()
    block = tarfile.TarInfo("x.png")
    block.size = (8 << 30) - 1
    with tar.open("r+b") as stream:
        stream.write(block.tobuf(tarfile.USTAR_FORMAT))
        stream.truncate(512 + (8 << 30) + 1024)
    with cheap(), pytest.raises(BrokenSampleError, match=r"a\.tar: sample x: \.png has 8589934591 bytes"):
        ShardReader([tar]).read(0, "png")


def test_the_tokenizer_of_a_text_encoder_is_checked_too(tmp_path: Path) -> None:
    steps = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}] * 9
    (tmp_path / "tokenizer").mkdir()
    state = {"normalizer": {"type": "Sequence", "normalizers": steps}}
    (tmp_path / "tokenizer/tokenizer.json").write_text(json.dumps(state))
    with cheap(20), pytest.raises(ValueError, match="tokenizer is not safe to use: the replacements of its normalizer"):
        make_encoder(TextConfig(str(tmp_path)), None).encode(["a"], torch.device("cpu"))
