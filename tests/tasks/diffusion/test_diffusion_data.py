"""Encoding into latent shards, reading them, images encoded on the fly, and what is wrong with either."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from lightning import Trainer
from mhla_tasks.classification.prepare import images_to_shards
from mhla_tasks.commandline import registry
from mhla_tasks.diffusion import ClassToImage, DigitImages, DiTShape, ImageShards, LatentShards
from mhla_tasks.diffusion.data import RequestedClasses, SampleRequest
from mhla_tasks.diffusion.sampling import DiTSamplingConfig
from mhla_tasks.diffusion.sources import SignedImage
from PIL import Image
from tiny import save_vae
from torch import Tensor

from lightning_mhla import AttentionConfig
from lightning_mhla.data import BrokenSampleError, ShardReader
from lightning_mhla.data.pack import Packing
from lightning_mhla.generative.codecs import LatentCodec
from lightning_mhla.training.optim import OptimizerConfig
from lightning_mhla.training.options import TrainingOptions

SHAPE = DiTShape(dim=16, depth=1, heads=2)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of ten photos in two classes, a VAE, and their latents in shards of four."""
    folder = tmp_path_factory.mktemp("latents")
    generator = np.random.default_rng(0)
    for number in range(10):
        path = folder / "photos" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (40, 32, 3), dtype=np.uint8)).save(path)
    save_vae(folder / "vae")
    encode(folder)
    return folder


def encode(folder: Path, *options: str, rank: int = 0, world: int = 1) -> None:
    """Run ``lightning prepare latents`` as torchrun would start it."""
    command = [str(folder / "photos"), str(folder / "latents"), "--vae", str(folder / "vae")]
    command += ["--image_size", "16", "--per_shard", "4", "--device", "cpu", *options]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank}.items():
            patch.setenv(name, str(value))
        registry.run("prepare latents", command)


def data(place: Path, **options: object) -> LatentShards:
    settings: dict[str, object] = {"sample_size": 8, "num_classes": 2, "batch_size": 2, "num_workers": 0, **options}
    return LatentShards(str(place / "latents"), str(place / "latents"), **settings)  # type: ignore[arg-type]


def photo_of(number: int) -> int:
    """Return the number of the photo in sample ``number`` of the shards, which shuffle the photos of a folder."""
    return [*range(0, 10, 2), *range(1, 10, 2)][np.random.default_rng(0).permutation(10)[number]]


def moments_of(place: Path, number: int, mirrored: bool) -> Tensor:
    """Compute means and deviations of latents with diffusers alone."""
    vae = AutoencoderKL.from_pretrained(place / "vae").eval()
    photo = photo_of(number)
    image = SignedImage(16)(Image.open(place / "photos" / f"class{photo % 2}" / f"{photo}.png"))
    with torch.no_grad():
        posterior = vae.encode((image.flip(-1) if mirrored else image)[None]).latent_dist
    return torch.cat([posterior.mean, posterior.std], 1)[0]


def test_shards_hold_the_latents_of_images_and_mirror_images(place: Path) -> None:
    source = data(place).source("train")
    assert len(source) == 10
    assert sorted(path.name for path in (place / "latents").glob("*.tar")) == [f"train-0000{i}.tar" for i in range(3)]
    for mirrored, member in ((False, "latent.npy"), (True, "flip.npy")):
        stored = torch.from_numpy(source._moments(7, member)).float()  # type: ignore[attr-defined]
        torch.testing.assert_close(stored, moments_of(place, 7, mirrored), rtol=2e-3, atol=2e-3)
    labels = [source[i]["label"] for i in range(10)]
    assert labels == [photo_of(i) % 2 for i in range(10)] != sorted(labels)


def test_latents_are_drawn_anew_and_flipped_as_asked(place: Path) -> None:
    scale = 0.18215
    mean, deviation = moments_of(place, 3, False).chunk(2)
    source = data(place, flip=0.0).source("train")
    drawn = torch.stack([source[3]["latent"] for _ in range(400)])
    torch.testing.assert_close(drawn.mean(0), mean * scale, rtol=0, atol=0.2 * float(deviation.max()) * scale)
    torch.testing.assert_close(drawn.std(0).mean(), deviation.mean() * scale, rtol=0.05, atol=0)
    torch.manual_seed(0)
    flipped = moments_of(place, 3, True)[:4] * scale
    both = data(place, flip=0.5).source("train")
    nearer = [
        float((latent - flipped).square().sum()) < float((latent - mean * scale).square().sum())
        for latent in (both[3]["latent"] for _ in range(100))
    ]
    assert 30 < sum(nearer) < 70
    assert data(place).source("validate").flip == 0  # type: ignore[attr-defined]


