"""FID and its kin against torch-fidelity's own command and ADM's formula; what is said beside them; one process and two."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Trainer
from mhla_tasks.commandline import parser, registry
from mhla_tasks.diffusion import ClassToImage, DigitFeatures, DiT, FeatureNetwork, GenerationMetrics, InceptionFeatures
from mhla_tasks.diffusion.callbacks import SampleGrid
from mhla_tasks.diffusion.sampling import DiTSamplingConfig
from PIL import Image
from processes import fork_server, run_cli
from scipy import linalg
from tiny import ROOT, digits_config
from torch import Tensor, nn

from lightning_mhla import AttentionConfig
from lightning_mhla.data import BrokenSampleError
from lightning_mhla.data.digits import load_digits
from lightning_mhla.generative.fidelity.callback import _batches, _size_marks
from lightning_mhla.generative.fidelity.features import Features, RandomFeatures
from lightning_mhla.generative.fidelity.scores import (
    ImageSet,
    Moments,
    frechet_distance,
    image_set,
    moments,
    read_set,
    score,
)
from lightning_mhla.system.sharding import fingerprint
from lightning_mhla.training.loading import load_module

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw random weights in the layout of torch-fidelity's Inception-v3, with normalized activations."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "load", lambda *_, **__: {})
        patch.setattr(FeatureExtractorInceptionV3, "load_state_dict", lambda *_: None)
        network = FeatureExtractorInceptionV3("inception-v3-compat", ["2048"], "none")
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    network.train()(torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8))
    torch.save(network.state_dict(), path, _use_new_zipfile_serialization=False)  # as the published file
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two folders of fourteen images with different brightness and size."""
    place, generator = tmp_path_factory.mktemp("folders"), np.random.default_rng(0)
    for name, low in (("one", 0), ("two", 60)):
        (place / name).mkdir()
        for number in range(14):
            pixels = generator.integers(low, 256 - number * 5, (24, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / name / f"{number:02d}.png")
    return [str(place / "one"), str(place / "two")]


def test_metrics_are_those_of_torch_fidelitys_command(
    weights: Path, folders: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--isc", "--fid", "--kid", "--prc", "--kid-subset-size", "14", "--json", "--silent", "--no-cache"]
    command = [
        *options,
        "--cpu",
        "--feature-extractor",
        "inception-v3-compat",
    ]
    command += ["--input1", folders[0], "--input2", folders[1], "--feature-extractor-weights-path", str(weights)]
    status, said = fork_server().run(*command, module="torch_fidelity.fidelity")
    assert status == 0, said[-2000:]
    want = json.loads(said[said.index("{\n") : said.rindex("}") + 1])
    registry.run("score", [*folders, "--weights", str(weights), "--json", "--device", "cpu", "--batch_size", "8"])
    found = json.loads(capsys.readouterr().out)
    names = {
        "fid": "frechet_inception_distance",
        "inception_score": "inception_score_mean",
        "inception_score_std": "inception_score_std",
        "kid": "kernel_inception_distance_mean",
        "precision": "precision",
        "recall": "recall",
    }
    for ours, theirs in names.items():
        assert found[ours] == pytest.approx(want[theirs], rel=5e-5, abs=1e-9), ours
    assert found["fid"] > 1
    assert found["sfid"] > 0
    assert any("14 images of" in mark and "fewer than FID needs for 2,048 features" in mark for mark in found["marks"])


def test_spatial_features_are_those_of_adms_evaluator(weights: Path) -> None:
    """The first seven channels of mixed_6/conv, 17 x 17, channels last."""
    features = InceptionFeatures(str(weights))
    network: Any = features.network()
    images = torch.randint(0, 256, (2, 1, 20, 20), dtype=torch.uint8)
    kept: list[Tensor] = []
    hook = network.Mixed_6c.register_forward_hook(lambda module, args, out: kept.append(out))
    pooled, spatial, logits = features.extract(network, images)
    hook.remove()
    want = torch.relu(network.Mixed_6d.branch1x1.bn(network.Mixed_6d.branch1x1.conv(kept[0])))[:, :7]
    assert spatial is not None
    assert logits is not None
    assert spatial.shape == (2, 7 * 17 * 17)
    assert torch.equal(spatial.view(2, 17, 17, 7), want.permute(0, 2, 3, 1))
    assert pooled.shape == (2, 2048)
    torch.testing.assert_close(logits, pooled @ network.fc.weight.T)


def test_statistics_of_an_npz_give_the_formula_of_adms_evaluator(tmp_path: Path) -> None:
    """|mu1 - mu2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)), with scipy's matrix root as there."""
    generator = np.random.default_rng(0)

    class Mean(FeatureNetwork):
        """Feature network with sixty-four pixels as pooled features and twelve as spatial ones."""

        def network(self) -> nn.Module:
            return nn.Identity()

        def extract(self, network: nn.Module, images: Tensor) -> Features:
            values = images.float().flatten(1)
            return Features(values[:, :64], values[:, 64:76], None)

    def random_moments(width: int) -> tuple[np.ndarray, np.ndarray]:
        root = generator.normal(size=(width, width)) * 60
        return generator.normal(size=width) * 30 + 120, root @ root.T / width

    statistics = dict(zip(("mu", "sigma", "mu_s", "sigma_s"), (*random_moments(64), *random_moments(12)), strict=True))
    images = generator.integers(0, 256, (300, 6, 6, 3), dtype=np.uint8)
    np.savez(tmp_path / "reference.npz", **statistics)
    np.savez(tmp_path / "samples.npz", arr_0=images, arr_1=np.zeros(300, dtype=np.int64))
    sets = [read_set(str(tmp_path / name), Mean(), CPU) for name in ("samples.npz", "reference.npz")]
    found = score(*sets)
    values = images.transpose(0, 3, 1, 2).reshape(300, -1).astype(np.float64)
    for metric, columns, names in (
        ("fid", slice(0, 64), ("mu", "sigma")),
        ("sfid", slice(64, 76), ("mu_s", "sigma_s")),
    ):
        mean, covariance = values[:, columns].mean(0), np.cov(values[:, columns], rowvar=False)
        other, spread = (statistics[name] for name in names)
        root = linalg.sqrtm(covariance @ spread).real
        want = ((mean - other) ** 2).sum() + np.trace(covariance) + np.trace(spread) - 2 * np.trace(root)
        assert found.values[metric] == pytest.approx(want, rel=1e-9)
    assert set(found.values) == {"fid", "sfid"}
    assert any("no kid, precision, recall" in mark for mark in found.marks)


def test_moments_accumulate_in_float64() -> None:
    """A large mean and a small deviation, of which float32 sums would leave little."""
    torch.manual_seed(0)
    features = (1000 + 0.01 * torch.randn(20_000, 3)).float()
    want = np.cov(features.numpy().astype(np.float64), rowvar=False)
    np.testing.assert_allclose(moments(features).covariance, want, rtol=1e-9)
    same = moments(features)
    assert frechet_distance(same, same) == pytest.approx(0, abs=1e-9)
    moved = Moments(same.mean + 2, same.covariance)
    assert frechet_distance(same, moved) == pytest.approx(12, rel=1e-9)


def test_what_is_said_beside_values() -> None:
    torch.manual_seed(0)
    few = ImageSet("a few", "", 20, torch.randn(20, 64), torch.randn(20, 10))
    many = ImageSet("many", "", 200, torch.randn(200, 64))
    marks = score(few, many).marks
    assert any("20 images of a few are fewer than FID needs for 64 features" in mark for mark in marks)
    assert any("fid of 20 samples: higher than with the 50,000" in mark for mark in marks)
    assert not any("of many" in mark for mark in marks)
    one = ImageSet("one", "", 1, torch.randn(1, 64))
    alone = score(one, many)
    assert "fid" not in alone.values
    assert any("1 image of one has no covariance" in mark for mark in alone.marks)
    with pytest.raises(ValueError, match="different feature networks"):
        score(few, ImageSet("other", "", 200, torch.randn(200, 32)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"other": np.zeros(3)}, r"neither images \(arr_0\) nor reference statistics \(mu, sigma\), only \[\]"),
        ({"arr_0": np.zeros((2, 4, 4, 3))}, r"arr_0 is float64 \(2, 4, 4, 3\), not uint8"),
        ({"mu": np.zeros(3), "sigma": np.zeros((2, 2))}, "are no moments"),
    ],
)
def test_references_that_are_no_references(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "reference.npz", **content)
    with pytest.raises(ValueError, match=message):
        read_set(str(tmp_path / "reference.npz"), DigitFeatures(), CPU)


