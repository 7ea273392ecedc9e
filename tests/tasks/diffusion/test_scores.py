"""Scores of sets of images: which are computed from how many samples, what is said beside them, and where sets come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mhla_tasks.commandline import registry
from PIL import Image
from torch import Tensor, nn
from torch_fidelity.metric_isc import isc_features_to_metric
from torch_fidelity.metric_kid import kid_features_to_metric

from lightning_mhla.generative.fidelity import scores
from lightning_mhla.generative.fidelity.features import FeatureNetwork, Features
from lightning_mhla.generative.fidelity.scores import ImageSet, Moments, assemble, moments, read_set, score

CPU = torch.device("cpu")


class Pixels(FeatureNetwork):
    """The first pixels of the channels as features, the brightness as class scores; sizes of the batches are kept."""

    def __init__(self, width: int = 3, spatial: bool = True) -> None:
        self.width, self.spatial = width, spatial
        self.sizes: list[int] = []

    def network(self) -> nn.Module:
        return nn.Identity()

    def extract(self, network: nn.Module, images: Tensor) -> Features:
        self.sizes.append(len(images))
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled()
        values = network(images).float().flatten(1)
        return Features(values[:, : self.width], values[:, :2] if self.spatial else None, None)


def image_set(count: int, width: int = 3, seed: int = 0, logits: int = 0, **options: Any) -> ImageSet:
    generator = torch.Generator().manual_seed(seed)
    pooled = torch.randn(count, width, generator=generator)
    classes = torch.randn(count, logits, generator=generator) if logits else None
    return ImageSet(f"set {seed}", "", count, pooled, classes, **options)


def test_moments_are_mean_and_unbiased_covariance() -> None:
    values = torch.tensor([[1.0], [2.0], [6.0]])
    mean, covariance = moments(values)
    assert (mean.tolist(), covariance.tolist(), mean.dtype, covariance.dtype) == (
        [3.0],
        [[7.0]],
        np.float64,
        np.float64,
    )
    one = ImageSet("one", "", 1, values[:1])
    assert one.moments("pooled") is None
    assert one.moments("spatial") is None
    two = ImageSet("two", "", 2, values[:2])
    found = two.moments("pooled")
    assert found is not None
    assert found.mean.tolist() == [1.5]
    assert two.moments("pooled") is found, "computed once"
    given = Moments(np.zeros(1), np.zeros((1, 1)))
    assert ImageSet("known", "", 2, values, statistics={"pooled": given}).moments("pooled") is given


@pytest.mark.parametrize(
    ("count", "kid", "precision"),
    [(1, False, False), (2, True, False), (4, True, False), (5, True, True), (30, True, True)],
)
@pytest.mark.parametrize("few", ["generated", "reference"])
def test_small_sets_have_fewer_scores(count: int, kid: bool, precision: bool, few: str) -> None:
    sets = [image_set(count), image_set(40, seed=1)]
    values = score(*(sets if few == "generated" else sets[::-1])).values
    assert ({"kid", "kid_std"} <= values.keys()) is kid
    assert ({"precision", "recall"} <= values.keys()) is precision
    assert ("fid" in values) is (count > 1)
    assert "inception_score" not in values


@pytest.mark.parametrize("count", [9, 10, 23])
def test_the_inception_score_has_ten_parts(count: int) -> None:
    generated, reference = image_set(count, logits=5), image_set(40, seed=1, logits=5)
    values = score(generated, reference, seed=3).values
    assert ("inception_score" in values) is (count >= 10)
    assert score(reference, generated).values.keys() >= {"inception_score", "inception_score_std"}
    if count >= 10:
        assert generated.logits is not None
        want = isc_features_to_metric(generated.logits, splits=10, shuffle=True, rng_seed=3)
        assert values["inception_score"] == want["inception_score_mean"]
        assert values["inception_score_std"] == want["inception_score_std"]


@pytest.mark.parametrize(("counts", "subset"), [((30, 40), 30), ((40, 30), 30), ((1100, 1200), 1000)])
def test_kid_is_that_of_subsets(counts: tuple[int, int], subset: int) -> None:
    one, two = (image_set(count, seed=seed) for seed, count in enumerate(counts))
    assert one.pooled is not None
    assert two.pooled is not None
    options = {"kid_subset_size": subset, "rng_seed": 2020, "verbose": False}
    want = kid_features_to_metric(one.pooled.double(), two.pooled.double(), **options)
    found = score(one, two).values
    assert found["kid"] == want["kernel_inception_distance_mean"]
    assert found["kid_std"] == want["kernel_inception_distance_std"]


@pytest.mark.parametrize(("count", "marked"), [(4, False), (3, True), (2, True), (None, False)])
def test_fid_of_few_samples_is_marked(count: int | None, marked: bool) -> None:
    reference = image_set(30, seed=1)
    generated = image_set(10)
    generated.count = count
    for sets, number in (((generated, reference), count), ((reference, generated), 30)):
        marks = score(*sets).marks
        assert (
            any(
                "fid is not reliable" in mark and "set 0 are fewer than FID needs for 3 features" in mark
                for mark in marks
            )
            is marked
        )
        said = [mark for mark in marks if mark.startswith("fid of")]
        assert said == (
            [] if number is None else [f"fid of {number:,} samples: higher than with the 50,000 that are usual"]
        )


@pytest.mark.parametrize(("count", "said"), [(49_999, True), (50_000, False)])
def test_the_usual_number_of_samples_needs_no_mark(count: int, said: bool) -> None:
    generated, reference = image_set(10), image_set(10, seed=1)
    generated.count, reference.count = count, 20
    assert any("49,999 samples" in mark for mark in score(generated, reference).marks) is said


def test_widths_of_each_kind_of_features_must_agree() -> None:
    one, two = image_set(20), image_set(20, seed=1)
    one.spatial, two.spatial = torch.randn(20, 4), torch.randn(20, 5)
    with pytest.raises(ValueError, match="set 1 has 5 features and set 0 4: they are of different feature networks"):
        score(one, two)
    three = image_set(20, seed=2)
    three.spatial = torch.randn(20, 4)
    assert {"fid", "sfid"} <= score(one, three).values.keys()


def test_statistics_alone_give_distances_alone() -> None:
    known = ImageSet("known", "", None, statistics={"pooled": moments(torch.randn(50, 3))})
    for sets in ((image_set(20, logits=4), known), (known, image_set(20))):
        found = score(*sets)
        assert {"fid"} <= found.values.keys() <= {"fid", "inception_score", "inception_score_std"}
        assert f"no kid, precision, recall: {known.origin} has statistics only, no images" in found.marks


def test_batches_are_put_together_in_their_order() -> None:
    parts = [Features(torch.full((2, 3), float(n)), torch.full((2, 1), float(n)), None) for n in range(3)]
    found = assemble("parts", "digest", parts)
    assert found.pooled is not None
    assert found.spatial is not None
    assert found.pooled[:, 0].tolist() == found.spatial[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert (found.logits, found.count, found.origin, found.digest) == (None, 6, "parts", "digest")
    with pytest.raises(ValueError, match="parts holds no images"):
        assemble("parts", "digest", [])


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (7, 4, 5, 3), dtype=np.uint8)


def test_a_folder_and_an_array_of_the_same_images_are_the_same_set(images: np.ndarray, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for number, pixels in enumerate(images):
        Image.fromarray(pixels).save(tmp_path / f"folder/{number}.png")
    np.savez(tmp_path / "images.npz", arr_0=images, other=np.zeros(3))
    found = []
    for name in ("folder", "images.npz"):
        features = Pixels()
        with torch.autocast("cpu", torch.bfloat16):
            found.append(read_set(str(tmp_path / name), features, CPU, batch_size=3))
        assert features.sizes == [3, 3, 1], name
        assert found[-1].origin == str(tmp_path / name)
        assert found[-1].count == 7
        assert len(found[-1].digest) == 16
    one, two = found
    assert one.pooled is not None
    assert two.pooled is not None
    assert torch.equal(one.pooled, two.pooled)
    assert one.pooled.tolist() == images.transpose(0, 3, 1, 2).reshape(7, -1)[:, :3].tolist()
    np.savez(tmp_path / "others.npz", arr_0=images[::-1])
    assert len({each.digest for each in (two, read_set(str(tmp_path / "others.npz"), Pixels(), CPU))}) == 2
    again = read_set(str(tmp_path / "folder"), Pixels(), CPU)
    assert again.digest == one.digest, "whatever the batches"
    Image.fromarray(images[0][:3]).save(tmp_path / "folder/4a.png")
    with pytest.raises(
        ValueError, match=r"different sizes, 0\.png of 5 x 4 and 4a\.png of 5 x 3; bring them to one size"
    ):
        read_set(str(tmp_path / "folder"), Pixels(), CPU, batch_size=3)


@pytest.mark.parametrize("spatial", [True, False])
def test_statistics_beside_images_come_first(images: np.ndarray, tmp_path: Path, spatial: bool) -> None:
    statistics = {"mu": np.arange(3, dtype=np.float32), "sigma": np.eye(3)} | (
        {"mu_s": np.zeros(2), "sigma_s": np.eye(2)} if spatial else {"mu_s": np.zeros(2)}
    )
    np.savez(tmp_path / "both.npz", arr_0=images, **statistics)
    np.savez(tmp_path / "statistics.npz", **statistics)
    both, alone = (read_set(str(tmp_path / name), Pixels(), CPU) for name in ("both.npz", "statistics.npz"))
    assert both.count is alone.count is None, "the statistics may be those of more images"
    assert both.pooled is not None
    assert alone.pooled is None
    assert len(both.digest) == len(alone.digest) == 16
    assert both.digest != alone.digest
    for known in (both, alone):
        assert set(known.statistics) == ({"pooled", "spatial"} if spatial else {"pooled"})
        pooled = known.moments("pooled")
        assert pooled is not None
        assert pooled.mean.tolist() == [0, 1, 2]
        assert pooled.mean.dtype == np.float64
    assert not score(image_set(8), alone).marks[0].startswith("no fid")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"mu": np.zeros(3)}, r"neither images \(arr_0\) nor reference statistics \(mu, sigma\), only \['mu'\]"),
        ({"mu_s": np.zeros(3), "sigma_s": np.eye(3)}, r"only \['mu_s', 'sigma_s'\]"),
        ({"mu": np.zeros(3, dtype=np.int64), "sigma": np.eye(3)}, "mu and sigma are not finite floating-point numbers"),
        ({"mu": np.zeros(3), "sigma": np.full((3, 3), np.nan)}, "mu and sigma are not finite"),
        ({"mu": np.zeros((1, 3)), "sigma": np.eye(1)}, r"mu \(1, 3\) and sigma \(1, 1\) are no moments"),
        ({"mu": np.zeros(3), "sigma": np.eye(2)}, r"sigma \(2, 2\) are no moments"),
        ({"arr_0": np.zeros((2, 4, 4, 2), dtype=np.uint8)}, r"arr_0 is uint8 \(2, 4, 4, 2\), not uint8 \[N, S, S, 3\]"),
        ({"arr_0": np.zeros((4, 4, 3), dtype=np.uint8)}, r"arr_0 is uint8 \(4, 4, 3\)"),
        ({"arr_0": np.zeros((0, 4, 4, 3), dtype=np.uint8)}, "holds no images"),
    ],
)
def test_files_that_are_no_references(content: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "reference.npz", **content)
    with pytest.raises(ValueError, match=message):
        read_set(str(tmp_path / "reference.npz"), Pixels(), CPU)


def test_gray_images_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "gray.npz", arr_0=np.arange(32, dtype=np.uint8).reshape(2, 4, 4, 1))
    found = read_set(str(tmp_path / "gray.npz"), Pixels(), CPU)
    assert found.pooled is not None
    assert found.pooled.tolist() == [[0, 1, 2], [16, 17, 18]]


def test_statistics_may_be_as_large_as_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[dict[str, int]] = []
    monkeypatch.setattr(
        scores, "read_arrays", lambda path, allowed: limits.append(allowed) or {"mu": np.zeros(1), "sigma": np.eye(1)}
    )
    (tmp_path / "a.npz").touch()
    read_set(str(tmp_path / "a.npz"), Pixels(), CPU)
    assert limits == [{"arr_0": 2**48, **dict.fromkeys(("mu", "sigma", "mu_s", "sigma_s"), 2**28)}]
    assert limits[0]["sigma"] >= 8 * 5792**2


@pytest.mark.parametrize("features", ["random", "digits", "mnist"])
@pytest.mark.parametrize("exists", [True, False])
def test_weights_that_a_network_does_not_read_are_rejected(features: str, exists: bool, tmp_path: Path) -> None:
    weights = tmp_path / "weights.pth"
    if exists:
        weights.touch()
    options = ["--features", features, "--weights", str(weights)]
    with pytest.raises(
        SystemExit, match=rf"--weights .*weights\.pth is for .* inception, and --features {features} reads no"
    ):
        registry.run("score", [str(tmp_path), str(tmp_path), *options])
