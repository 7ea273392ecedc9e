"""Images and captions as users have them: odd files, names, pixels and encodings; broken ones counted once."""

from __future__ import annotations

import csv
import gzip
import html
import io
import json
import logging
import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sana
from mhla_tasks.captioned.text import read_prompts
from mhla_tasks.classification import ImageNetShards
from mhla_tasks.commandline import registry
from mhla_tasks.commandline.parser import main
from mhla_tasks.text_to_image.data import CaptionedImageShards, ImageLatentShards
from PIL import Image

from lightning_mhla.data import BrokenSampleError
from lightning_mhla.data.captioned import FolderFiles, caption_members, parse_captions
from lightning_mhla.data.images import EXTENSIONS, LabelledFolder, decode_image
from lightning_mhla.data.loader import Progress

ROOT = Path(__file__).parents[2]
SMALL = [
    "--data.image_size=16", "--data.batch_size=4",
    "--data.augment.color_jitter=0", "--model.shape.dim=8", "--model.shape.depth=1",
    "--model.shape.heads=1", "--model.attention.block_grid=[2,2]", "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
]  # fmt: skip


def png(image: Image.Image, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG", **options)
    return stream.getvalue()


def save(folder: Path, names: list[str], value: int = 90) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(png(Image.new("RGB", (20, 20), (value, 0, 0))))


# --- broken samples are counted and reported once


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_images_are_counted_and_reported_once_a_run(
    workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two broken images of eighteen, two allowed, six epochs."""
    for label in "ab":
        save(tmp_path / "data" / label, [f"{number}.png" for number in range(9)])
    for label in "ab":
        broken = tmp_path / "data" / label / "3.png"
        broken.write_bytes(broken.read_bytes()[:60])
    save(tmp_path / "val/a", ["0.png"])
    save(tmp_path / "val/b", ["0.png"])
    command = ["fit", f"--config={ROOT}/configs/classification/folder.yaml", *SMALL, "--trainer.max_epochs=6",
               f"--data.num_workers={workers}", f"--data.train={tmp_path / 'data'}",
               f"--data.val={tmp_path / 'val'}"]  # fmt: skip
    caplog.set_level(logging.WARNING)
    main([*command, f"--run_dir={tmp_path / 'run'}", "--data.shards.max_skipped=2"])
    said = [record.getMessage() for record in caplog.records if "skipped a broken sample" in record.getMessage()]
    assert sorted(Path(line.split(": ")[1]).parent.name for line in said) == ["a", "b"]
    (skipped,) = json.loads((tmp_path / "run/run.json").read_text())["skipped"]
    first = said[0].removeprefix("skipped a broken sample: ")
    assert skipped == f"2 broken training samples, such as {first}."
    assert html.escape(skipped) in (tmp_path / "run/report.html").read_text()
    with pytest.raises(SystemExit, match="2 training samples are broken, more than max_skipped=1"):
        main([*command, f"--run_dir={tmp_path / 'strict'}", "--data.shards.max_skipped=1"])


# --- which files are samples


HIDDEN = (".ipynb_checkpoints/x.png", ".git/x.png", "__MACOSX/x.png", ".cache/x.png", "__pycache__/x.png")


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_folders_are_no_classes(name: str, tmp_path: Path) -> None:
    save(tmp_path / "a", ["0.png"])
    save(tmp_path / Path(name).parent, ["x.png"])
    save(tmp_path / "a" / Path(name).parent, ["x.png"])
    folder = LabelledFolder(tmp_path)
    assert folder.classes == ["a"]
    assert len(folder) == 1


def test_hidden_files_are_no_samples_and_links_are_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "elsewhere", ["far.png"])
    save(tmp_path / "data/a", ["0.png", "._0.png", ".hidden.jpg", "b.PNG"])
    (tmp_path / "data/a/Thumbs.db").write_bytes(b"x")
    (tmp_path / "data/a/picture.tiff").write_bytes(b"x")
    (tmp_path / "data/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/a/one.png").symlink_to(tmp_path / "elsewhere/far.png")
    (tmp_path / "data/a/loop").symlink_to(tmp_path / "data/a")
    (tmp_path / "data/a/dead.png").symlink_to(tmp_path / "nowhere")
    folder = LabelledFolder(tmp_path / "data")
    assert folder.classes == ["a", "linked"]
    assert [path.name for path, _ in folder.labelled] == ["0.png", "b.PNG", "one.png", "far.png"]
    assert "1 files are not JPEG, PNG or WebP and are left out, such as" in caplog.text
    assert "picture.tiff" in caplog.text
    assert "broken link" in caplog.text
    assert "link to a folder above it" in caplog.text


NAMES = [b"caf\xe9.png", "日本.png".encode(), b"line\nfeed.png", b'comma,"quote.png', b" space .png", b"a'b.png"]


def test_names_of_any_encoding_survive(tmp_path: Path) -> None:
    for label in ("a", os.fsdecode(b"\xe9t\xe9")):
        save(tmp_path / "data" / label, [f"{number}.png" for number in range(4)])
    for name in NAMES:
        save(tmp_path / "new", [os.fsdecode(name)])
    command = ["fit", f"--config={ROOT}/configs/classification/folder.yaml", *SMALL, "--trainer.max_epochs=1", "--data.num_workers=0",
               f"--data.train={tmp_path / 'data'}", f"--data.val={tmp_path / 'data'}",
               f"--run_dir={tmp_path / 'run'}"]  # fmt: skip
    main(command)
    main(["predict", f"--run_dir={tmp_path / 'run'}", f"--data.predict_dir={tmp_path / 'new'}"])
    rows = list(csv.DictReader((tmp_path / "run/predict/predictions.csv").open(encoding="utf-8", newline="")))
    assert len(rows) == len(NAMES)
    names = {Path(row["path"]).name for row in rows}
    assert {"日本.png", r"caf\xe9.png", r"line\nfeed.png", 'comma,"quote.png', " space .png"} <= names
    assert {row["predicted"] for row in rows} <= {"a", r"\xe9t\xe9"}
    registry.run("export", [str(tmp_path / "run"), str(tmp_path / "exported")])
    assert (tmp_path / "exported/classes.txt").read_text().splitlines() == ["a", r"\xe9t\xe9"]
    registry.run("prepare images", [str(tmp_path / "data"), str(tmp_path / "shards")])
    data = ImageNetShards(str(tmp_path / "shards"), str(tmp_path / "shards"), image_size=16, num_workers=0)
    assert data.class_names == ["a", r"\xe9t\xe9"]
    save(tmp_path / "flat", [os.fsdecode(name) for name in NAMES])
    for path in list((tmp_path / "flat").iterdir()):
        path.with_suffix(".txt").write_text("a caption")
    registry.run("prepare captions", [str(tmp_path / "flat"), str(tmp_path / "captions")])


# --- pixels as a viewer shows them


def grey16(maximum: int) -> Image.Image:
    return Image.fromarray(np.linspace(0, maximum, 256 * 4).reshape(4, 256).astype(np.uint16))


def rgba(alpha: int) -> Image.Image:
    return Image.new("RGBA", (8, 8), (0, 0, 0, alpha))


PALETTE = Image.new("P", (8, 8), 0)
PALETTE.putpalette([10, 20, 30] * 256)


@pytest.mark.parametrize(
    ("data", "low", "high"),
    [
        (png(grey16(65535)), 0, 255), (png(grey16(32767)), 0, 127), (png(rgba(0)), 255, 255), (png(rgba(255)), 0, 0),
        (png(rgba(128)), 127, 127), (png(Image.new("LA", (8, 8), (0, 0))), 255, 255),
        (png(PALETTE, transparency=0), 255, 255), (png(PALETTE), 10, 30), (png(Image.new("1", (8, 8), 1)), 255, 255),
        (png(Image.new("RGB", (8, 8)), transparency=(0, 0, 0)), 255, 255),
        (png(grey16(0), transparency=0), 255, 255), (png(grey16(0), transparency=1), 0, 0),
    ],
    ids=["grey 16", "dark grey 16", "clear", "opaque", "half", "grey clear", "palette clear", "palette", "bits", "key", "grey 16 key", "shade of a key"],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_range_and_transparency(data: bytes, low: int, high: int, mode: str) -> None:
    pixels = np.asarray(decode_image(data, "image", mode))
    if mode == "L" and low != high and high == 30:
        low = high = 18  # the luma of the three
    assert pixels.min() == low
    assert pixels.max() == high
    assert pixels.dtype == np.uint8


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_orientation_as_exif_says(orientation: int, kind: str, tmp_path: Path) -> None:
    """The red corner of the stored image is shown at the top left, whatever the orientation."""
    upright = np.zeros((48, 32, 3), np.uint8)
    upright[:16, :16, 0] = 255
    turned = {1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1], 5: upright.transpose(1, 0, 2),
              6: np.rot90(upright, 1), 7: np.rot90(upright, 1)[:, ::-1], 8: np.rot90(upright, -1)}  # fmt: skip
    stored = turned[orientation]
    if orientation == 7:
        stored = upright[::-1, ::-1].transpose(1, 0, 2)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(stored)).save(stream, kind, exif=exif, quality=95)
    shown = np.asarray(decode_image(stream.getvalue(), "image"))
    assert shown.shape == (48, 32, 3)
    assert shown[4, 4, 0] > 200
    assert shown[-4, -4, 0] < 60
    assert shown[4, -4, 0] < 60
    (tmp_path / f"a.{kind.lower()}").write_bytes(stream.getvalue())
    (tmp_path / "a.txt").write_text("red corner")
    data = CaptionedImageShards(str(tmp_path), str(tmp_path), buckets=["32x48", "48x32"], batch_size=1, num_workers=0)
    image = data.source("validate")[0]["image"]
    assert image.shape == (3, 48, 32), "a bucket as upright as the image"
    assert image[0, 4, 4] > 0.5


@pytest.mark.parametrize(
    ("size", "fits"), [((12_000, 9_000), True), ((650, 10), True), ((257, 1), False), ((1, 256), True)]
)
def test_limits_of_sizes(size: tuple[int, int], fits: bool) -> None:
    data = png(Image.new("1", size))
    if fits:
        assert decode_image(data, "image").size == size
    else:
        with pytest.raises(BrokenSampleError, match=r"image of 257 x 1 pixels is too large or too narrow \(at most"):
            decode_image(data, "image")


# --- captions


WORDS = ("red", "green", "blue", "yellow")


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """Write four images with one to four captions in ``metadata.jsonl``."""
    folder = tmp_path / "pictures"
    save(folder, [f"{number}.png" for number in range(4)])
    rows = [
        {"file_name": f"{image}.png", "caption": f"{WORDS[text]} {image}"}
        for text in range(4)
        for image in range(text, 4)
    ]
    (folder / "metadata.jsonl").write_text("\ufeff" + "".join(f"{json.dumps(row)}\r\n" for row in rows), "utf-8")
    return folder


def drawn(data: Any, epochs: int) -> list[list[str]]:
    """Return the captions of each epoch."""
    found = []
    for epoch in range(epochs):
        loader = data.train_dataloader()
        loader.progress = partial(Progress, epoch)
        found.append(sorted(text for batch in loader for text in batch["caption"]))
    return found


def test_several_captions_are_all_drawn(several: Path, tmp_path: Path) -> None:
    registry.run("prepare captions", [str(several), str(tmp_path / "shards")])
    options: dict[str, Any] = {"height": 16, "width": 16, "batch_size": 4, "num_workers": 0, "seed": 1}
    epochs = [
        drawn(CaptionedImageShards(str(place), str(place), **options), 40) for place in (several, tmp_path / "shards")
    ]
    for found in epochs:
        counts = Counter(text for epoch in found for text in epoch)
        assert set(counts) == {f"{WORDS[text]} {image}" for image in range(4) for text in range(image + 1)}
        assert all(len(epoch) == 4 for epoch in found)
    again = drawn(CaptionedImageShards(str(several), str(several), **options), 40)
    assert again == epochs[0], "the seed decides"
    validated = CaptionedImageShards(str(several), str(several), **options).val_dataloader()
    first, second = ([text for batch in validated for text in batch["caption"]] for _ in range(2))
    assert first == second


def test_several_captions_are_all_encoded(several: Path, tmp_path: Path) -> None:
    pipeline = sana.save_pipeline(tmp_path / "sana")
    words = [str(several), str(tmp_path / "latents"), "--model", str(pipeline), "--height", "32", "--width", "32"]
    registry.run("prepare caption-latents", [*words, "--text_length", "8", "--device", "cpu", "--instruction", ""])
    source = ImageLatentShards(
        str(tmp_path / "latents"), str(tmp_path / "latents"), batch_size=1, num_workers=0
    ).source("train")
    counts = sorted(len({source[index]["text"].numpy().tobytes() for _ in range(60)}) for index in range(4))
    assert counts == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("data", "caption"),
    [
        ("\ufeffa cat".encode(), "a cat"), ("a cat".encode("utf-16"), "a cat"), ("a\u2028cat\u0085".encode(), "a\u2028cat"),
        (b"a cat\r\n", "a cat"), ("un café".encode(), "un café"),
    ],
    ids=["bom", "utf-16", "u2028", "crlf", "accent"],
)  # fmt: skip
def test_captions_of_other_editors(data: bytes, caption: str, tmp_path: Path) -> None:
    assert parse_captions(data, "txt", "caption", "x") == [caption]
    save(tmp_path, ["a.png"])
    (tmp_path / "a.txt").write_bytes(data)
    assert FolderFiles(tmp_path, EXTENSIONS, "caption").captions(0) == [caption]


@pytest.mark.parametrize(
    ("data", "extension", "message"),
    [
        ("café".encode("latin-1"), "txt", r"x: \.txt is not text in UTF-8: 0xe9, byte 3 in line 1"),
        (b"\x89PNG\r\n\x1a\n\0\0", "txt", r"x: \.txt"), (b'{"caption": ["a", ""]}', "json", "holds an empty caption"),
        (b'{"caption": ["a", 3]}', "json", "holds a caption that is not text: '3'"),
        (b'{"caption": "\\ud83d"}', "json", "holds a caption that is not text"), (b"[]", "json", "holds an empty caption"),
    ],
)  # fmt: skip
def test_captions_that_cannot_be_read(data: bytes, extension: str, message: str) -> None:
    with pytest.raises(BrokenSampleError, match=message):
        parse_captions(data, extension, "caption", "x")


@pytest.mark.parametrize("caption", ["a cat", "a\0cat", "\ufeffa cat", "%PDF-1.7 on a screen", "BZh in café"])
def test_a_packed_caption_is_read_as_it_was(caption: str) -> None:
    [(extension, data)] = caption_members([caption]).items()
    assert parse_captions(data, extension, "caption", "x") == [caption]
    assert extension == ("txt" if caption == "a cat" else "json")


@pytest.mark.parametrize(
    ("name", "data", "found"),
    [
        ("p.txt", "\ufeffa cat\n".encode(), ["a cat"]), ("p.txt", "a cat\u2028with a hat\n".encode(), ["a cat\u2028with a hat"]),
        ("p.txt", "x\ta\x0ccat\n\n".encode("utf-16"), ["a\x0ccat"]), ("p.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\r\n', ["a"]),
        ("p.json", b'{"one": {"prompt": "a\\u2028"}}', ["a"]),
    ],
    ids=["bom", "u2028", "utf-16 and form feed", "jsonl", "json"],
)  # fmt: skip
def test_prompts_of_other_editors(name: str, data: bytes, found: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    assert [prompt for _, prompt in read_prompts(tmp_path / name)] == found


@pytest.mark.parametrize(
    ("line", "pair"),
    [
        ("empty\t", ("empty", "")), ("empty\t \t ", ("empty", "")), (" empty \t\r", ("empty", "")), ("a cat", ("a cat", "a cat")),
        ("  a cat ", ("a cat", "a cat")), ("\ta cat", ("a cat", "a cat")), (" cat \t a\tcat ", ("cat", "a\tcat")),
    ],
)  # fmt: skip
def test_a_name_and_a_tab_stand_for_the_empty_prompt(line: str, pair: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(f"first\n{line}\nlast\tone\n".encode())
    assert read_prompts(tmp_path / "p.txt") == [("first", "first"), pair, ("last", "one")]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n{"text": "b"}\n', r"p\.jsonl: line 2 has no 'prompt'"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": \n', r"p\.jsonl: line 2 is not JSON"),
        ("p.txt", "a\ncafé\n".encode("latin-1"), r"p\.txt is not text in UTF-8: 0xe9, byte 5 in line 2"),
        ("p.json", b'{"one": "a"}', r"p\.json: 'one' is not a JSON object with a prompt"),
        ("p.csv", b"prompt\na cat\n", r"p\.csv is a table, which is not read"),
    ],
)
def test_prompts_that_cannot_be_read(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / name)


def test_captions_that_would_be_dropped_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, ["a.png", "b.png"])
    (tmp_path / "metadata.csv").write_text("file_name,caption\na.png,x\n")
    with pytest.raises(ValueError, match=r"metadata\.csv is not read; write its rows to metadata\.jsonl"):
        FolderFiles(tmp_path, EXTENSIONS, "caption")
    (tmp_path / "metadata.csv").unlink()
    (tmp_path / "metadata.jsonl").write_text(
        '{"file_name": "a.png", "caption": "x"}\n{"file_name": "c.png", "caption": "y"}\n'
    )
    for name in ("a", "b", "d"):
        (tmp_path / f"{name}.txt").write_text("beside")
    files = FolderFiles(tmp_path, EXTENSIONS, "caption")
    assert [files.captions(index) for index in range(2)] == [["x"], ["beside"]]
    assert "2 captions without a file of the same name, such as" in caplog.text
    assert "1 caption left out, such as a.txt, since metadata.jsonl has captions of the same files" in caplog.text


@pytest.mark.parametrize(("image", "caption"), [("UP.PNG", "UP.TXT"), ("a.png", "a.Txt"), ("b.PNG", "b.JSON")])
def test_extensions_of_captions_in_upper_case(
    image: str, caption: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, [image])
    (tmp_path / caption).write_text(json.dumps({"caption": "a cat"}) if "json" in caption.lower() else "a cat\n")
    files = FolderFiles(tmp_path, EXTENSIONS, "caption")
    assert files.captions(0) == ["a cat"]
    assert [path.name for path in files.origins()[0].files] == [image, caption]
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": image, "caption": "x"}))
    assert FolderFiles(tmp_path, EXTENSIONS, "caption").captions(0) == ["x"]
    assert ("1 caption left out" in caplog.text) == (caption.lower().endswith(".txt"))


@pytest.mark.parametrize("name", ["P.JSONL", "p.jsonl.gz", "P.JSON", "p.json.gz"])
def test_extensions_of_prompts(name: str, tmp_path: Path) -> None:
    entry = {"prompt": "a cat"}
    data = json.dumps(entry if "jsonl" in name.lower() else {"one": entry}).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert [prompt for _, prompt in read_prompts(tmp_path / name)] == ["a cat"]


def test_reference_statistics_that_are_a_bomb_are_one_line(tmp_path: Path) -> None:
    save(tmp_path, ["a.png", "b.png"])
    np.savez_compressed(tmp_path / "statistics.npz", mu=np.zeros(1 << 25), sigma=np.eye(2))
    with pytest.raises(
        SystemExit, match=r"statistics\.npz is not an \.npz that can be read safely \(mu has 268435584 bytes"
    ):
        registry.run("score", [str(tmp_path), str(tmp_path / "statistics.npz"), "--features", "random"])


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_a_score_of_images_of_different_sizes_is_an_error(batch_size: int, tmp_path: Path) -> None:
    for number, side in enumerate((16, 16, 16, 24, 16, 16)):
        Image.new("RGB", (side, side), (40 * number, 0, 0)).save(tmp_path / f"{number}.png")
    words = [str(tmp_path), str(tmp_path), "--features", "random", "--batch_size", str(batch_size)]
    with pytest.raises(SystemExit, match=r"images of different sizes, 0\.png of 16 x 16 and 3\.png of 24 x 24"):
        registry.run("score", words)