def test_files_that_are_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist; give a folder of images, or an"):
        read_set(str(tmp_path / "missing.npz"), DigitFeatures(), CPU)
    (tmp_path / "broken.npz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"broken\.npz is not an \.npz that can be read safely"):
        read_set(str(tmp_path / "broken.npz"), DigitFeatures(), CPU)
    with pytest.raises(FileNotFoundError, match=r"Inception-v3: .*none\.pth does not exist"):
        InceptionFeatures(str(tmp_path / "none.pth")).network()
    for name, content in {
        "code": {"weights": Path()},
        "list": [torch.zeros(2)],
        "other": {"a": torch.zeros(2)},
    }.items():
        torch.save(content, tmp_path / f"{name}.pth")
    (tmp_path / "empty.pth").touch()
    for name in ("code", "list", "other", "empty"):
        with pytest.raises(ValueError, match=rf"{name}\.pth holds no weights of torch-fidelity's Inception-v3"):
            InceptionFeatures(str(tmp_path / f"{name}.pth")).network()


def test_the_classifier_of_digits_names_those_held_out() -> None:
    features = DigitFeatures()
    images, labels = load_digits(train=False)
    pixels = (images * 255).round().to(torch.uint8)
    logits = features.extract(features.network(), pixels).logits
    assert logits is not None
    assert (logits.argmax(1) == labels).float().mean() > 0.97
    one, two, other = (fingerprint(DigitFeatures(seed, epochs=1).network()) for seed in (0, 0, 1))
    assert one == two != other


@pytest.mark.parametrize("broken", [{2}, {0, 1, 2, 3}, set(range(10))], ids=["one", "a batch", "all"])
def test_broken_images_are_left_out_of_the_reference(broken: set[int], caplog: pytest.LogCaptureFixture) -> None:
    class Images:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            if index in broken:
                raise BrokenSampleError(f"{index}.png: the image cannot be decoded")
            return {"image": torch.full((1, 8, 8), index / 10)}

    source: Any = Images()
    batches = list(_batches(source, 4, len(broken)))
    levels = [round((float(image[0, 0, 0]) / 127.5 - 1) * 10) for batch in batches for image in batch]
    assert levels == [index for index in range(10) if index not in broken]
    assert caplog.text.count("left out of the reference: ") == len(broken)
    if not levels:
        with pytest.raises(ValueError, match="no images"):
            image_set("the data", _batches(source, 4, 10), RandomFeatures(0), CPU)
    with pytest.raises(BrokenSampleError, match="the image cannot be decoded"):
        list(_batches(source, 4, len(broken) - 1))


def test_a_reference_of_another_size_is_a_remark() -> None:
    class Data:
        def real_images(self, part: str) -> list[dict[str, Tensor]]:
            return [{"image": torch.zeros(1, 8, 12)}] * 6

    metrics, trainer = GenerationMetrics(features=RandomFeatures(0), batch_size=4), SimpleNamespace(datamodule=Data())
    assert metrics._read_reference(trainer, CPU).count == 6
    assert _size_marks(metrics._reference_size, torch.Size([8, 12])) == []
    (mark,) = _size_marks(metrics._reference_size, torch.Size([12, 8]))
    assert mark.startswith("the reference has images of 8 x 12 pixels, samples have 12 x 8")
    assert _size_marks(None, torch.Size([12, 8])) == [], "a file of statistics has no size"


@pytest.mark.parametrize(("condition", "names"), [("class", True), ("prompt", False)])
def test_labels_are_compared_with_classes_only(condition: str, names: bool) -> None:
    """Prompts are numbered as well, but their numbers mean something else."""

    class Digits:
        num_conditions, device, sampling, ema_decay = 10, CPU, None, None

        def draw_numbered(self, indices: list[int], seed: int, sampling: Any) -> Tensor:
            images, labels = load_digits(train=False)
            chosen = torch.stack([images[labels == index % 10][0] for index in indices])
            return (chosen * 255).round().to(torch.uint8)

        def all_gather(self, data: Tensor) -> Tensor:
            return data

    module: Any = Digits()
    module.condition = condition
    metrics = GenerationMetrics(features=DigitFeatures(), samples=20, batch_size=10)
    _, _, share = metrics._draw(Trainer(accelerator="cpu", logger=False), module)
    assert (share is not None and share > 0.9) if names else share is None


def test_one_process_and_two_log_the_same(start: Path, tmp_path: Path) -> None:
    rows = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        config = digits_config(
            folder,
            attention={"kind": "mhla", "block_grid": [2, 2], "lepe": 3, "gate": True},
            pretrained=str(start),
            optimizer={"lr": 0.0, "weight_decay": 0.0},
        )
        arguments = ["fit", "--config", str(config), "--trainer.max_steps=1", "--trainer.accelerator=cpu"]
        if processes == 1:
            parser.main(arguments)
        else:
            run_cli(*arguments, "--config", str(ROOT / "configs/trainer/ddp.yaml"), "--trainer.devices=2")
        (line,) = (folder / "log/generation.jsonl").read_text().splitlines()
        rows.append(json.loads(line))
        assert list((folder / "log/pictures").glob("generation-step0000001.png"))
    one, two = rows
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert two[name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), name
    depends = {"samples": 35, "sampler": "euler", "sampling_steps": 3, "guidance": 1.5, "ema_decay": 0.5, "step": 1}
    assert depends.items() <= one.items()
    assert one["reference_images"] == 1437
    assert len(one["features_sha256"]) == len(one["reference_sha256"]) == 16
    assert "35 samples are not the same number of each class" in one["marks"]
    assert {"fid", "kid", "precision", "recall", "inception_score", "label_accuracy"} <= one.keys()


def test_averaged_weights_are_sampled_and_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drawn samples are those of the checkpoint's averaged weights, which are not the live ones."""
    drawn: list[Tensor] = []
    original = ClassToImage.draw

    def draw(self: ClassToImage, *args: Any) -> Tensor:
        drawn.append(original(self, *args))
        return drawn[-1]

    monkeypatch.setattr(ClassToImage, "draw", draw)
    config = digits_config(tmp_path, optimizer={"lr": 0.02, "weight_decay": 0.0}, ema_decay=0.9)
    parser.main(["fit", "--config", str(config), "--trainer.max_steps=6"])
    path = tmp_path / "checkpoints/step=6.ckpt"
    averaged, live = (load_module(ClassToImage, path, live=live) for live in (False, True))
    labels, sampling = torch.arange(8), DiTSamplingConfig("euler", 3, 1.5)
    want, other = (original(module, labels, list(range(8)), 0, sampling).int() for module in (averaged, live))
    assert (drawn[0].int() - want).abs().max() <= 1
    assert (other - want).abs().max() > 3, "averaged and live weights draw the same: the test shows nothing"
    registry.run("export", [str(path), str(tmp_path / "exported")])
    exported = DiT.from_pretrained(tmp_path / "exported", subfolder="transformer")
    for name, tensor in exported.state_dict().items():
        assert torch.equal(tensor, averaged.network.state_dict()[name]), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["reference=missing.npz"], "missing.npz does not exist; give a folder of images"),
        (["reference=other.npz"], "has 2048 features, DigitFeatures gives 64: they are of different feature networks"),
        (["sampling.sampler=ddim"], "sampler='ddim' does not support objective 'flow'; use euler, dpm-solver++"),
    ],
)
def test_what_cannot_be_scored_is_an_error_before_training(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = digits_config(tmp_path)
    np.savez(tmp_path / "other.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    text = config.read_text()
    for option in options:
        name, value = option.split("=")
        value = str(tmp_path / value) if value == "other.npz" else value
        text = text.replace("sampler: euler\n", f"sampler: {value}\n", 1) if "sampler" in name else text
        text = text.replace("samples: 35", f"samples: 35\n      {name}: {value}") if "sampler" not in name else text
    config.write_text(text)
    with pytest.raises(SystemExit):
        parser.main(["fit", "--config", str(config)])
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("checkpoints/*"))


def test_attention_options_are_not_needed_to_sample(start: Path) -> None:
    model = DiT.from_pretrained(str(start))
    assert model.backbone.layers[0].attn.config == AttentionConfig(block_grid=[2, 2], lepe=3, gate=True)


def test_samples_of_one_mode_are_precise_and_recall_little() -> None:
    torch.manual_seed(0)
    near, far = torch.randn(60, 4), torch.randn(60, 4) + 100
    values = score(ImageSet("one mode", "", 60, near + 0.01), ImageSet("two", "", 120, torch.cat([near, far]))).values
    assert values["precision"] == 1
    assert 0 < values["recall"] <= 0.5


def test_random_features_are_a_function_of_their_seed() -> None:
    from lightning_mhla.generative.fidelity.features import RandomFeatures, _random_network

    first, other = (fingerprint(RandomFeatures(seed).network()) for seed in (0, 1))
    _random_network.cache_clear()
    torch.manual_seed(5)
    assert first == fingerprint(RandomFeatures(0).network()) != other


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "/tmp/x", "a\0b"])
def test_a_name_of_samples_leads_out_of_no_folder(name: str) -> None:
    for kind in (SampleGrid, GenerationMetrics):
        with pytest.raises(ValueError, match="must not contain a slash or begin with a dot"):
            kind(name=name)
