"""Training on ten times the data that the disk may hold, from a server that drops connections, killed five times."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fork_server import ForkServer
from http_server import served
from PIL import Image

from lightning_mhla.checkpoints.io import resolve_checkpoint
from lightning_mhla.data import write_shards

ROOT = Path(__file__).parents[2]
SHARDS, EACH = 40, 10


def members(index: int) -> dict[str, Any]:
    stream = io.BytesIO()
    pixels = np.random.default_rng(index).integers(0, 255, (48, 48, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, "PNG")
    broken = index in (33, 250)  # skipped as from local files
    return {"png": stream.getvalue()[: 500 if broken else None], "txt": f"a {('red', 'blue')[index % 2]} square"}


def fit(where: str, *more: str) -> tuple[str, ...]:
    model = ["transformer.num_layers=1", "attention.kind=linear"]
    data = [
        f"train={where}",
        f"val={where}",
        "height=16",
        "width=16",
        "batch_size=8",
        "num_workers=1",
        "shards.shuffle_window=2",
    ]
    trainer = [
        "max_steps=50",
        "val_check_interval=50",
        "limit_val_batches=2",
        "enable_progress_bar=false",
        "log_every_n_steps=1",
    ]
    keep = "{class_path: ModelCheckpoint, init_args: {save_last: true, every_n_train_steps: 4, filename: kept}}"
    return (
        "fit", f"--config={ROOT}/configs/text_to_image/digits_pretrain.yaml", "--run_dir=run",
        *(f"--model.{option}" for option in model), "--data=mhla_tasks.text_to_image.CaptionedImageShards",
        *(f"--data.{option}" for option in [*data, *more]), *(f"--trainer.{option}" for option in trainer),
        f"--trainer.callbacks=[{keep}]",
    )  # fmt: skip


def state(run: Path) -> dict[str, Any]:
    return dict(torch.load(resolve_checkpoint(run), map_location="cpu", weights_only=True))


@pytest.mark.timeout(600)
def test_killed_five_times_it_ends_with_the_weights_of_an_undisturbed_run_from_local_files(
    server: ForkServer, cache_home: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "remote"
    write_shards(range(SHARDS * EACH), members, folder, "train", per_shard=EACH)
    limit = sum(path.stat().st_size for path in folder.glob("*.tar")) // 10
    cache = {"XDG_CACHE_HOME": str(cache_home)}
    (tmp_path / "local").mkdir()
    status, text = server.run(*fit(str(folder)), folder=tmp_path / "local", **cache)
    assert status == 0, text[-4000:]
    with served(folder, drop_every=20) as http:
        where = f"{http.url}/train-{{0000..{SHARDS - 1:04d}}}.tar"
        words = fit(where, f"shards.cache_bytes={limit}", f"shards.cache_dir={tmp_path / 'cache'}")
        for step in (6, 15, 23, 34, 45):
            status, text = server.run(*words, folder=tmp_path, kill_at=step, **cache)
            assert status == -9, text[-4000:]
        status, text = server.run(*words, folder=tmp_path, **cache)
        assert status == 0, text[-4000:]
        assert "Restored all states" in text
    status, text = server.run(*words, "--trainer.max_steps=60", folder=tmp_path, **cache)  # the server is gone
    lines = [line for line in text.splitlines() if line.startswith("error:")]
    expected, found = state(tmp_path / "local/run"), state(tmp_path / "run")
    assert expected["global_step"] == found["global_step"] == 50
    for key, value in expected["state_dict"].items():
        assert torch.equal(value, found["state_dict"][key]), key
    kept = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert 0 < kept <= limit
    assert status == 1
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {http.url}/train-")
    assert "cannot be read after 4 attempts" in lines[0]
