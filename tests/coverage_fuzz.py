"""Coverage-guided fuzzing of every reader of files. It requires atheris (pip install atheris; wheels exist for Linux):

    python tests/coverage_fuzz.py checkpoint -max_total_time=60

The targets are array, checkpoint, configuration, image, layout, shard, tokens and values. Options after the target are those of
libFuzzer. A reader may raise ValueError (for YAML also YAMLError), within ten seconds and 4 GiB. Any other failure is reported
with its input.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import atheris

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path[:0] = [str(Path(__file__).parents[1] / each) for each in ("", "kernels", "tasks")]
with atheris.instrument_imports(
    include=["ast", "json", "tarfile", "zipfile", "yaml", "PIL"], enable_loader_override=False
):
    import ast  # noqa: F401  read by numpy
    import contextlib
    import io
    import json
    import struct
    import tarfile
    import tempfile
    import warnings
    import zipfile
    import zlib

    import yaml
    from PIL import Image

import numpy as np
import torch
from torch._weights_only_unpickler import Unpickler
from torch.distributed.checkpoint import state_dict_loader  # noqa: F401  instrumenting it would take minutes

Unpickler.load = atheris.instrument_func(Unpickler.load)
with atheris.instrument_imports(include=["lightning_mhla", "mhla_tasks"], enable_loader_override=False):
    from mhla_tasks.language.token_shards import ShardRuns

    from lightning_mhla.checkpoints.io import WholeCheckpointIO
    from lightning_mhla.checkpoints.sharded import LAYOUT, MANIFEST
    from lightning_mhla.checkpoints.sharded_tensors import load_whole, save_sharded
    from lightning_mhla.data import ShardReader
    from lightning_mhla.data.images import decode_image
    from lightning_mhla.data.tables import scan_shard
    from lightning_mhla.system.untrusted import check_yaml, parse_array

FOLDER = Path(tempfile.mkdtemp(prefix="fuzz", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))


def _tar(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def _npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def array(data: bytes) -> None:
    """Read fuzzed data as an ``.npy`` file."""
    parse_array(data)


def image(data: bytes) -> None:
    """Read fuzzed data as a JPEG, PNG or WebP file."""
    decode_image(data, "x")


def configuration(data: bytes) -> None:
    """Read fuzzed data as a YAML configuration."""
    text = data.decode("utf-8", "ignore")
    check_yaml(text)
    yaml.safe_load(text)


def checkpoint(data: bytes) -> None:
    """Read fuzzed data as a checkpoint file. Its checksums are corrected first, so that its content is read."""
    path = FOLDER / "x.ckpt"
    path.write_bytes(_with_checksums(data))
    WholeCheckpointIO().load_checkpoint(path)


def values(data: bytes) -> None:
    """Read fuzzed data as the pickle inside a checkpoint file."""
    path = FOLDER / "values.ckpt"
    with zipfile.ZipFile(path, "w") as records:
        for name, content in {"data.pkl": data, "data/0": bytes(16), "version": b"3\n", "byteorder": b"little"}.items():
            records.writestr(f"archive/{name}", content)
    WholeCheckpointIO().load_checkpoint(path)


def layout(data: bytes) -> None:
    """Read fuzzed data as the index of a sharded checkpoint, with a matching manifest."""
    folder = FOLDER / "sharded.ckpt"
    (folder / LAYOUT).write_bytes(data)
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != MANIFEST}
    listed = {name: {"bytes": len(content), "crc32": zlib.crc32(content)} for name, content in files.items()}
    (folder / MANIFEST).write_text(json.dumps(listed))
    load_whole(folder)


def shard(data: bytes) -> None:
    """Read fuzzed data as a tar shard of labels and arrays."""
    path = FOLDER / "x.tar"
    path.write_bytes(data)
    scan_shard(path)
    reader = ShardReader([path])
    for index in range(min(len(reader), 4)):
        for read in (lambda i: reader.label(i, 10), lambda i: reader.array(i, "x.npy")):
            with contextlib.suppress(ValueError):
                read(index)


def tokens(data: bytes) -> None:
    """Read fuzzed data as the two arrays of a token shard, one after the other."""
    half = len(data) // 2
    path = FOLDER / "tokens.tar"
    path.write_bytes(_tar({"0.tokens.npy": data[:half], "0.starts.npy": data[half:]}))
    runs = ShardRuns(ShardReader([path]))
    for run in range(len(runs.lengths)):
        runs.read(run, 0, min(4, int(runs.lengths[run])))


def _with_checksums(data: bytes) -> bytes:
    """Return a zip file with corrected checksums (CRC-32) of the records, at the positions in its directory."""
    changed = bytearray(data)
    entry = changed.find(b"PK\x01\x02")
    while entry >= 0 and entry + 46 <= len(changed):
        size, name, extra, comment = struct.unpack_from("<I4xHHH", changed, entry + 20)
        (where,) = struct.unpack_from("<I", changed, entry + 42)
        if where + 30 <= len(changed):
            name_length, extra_length = struct.unpack_from("<HH", changed, where + 26)
            start = where + 30 + name_length + extra_length
            struct.pack_into("<I", changed, entry + 16, zlib.crc32(bytes(changed[start : start + size])))
        entry = changed.find(b"PK\x01\x02", entry + 46 + name + extra + comment)
    return bytes(changed)


def _checkpoint_seed() -> bytes:
    stream = io.BytesIO()
    content = {"state_dict": {"w": torch.arange(4.0)}, "epoch": 1, "loops": {"a": [1, (2.5, None)]}, "callbacks": {}}
    torch.save(content, stream)
    return stream.getvalue()


def _values_seed() -> bytes:
    with zipfile.ZipFile(io.BytesIO(_checkpoint_seed())) as records:
        return records.read("archive/data.pkl")


def _layout_seed() -> bytes:
    torch.distributed.init_process_group("gloo", init_method=f"file://{FOLDER / 'store'}", rank=0, world_size=1)
    tensors = {"state_dict": {"a": torch.arange(6.0)}, "optimizer_0": {"state": {"a": {"step": torch.tensor(1.0)}}}}
    tensors["optimizer_0"]["param_groups"] = [{"params": ["a"], "lr": 0.1}]  # type: ignore[assignment]
    save_sharded(FOLDER / "sharded.ckpt", tensors, {"epoch": 3})
    torch.distributed.destroy_process_group()
    return (FOLDER / "sharded.ckpt" / LAYOUT).read_bytes()


def _image_seed() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "PNG")
    return stream.getvalue()


def _token_seed() -> bytes:
    return _npy(np.arange(8, dtype=np.uint16)) + _npy(np.array([0, 3], dtype=np.uint32))


TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[], bytes]]] = {
    "array": (array, lambda: _npy(np.arange(4, dtype=np.float32))),
    "checkpoint": (checkpoint, _checkpoint_seed),
    "configuration": (configuration, lambda: b"trainer: {max_steps: 3}\nmodel:\n  class_path: X\n  a: &b [1, *b]\n"),
    "image": (image, _image_seed),
    "layout": (layout, _layout_seed),
    "shard": (shard, lambda: _tar({"0.cls": b"1", "0.x.npy": _npy(np.zeros(2)), "1.cls": b"7"})),
    "tokens": (tokens, _token_seed),
    "values": (values, _values_seed),
}


def main() -> None:
    """Fuzz the target that the command line names, starting from one valid input."""
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        raise SystemExit(f"{__doc__}\nerror: name a target: {', '.join(TARGETS)}")
    read, seed = TARGETS[sys.argv.pop(1)]
    warnings.simplefilter("ignore")
    corpus = FOLDER / "corpus"
    corpus.mkdir()
    (corpus / "seed").write_bytes(seed())

    def once(data: bytes) -> None:
        with contextlib.suppress(ValueError, yaml.YAMLError):
            read(data)

    limits = ["-timeout=10", "-rss_limit_mb=4096", "-max_len=8192"]
    atheris.Setup([sys.argv[0], *limits, *sys.argv[1:], str(corpus)], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