def test_encoding_goes_on_after_a_stop_and_is_shared_by_processes(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("photos", "vae"):
        (tmp_path / name).symlink_to(place / name)
    whole = {path.name: path.read_bytes() for path in (place / "latents").glob("*.tar")}
    encode(tmp_path, rank=1, world=2)
    assert [path.name for path in (tmp_path / "latents").glob("*.tar")] == ["train-00001.tar"]
    assert "4 images in 3 shards, 1 of them by process 1 of 2: " in " ".join(capsys.readouterr().out.split())
    (tmp_path / "latents/train-00000.tar.part").write_bytes(b"stopped here")
    before = (tmp_path / "latents/train-00001.tar").stat().st_mtime_ns
    encode(tmp_path)
    assert "10 images in 3 shards: " in " ".join(capsys.readouterr().out.split())
    assert {path.name: path.read_bytes() for path in (tmp_path / "latents").glob("*.tar")} == whole
    assert (tmp_path / "latents/train-00001.tar").stat().st_mtime_ns == before, "written again"
    with pytest.raises(SystemExit, match=r"made from different files or options \(image_size was 16 and is 32"):
        encode(tmp_path, "--image-size", "32")


def test_new_shards_are_never_their_own_source(place: Path, tmp_path: Path) -> None:
    shards, options = tmp_path / "shards", ["--vae", str(place / "vae"), "--image_size", "16", "--device", "cpu"]
    registry.run("prepare images", [str(place / "photos"), str(shards), "--per_shard", "6"])
    (tmp_path / "link").symlink_to(shards)
    (contents,) = {tuple(path.read_bytes() for path in sorted(shards.glob("*.tar")))}
    for source, target, more in (
        (f"{shards}/*.tar", shards, []),  # the same names
        (f"{shards}/train-{{0000..0001}}.tar", tmp_path / "link", ["--force"]),  # which would delete them
        (f"{shards}", tmp_path / "link", ["--prefix", "latents"]),  # a second call would encode the first one's shards
    ):
        with pytest.raises(SystemExit, match=r"choose another folder|is the source, so that new shards in it"):
            registry.run("prepare latents", [source, str(target), *options, *more])
        assert tuple(path.read_bytes() for path in sorted(shards.glob("*.tar"))) == contents
    once = [f"{shards}/*.tar", str(shards), *options, "--prefix", "latents"]
    registry.run("prepare latents", once)
    with pytest.raises(
        SystemExit, match=r"latents-00000\.tar is a shard to read, and has the name of a shard to write"
    ):
        registry.run("prepare latents", once)
    registry.run("prepare latents", [f"{shards}/train-*.tar", *once[1:]])  # resumes: nothing is left to do
    finished = sorted(shards.iterdir())
    with pytest.raises(SystemExit, match="per_shard"):
        registry.run("prepare latents", [f"{shards}/train-*.tar", *once[1:], "--force", "--per_shard", "0"])
    assert sorted(shards.iterdir()) == finished, "deleted although an option was wrong"


@pytest.mark.parametrize("scale", ["0.5", "text", None, True, [0.5], 0, -0.5, math.inf, math.nan])
def test_a_scale_that_is_no_positive_number_is_told(scale: Any, place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "latents", tmp_path / "latents")
    manifest = tmp_path / "latents/train-manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "scale": scale}))
    with pytest.raises(ValueError, match=r"train-manifest\.json gives scale .*, which is not a positive number"):
        data(tmp_path).source("train")


def test_what_is_denoised_are_latents_as_they_come_or_images_encoded_on_the_fly(place: Path) -> None:
    latents = data(place).source("train")[0]["latent"]
    attention = AttentionConfig(block_grid=[2, 2])
    model = ClassToImage(attention, 2, 8, 4, shape=SHAPE, vae=str(place / "vae"))
    batch = {"latent": latents[None], "label": torch.tensor([0])}
    assert torch.equal(model._clean(batch), latents[None])
    assert torch.equal(model._clean({**batch, "image": torch.zeros(1, 3, 16, 16)}), latents[None])
    model.check_drawable()
    with pytest.raises(ValueError, match=r"the latents of VAE .*vae have 4 channels, and the model denoises 8"):
        ClassToImage(attention, 2, 8, 8, shape=SHAPE, vae=str(place / "vae")).check_drawable()
    images = SignedImage(16)(Image.open(place / "photos/class0/0.png"))[None]
    torch.manual_seed(0)
    encoded = torch.stack([model._clean({"image": images, "label": torch.tensor([0])}) for _ in range(50)])
    first = next(number for number in range(10) if photo_of(number) == 0)
    mean, deviation = moments_of(place, first, False).chunk(2)
    torch.testing.assert_close(encoded.mean(0)[0], mean * 0.18215, rtol=0, atol=0.6 * float(deviation.max()) * 0.18215)
    assert model.codec is not None
    assert not [name for name in model.state_dict() if "vae" in name or "codec" in name]
    assert model.codec.decode(latents[None]).shape == (1, 3, 16, 16)


def test_images_are_shrunk_cut_and_scaled() -> None:
    """A wide image whose left third is dark: the middle square is kept, values lie in -1 .. 1."""
    pixels = np.full((64, 128, 3), 255, dtype=np.uint8)
    pixels[:, :48] = 0
    image = SignedImage(16)(Image.fromarray(pixels))
    assert image.shape == (3, 16, 16)
    assert image[:, :, :3].max() < -0.9
    assert image[:, :, 6:].min() > 0.9
    mirrored = SignedImage(16, flip=1.0)(Image.fromarray(pixels))
    assert torch.equal(mirrored, image.flip(-1))


def test_latents_that_are_wrong(place: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"latents are 8 x 8, the model expects 16 x 16; set --data\.sample_size=8"):
        data(place, sample_size=16).source("train")
    with pytest.raises(BrokenSampleError, match=r"label b'1' is not one of the classes 0 to 0"):
        data(place, num_classes=1).source("train")[next(i for i in range(10) if photo_of(i) % 2)]
    moved = tmp_path / "latents"
    moved.mkdir()
    (moved / "train-00000.tar").write_bytes((place / "latents/train-00000.tar").read_bytes())
    with pytest.raises(FileNotFoundError, match=r"train-manifest\.json is missing: it says how the latents are scaled"):
        data(tmp_path).source("train")
    manifest = json.loads((place / "latents/train-manifest.json").read_text())
    (moved / "train-manifest.json").write_text(json.dumps(manifest))
    (moved / "val-00000.tar").write_bytes((moved / "train-00000.tar").read_bytes())
    (moved / "val-manifest.json").write_text(json.dumps({**manifest, "scale": 1.0}))
    with pytest.raises(ValueError, match="different scales"):
        data(tmp_path).source("train")
    with pytest.raises(SystemExit, match="photos does not exist; give a folder"):
        encode(tmp_path)
    (tmp_path / "photos").mkdir()
    with pytest.raises(SystemExit, match="must hold one folder of images for each class"):
        encode(tmp_path)


@pytest.mark.parametrize("damaged", [[0], [0, 1, 3], range(10)], ids=["the first", "several", "all"])
def test_the_size_of_latents_is_that_of_the_first_that_is_not_damaged(
    place: Path, damaged: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ShardReader.array

    def array(self: ShardReader, index: int, extension: str) -> np.ndarray:
        if index in damaged:
            raise BrokenSampleError(f"sample {index} is cut")
        return read(self, index, extension)

    monkeypatch.setattr(ShardReader, "array", array)
    if len(damaged) == 10:
        with pytest.raises(BrokenSampleError, match="sample 9 is cut"):
            data(place).source("train")
        return
    assert data(place).source("train")[2]["latent"].shape == (4, 8, 8)
    with pytest.raises(ValueError, match="latents are 8 x 8, the model expects 16 x 16"):
        data(place, sample_size=16).source("train")


def test_batches_that_do_not_fit_the_model(place: Path) -> None:
    attention = AttentionConfig(block_grid=[2, 2])
    model = ClassToImage(attention, 2, 8, 4, shape=SHAPE)
    with pytest.raises(ValueError, match=r"latents of channels and sides \(4, 16, 16\) for a model of \(4, 8, 8\)"):
        model._clean({"latent": torch.zeros(1, 4, 16, 16), "label": torch.tensor([0])})
    with pytest.raises(ValueError, match=r"images of channels and sides \(3, 64, 64\).*vae for images that become"):
        model._clean({"image": torch.zeros(1, 3, 64, 64), "label": torch.tensor([0])})
    for label in (2, -1):
        with pytest.raises(ValueError, match=f"class {label} is not one of 0 to 1"):
            model._clean({"latent": torch.zeros(1, 4, 8, 8), "label": torch.tensor([label])})
    with pytest.raises(ValueError, match="samples of 4 channels are latents; name the VAE"):
        model.check_drawable()
    with pytest.raises(FileNotFoundError, match="vae nowhere is neither a folder"):
        LatentCodec("nowhere").model(torch.device("cpu"))


def test_requests_of_samples() -> None:
    requested = RequestedClasses(SampleRequest(classes=[7, 3], per_class=2, seed=5), 10)
    assert [requested[i] for i in range(len(requested))] == [
        {"index": index, "label": label, "seed": 5} for index, label in enumerate([7, 3, 7, 3])
    ]
    assert len(DigitImages().requested()) == 80
    with pytest.raises(ValueError, match=r"class 10 is not one of 0 to 9; see samples\.classes"):
        RequestedClasses(SampleRequest(classes=[10]), 10)
    with pytest.raises(ValueError, match="per_class=0"):
        SampleRequest(per_class=0)
    with pytest.raises(ValueError, match="classes is empty"):
        SampleRequest(classes=[])


def test_image_shards_are_those_of_classification(place: Path, tmp_path: Path) -> None:
    images_to_shards(place / "photos", Packing(tmp_path, per_shard=4))
    shards = ImageShards(str(tmp_path), str(tmp_path), image_size=16, num_classes=2, batch_size=2, num_workers=0)
    sample = shards.source("train")[0]
    assert sample["image"].shape == (3, 16, 16)
    assert sample["image"].min() < -0.5
    assert sample["label"] in (0, 1)
    real, mirrored = shards.real_images("train"), shards.source("train")
    for _ in range(8):
        assert torch.equal(real[0]["image"], real[0]["image"])
    assert any(torch.equal(mirrored[0]["image"], real[0]["image"].flip(-1)) for _ in range(20))
    with pytest.raises(ValueError, match=r"train-manifest\.json does not describe latents"):
        LatentShards(str(tmp_path), str(tmp_path), num_classes=2).source("train")
    with pytest.raises(ValueError, match="the data are latents, and FID compares images"):
        data(place).real_images("train")


@pytest.mark.parametrize("kind", ["latents", "images"])
def test_models_train_validate_and_draw_with_a_vae(place: Path, tmp_path: Path, kind: str) -> None:
    """Validation of images encodes them with noise of each sample: the same loss each time."""
    images_to_shards(place / "photos", Packing(tmp_path, per_shard=4))
    both = data(place) if kind == "latents" else None
    module = both or ImageShards(
        str(tmp_path),
        str(tmp_path),
        image_size=16,
        num_classes=2,
        batch_size=2,
        num_workers=0,
        samples=SampleRequest([1], 3),
    )
    model = ClassToImage(
        AttentionConfig(block_grid=[2, 2]),
        *(2, 8, 4),
        shape=SHAPE,
        vae=str(place / "vae"),
        sampling=DiTSamplingConfig("ddim", 2),
        training=TrainingOptions(OptimizerConfig(schedule="constant")),
    )
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    folder = tmp_path / "runs/new"
    trainer = Trainer(accelerator="cpu", max_steps=3, default_root_dir=folder, enable_model_summary=False, **quiet)
    trainer.fit(model, module)
    assert trainer.global_step == 3
    first, second = (trainer.validate(model, module, verbose=False)[0] for _ in range(2))
    assert first == second
    assert first["val/samples"] == 10
    trainer.predict(model, module, return_predictions=False)
    assert len(list(folder.glob("samples/*.png"))) == (16 if kind == "latents" else 3)


def test_images_of_twice_the_size_are_halved_by_boxes() -> None:
    """Images are reduced in the same way as by guided-diffusion's center_crop_arr."""
    from mhla_tasks.diffusion.sources import shrink

    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    want = pixels.reshape(16, 2, 16, 2, 3).astype(float).mean((1, 3))
    assert np.abs(np.array(shrink(Image.fromarray(pixels), 16)) - want).max() <= 1


def test_decoding_undoes_the_scale(place: Path) -> None:
    codec = LatentCodec(str(place / "vae"))
    vae = AutoencoderKL.from_pretrained(place / "vae").eval()
    latents = torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        want = vae.decode(latents).sample
    assert codec.scale(torch.device("cpu")) == vae.config.scaling_factor != 1
    torch.testing.assert_close(codec.decode(latents * vae.config.scaling_factor), want, rtol=1e-3, atol=1e-4)
