"""Scenes of digits with captions, the program that scores them, captioned images from files, and rejected options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mhla_tasks.captioned.text import TextConfig, make_encoder
from mhla_tasks.commandline import registry
from mhla_tasks.text_to_image import CaptionedImageShards, DigitScenes, ImageLatentShards, SceneScores, TextToImage
from mhla_tasks.text_to_image.judge import check_scene, parse_caption, score_scenes
from mhla_tasks.text_to_image.scenes import COLOURS, Scene, SceneSamples, every_caption, render
from mhla_tasks.text_to_image.sources import to_size
from PIL import Image
from sana import SHAPE, save_pictures, save_pipeline

from lightning_mhla.data import BrokenSampleError
from lightning_mhla.generative.images import to_pixels

SCENES = SceneSamples(False)


def picture(index: int) -> tuple[torch.Tensor, str]:
    sample = SCENES[index]
    return to_pixels(sample["image"]), sample["caption"]


def test_scenes_are_functions_of_their_index() -> None:
    train = SceneSamples(True)
    assert (len(train), len(SCENES)) == (20_000, 400)
    for source in (train, SCENES):
        assert torch.equal(source[7]["image"], source[7]["image"])
        assert source[7]["image"].shape == (3, 32, 32)
        assert -1 == source[7]["image"].min() < source[7]["image"].max() <= 1
    assert not torch.equal(train[7]["image"], SCENES[7]["image"])
    kinds = [parse_caption(train[index]["caption"]) for index in range(400)]
    shares = [sum(scene.relation is not None for scene in kinds), sum(scene.count == 1 for scene in kinds)]
    assert all(130 < share < 190 for share in shares), shares


def test_captions_say_what_is_shown() -> None:
    captions = every_caption()
    assert len(set(captions)) == 60
    assert [parse_caption(caption).caption for caption in captions] == captions
    assert parse_caption("three blue sixes") == Scene(((6, "blue"),), 3)
    assert parse_caption("a red three left of a green seven") == Scene(((3, "red"), (7, "green")), 2, "left of")
    with pytest.raises(ValueError, match="has two digits of the same color"):
        parse_caption("a red three left of a red seven")
    with pytest.raises(ValueError, match="is not a caption of a scene of digits"):
        SceneScores(["a photo of a cat"])


@pytest.mark.parametrize("colour", COLOURS)
def test_digits_have_their_color_and_stay_near_their_place(colour: str) -> None:
    """Digits without gaps: a single one up to 3 pixels from the center, and each of three in a quarter of its own."""
    random = np.random.default_rng(0)
    single, several = Scene(((8, colour),)), Scene(((8, colour),), 3)
    edges: set[tuple[int, ...]] = set()
    for _ in range(120):
        image = render(single, [torch.ones(1, 28, 28)], random)
        shown = image.amax(0) > -1
        torch.testing.assert_close(image[:, shown].amax(1), torch.tensor(COLOURS[colour]) * 2 - 1)
        assert image.max() == pytest.approx(1), "the brightest channel of a color is fully used"
        rows, columns = (shown.any(axis).nonzero()[:, 0] for axis in (1, 0))
        assert len(rows) == len(columns) == 20
        edges.add((int(rows[0]), int(columns[0])))
    for axis in (0, 1):
        assert {edge[axis] for edge in edges} == set(range(3, 10))
    for _ in range(20):
        shown = render(several, [torch.ones(1, 28, 28)] * 3, random).amax(0) > -1
        quarters = [int(part.sum()) for half in shown.chunk(2) for part in half.chunk(2, 1)]
        assert sorted(quarters) == [0, 14 * 14, 14 * 14, 14 * 14]


def test_the_program_sees_what_real_scenes_show() -> None:
    pictures, captions = zip(*(picture(index) for index in range(200)), strict=True)
    right = score_scenes(torch.stack(pictures), captions)
    assert right["all"] > 0.8
    assert min(right["colour"], right["count"], right["relation"]) > 0.93
    wrong = score_scenes(torch.stack(pictures), [*captions[1:], captions[0]])
    assert wrong["all"] < 0.02


def test_each_check_notices_its_own_mistake() -> None:
    shown = [picture(index) for index in range(100)]
    pixels, caption = next(
        (pixels, caption)
        for pixels, caption in shown
        if parse_caption(caption).relation == "left of" and all(check_scene(pixels, caption).values())
    )
    scene = parse_caption(caption)
    (first, red), (second, green) = scene.digits

    def said(*digits: tuple[int, str], relation: str | None = "left of") -> set[str]:
        checks = check_scene(pixels, Scene(digits, len(digits), relation).caption)
        return {name for name, passed in checks.items() if not passed}

    assert said((first, red), (second, green)) == set()
    assert said((first, red), ((second + 1) % 10, green)) == {"digit"}
    assert said((second, green), (first, red)) == {"relation"}
    assert said((first, red), (second, green), relation="above") == {"relation"}
    assert said((first, red), relation=None) == {"digit", "colour", "count"}
    assert not any(check_scene(torch.zeros(3, 32, 32, dtype=torch.uint8), caption).values())


def test_captions_tell_the_order_of_their_words() -> None:
    one, other = "a red three left of a green seven", "a green three left of a red seven"
    for carry, told in ((0.0, False), (0.5, True)):
        encoder = make_encoder(TextConfig(length=8, carry=carry), 32)
        sums = [encoder.encode([text], torch.device("cpu")).sort(1).values for text in (one, other)]
        assert torch.equal(*sums) != told
    words = make_encoder(TextConfig(length=2), 32).encode(["red three"], torch.device("cpu"))[0]
    carried = make_encoder(TextConfig(length=2, carry=0.5), 32).encode(["red three"], torch.device("cpu"))[0]
    torch.testing.assert_close(carried, torch.stack([words[0], words[1] + 0.5 * words[0]]))
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        TextConfig(carry=1.0)
    with pytest.raises(ValueError, match="captions without an encoder"):
        TextConfig("gemma", carry=0.5)


@pytest.mark.parametrize("suffix", ["txt", "json", "jsonl"])
def test_captions_beside_images(suffix: str, tmp_path: Path) -> None:
    folder = save_pictures(tmp_path / "pictures", captions=suffix == "txt")
    if suffix == "json":
        for number in range(6):
            (folder / f"{number}.json").write_text(json.dumps({"said": f"picture {number}"}))
    if suffix == "jsonl":
        lines = [json.dumps({"file_name": f"{number}.png", "said": f"picture {number}"}) for number in range(6)]
        (folder / "metadata.jsonl").write_text("\n".join(lines))
    data = CaptionedImageShards(str(folder), str(folder), 16, 24, caption_key="said", batch_size=2, num_workers=0)
    sample = data.source("validate")[3]
    assert sample["caption"] == ("a red seven" if suffix == "txt" else "picture 3")
    expected = to_size(16, 24)(Image.open(folder / "3.png").convert("RGB"))
    assert torch.equal(sample["image"], expected)
    assert expected.shape == (3, 16, 24)
    assert registry.run("prepare captions", [str(folder), str(tmp_path / "out"), "--caption-key", "said"]) is None
    packed = CaptionedImageShards(str(tmp_path / "out"), str(tmp_path / "out"), 16, 24, batch_size=2, num_workers=0)
    captions = {packed.source("train")[index]["caption"] for index in range(6)}
    assert len(captions) == (2 if suffix == "txt" else 6)
    assert sample["caption"] in captions


def test_what_is_wrong_with_captioned_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_pictures(tmp_path / "pictures")
    (folder / "0.txt").unlink()
    (folder / "1.txt").write_text(" \n")
    (folder / "2.png").write_bytes(b"no image")
    (folder / "9.txt").write_text("a caption without image")
    source = CaptionedImageShards(str(folder), str(folder), 16, 16).source("train")
    for index, message in (
        (0, r"0\.png has no \.txt or \.json beside it"),
        (1, r"1\.png: \.txt holds an empty caption"),
        (2, r"2\.png: the image cannot be decoded"),
    ):
        with pytest.raises(BrokenSampleError, match=message):
            source[index]
    assert len(source) == 6
    assert "1 caption without a file of the same name, such as 9.txt" in caplog.text
    with pytest.raises(SystemExit, match="broken samples: 3, more than --max_skipped 2"):
        registry.run("prepare captions", [str(folder), str(tmp_path / "none"), "--max_skipped", "2"])
    assert registry.run("prepare captions", [str(folder), str(tmp_path / "out"), "--max_skipped", "3"]) is None
    assert caplog.text.count("skipped: ") >= 3
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"is not a folder with \.jpg or"):
        CaptionedImageShards(str(tmp_path / "empty"), str(folder)).source("train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vae": "nowhere"}, "vae nowhere is neither a folder nor a model on the hub"),
        (
            {"text": {"encoder": "nowhere", "length": 4}, "sampling": {"height": 8}},
            "text.encoder nowhere is not a folder or hub name",
        ),
        ({"sampling": {"height": 30, "width": 32}}, "images of 4 channels are latents; name the autoencoder"),
        (
            {"vae": "own", "sampling": {"height": 31, "width": 32}},
            "the autoencoder requires multiples of 2, such as 32 x 32",
        ),
    ],
)
def test_what_cannot_be_drawn(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    if options.get("vae") == "own":
        options = {**options, "vae": str(save_pipeline(tmp_path / "sana"))}
    channels = 3 if "text" in options else 4
    shape = {**SHAPE, "in_channels": channels, "out_channels": channels}
    module = TextToImage({"kind": "linear"}, shape, **{"text": {"length": 4}, **options})  # type: ignore[arg-type]
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        module.check_drawable()


def test_wrong_latents_are_a_short_error(tmp_path: Path) -> None:
    folder = save_pictures(tmp_path / "pictures")
    registry.run("prepare captions", [str(folder), str(tmp_path / "out")])
    data = ImageLatentShards(str(tmp_path / "out"), str(tmp_path / "out"))
    with pytest.raises(ValueError, match="these are not shards of lightning prepare caption-latents"):
        data.source("train")


def test_prompts_of_the_scenes_are_predicted() -> None:
    batch = next(iter(DigitScenes(batch_size=3).predict_dataloader()))
    assert batch["file"][0] == f"{every_caption()[0]}-0.png"
