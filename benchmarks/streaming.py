"""Samples per second from shards on a server, with a cache for a tenth of them, and from the same shards on a local disk.

    lightning bench streaming --out benchmarks/results

Random JPEGs with labels are packed into shards, which ``python -m http.server`` serves from a separate process. Both readers
decode an epoch in the same order, resize images to 224 pixels, and form batches of 64. Every repetition begins with an empty
cache.
"""

from __future__ import annotations

import argparse
import io
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from benchmarks.machine import describe
from lightning_mhla.data import ResumableLoader, ShardOptions, ShardSets, write_shards
from lightning_mhla.data.images import ShardImages
from lightning_mhla.system.files import write_json

SIDE, BATCH, WINDOW = 320, 64, 4


def main() -> None:
    """Write shards, read them from a server and from the disk, and print and write the samples per second."""
    parser = argparse.ArgumentParser(
        prog="lightning bench streaming", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=80, help="number of shards (default: 80)")
    parser.add_argument("--per_shard", type=int, default=64, help="number of images in a shard (default: 64)")
    parser.add_argument("--workers", type=int, default=1, help="number of worker processes (default: 1)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="number of epochs with each reader, alternating (default: 3)"
    )
    parser.add_argument("--out", type=Path, help="folder for streaming-DEVICE.json (default: print only)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        write_shards(range(args.shards * args.per_shard), _members, home / "remote", "train", args.per_shard)
        list(ShardSets(str(home / "remote"), str(home / "remote")).reader("train").shards)  # writes the member tables
        total = sum(path.stat().st_size for path in (home / "remote").glob("*.tar"))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "http.server",
            str(port),
            "--bind",
            "127.0.0.1",
            "--directory",
            str(home / "remote"),
        ]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_for(port)
            where = f"http://127.0.0.1:{port}/train-{{0000..{args.shards - 1:04d}}}.tar"
            rates: dict[str, list[float]] = {"local": [], "streamed": []}
            for number in range(args.repeats):
                rates["local"].append(_rate(str(home / "remote"), home / "none", None, args.workers))
                rates["streamed"].append(_rate(where, home / f"cache{number}", total // 10, args.workers))
        finally:
            server.kill()
            server.wait()
    medians: dict[str, Any] = {name: round(median(values), 1) for name, values in rates.items()}
    medians["ratio"] = round(medians["streamed"] / medians["local"], 3)
    result = {**vars(args), "bytes": total, "cache_bytes": total // 10, "samples_a_second": rates, **medians}
    result.pop("out")
    result["machine"] = describe(torch.device("cpu"))
    print(
        f"{total / 1e6:.0f} MB in {args.shards} shards, {args.workers} workers: {medians['local']:,} samples per second from "
        f"the disk, {medians['streamed']:,} from a server with cache_bytes={total // 10} ({100 * medians['ratio']:.1f}%)"
    )
    if args.out is not None:
        write_json(args.out / "streaming-cpu.json", result, indent=1)


def _members(index: int) -> dict[str, Any]:
    random = np.random.default_rng(index)
    small = random.integers(0, 255, (SIDE // 8, SIDE // 8, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(small).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
    return {"jpg": stream.getvalue(), "cls": index % 10}


def _wait_for(port: int) -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.05)


def _rate(where: str, cache: Path, limit: int | None, workers: int) -> float:
    """Measure the samples per second of reading shards for an epoch, without its first batch.

    Args:
        where: folder or URL pattern of the shards.
        cache: folder of the cache.
        limit: size of the cache in bytes; None for no limit.
        workers: number of worker processes.
    """
    sets = ShardSets(where, where, ShardOptions(cache_dir=str(cache), cache_bytes=limit))
    transform = v2.Compose([v2.PILToTensor(), v2.Resize(224)])
    source = ShardImages(sets.reader("train"), transform, 10)
    ahead = sets.ahead("train", WINDOW)
    batches = iter(ResumableLoader(source, BATCH, train=True, seed=0, window=WINDOW, num_workers=workers, ahead=ahead))
    next(batches)  # its time includes the start of the workers
    start, count = time.perf_counter(), 0
    for batch in batches:
        count += len(batch["label"])
    return count / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
