"""Every data module: what its samples are, that each is read once, and that it remembers every option that changes them.

A new option needs a line in :data:`MODULES` that says what it changes.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import logging
import pkgutil
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mhla_tasks
import numpy as np
import pytest
import torch
from mhla_tasks.language import TokenShards, stdlib
from mhla_tasks.language.prepare import write_token_shards
from mhla_tasks.language.tokenizer import train_tokenizer
from PIL import Image
from small import SENTENCES
from torch import Tensor
from wan import video_file

from lightning_mhla.checkpoints.compat import log_changed_options
from lightning_mhla.data import ResumableDataModule, write_shards
from lightning_mhla.data.write import array_bytes

TRAIN, VAL = 12, 7
"""Samples of the shards: 5, 5 and 2 to train on; 4 and 3 to validate on."""

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
"""ImageNet's, as publications have them."""
DARKEST, BRIGHTEST = float((-MEAN / STD).min()), float(((1 - MEAN) / STD).max())

ORDER, TRAINING, SAMPLES, HELD_OUT, PREDICTION, NOTHING = (
    "order",
    "training",
    "samples",
    "held out",
    "prediction",
    "nothing",
)
"""Effects of an option: the order, so that a run does not resume with it; the training samples; those and the ones held out;
only the ones held out; what predict does; or nothing about the samples."""


@dataclass
class Case:
    """A data module.

    Args:
        options: options for small samples; paths are relative to the folder of the test data.
        contents: type, shape, smallest and largest value over many samples of each entry; None for what differs.
        changes: for each option another value, and what it changes; several for options that change several things.
    """

    options: dict[str, Any]
    contents: dict[str, tuple[torch.dtype | type, tuple[int, ...], float | None, float | None]]
    changes: dict[str, Any] = field(default_factory=dict)


COMMON: dict[str, Any] = {"batch_size": (4, ORDER), "num_workers": (1, NOTHING), "seed": (5, ORDER)}
PLAIN = {"max_skipped": 3, "cache_dir": "elsewhere"}
SHARDS = {
    "train": ("{}/other", SAMPLES),
    "val": ("{}/other", HELD_OUT),
    "shards": [({"shuffle_window": 1}, ORDER), (PLAIN, NOTHING)],
}
LABEL = (int, (), 0.0, 2.0)
INDEX = (int, (), 0.0, None)
DIGIT = (int, (), 0.0, 9.0)
CLASSES = {"num_classes": (4, NOTHING)}
PROMPTS = {"prompts": ({"prompts": ["a red two"]}, PREDICTION)}
SAMPLED = {"samples": ({"per_class": 3}, PREDICTION)}
FOLDERS = {"train": "{}/train", "val": "{}/val", "num_workers": 0}
CAPTION = (str, (), None, None)

AUGMENT = {
    "auto_augment": None, "color_jitter": 0.0, "random_erasing": 0.0, "min_scale": 0.5, "horizontal_flip": 0.5,
    "interpolation": "bicubic", "repeats": 1,
}  # fmt: skip
PART = {"tokens": 24, "pairs": 2, "samples": 30}

MODULES: dict[str, Case] = {
    "classification.Digits": Case(
        {}, {"image": (torch.float32, (1, 8, 8), 0, 1), "label": DIGIT, "index": INDEX},
        {**COMMON, "augment": (False, TRAINING), "predict_dir": ("{}/pictures", PREDICTION)},
    ),
    "classification.Mnist": Case(
        {}, {"image": (torch.float32, (1, 28, 28), 0, 1), "label": DIGIT, "index": INDEX},
        {**COMMON, "augment": (False, TRAINING), "predict_dir": ("{}/pictures", PREDICTION)},
    ),
    "classification.ImageNetShards": Case(
        {**FOLDERS, "image_size": 16, "num_classes": 3, "augment": AUGMENT},
        {"image": (torch.float32, (3, 16, 16), DARKEST, BRIGHTEST), "label": LABEL, "index": INDEX},
        {
            **COMMON, **SHARDS, **CLASSES, "image_size": (8, SAMPLES), "channels": (1, SAMPLES), "crop_share": (0.5, HELD_OUT),
            "mean": ((0.5, 0.5, 0.5), SAMPLES), "std": ((0.5, 0.5, 0.5), SAMPLES), "predict_dir": ("{}/pictures", PREDICTION),
            "augment": [
                ({**AUGMENT, "auto_augment": "rand-m9-mstd0.5-inc1"}, TRAINING), ({**AUGMENT, "color_jitter": 0.4}, TRAINING),
                ({**AUGMENT, "random_erasing": 1.0}, TRAINING), ({**AUGMENT, "min_scale": 0.1}, TRAINING),
                ({**AUGMENT, "horizontal_flip": 1.0}, TRAINING), ({**AUGMENT, "interpolation": "bilinear"}, TRAINING),
                ({**AUGMENT, "repeats": 2}, ORDER),
            ],
        },
    ),
    "diffusion.DigitImages": Case(
        {}, {"image": (torch.float32, (1, 8, 8), -1, 1), "label": DIGIT, "index": INDEX}, {**COMMON, **SAMPLED}
    ),
    "diffusion.MnistImages": Case(
        {}, {"image": (torch.float32, (1, 28, 28), -1, 1), "label": DIGIT, "index": INDEX}, {**COMMON, **SAMPLED}
    ),
    "diffusion.ImageShards": Case(
        {**FOLDERS, "image_size": 16, "num_classes": 3},
        {"image": (torch.float32, (3, 16, 16), -1, 1), "label": LABEL, "index": INDEX},
        {**COMMON, **SHARDS, **CLASSES, **SAMPLED, "image_size": (8, SAMPLES), "channels": (1, SAMPLES), "flip": (1.0, TRAINING)},
    ),
    "diffusion.LatentShards": Case(
        {**FOLDERS, "sample_size": 4, "num_classes": 3},
        {"latent": (torch.float32, (4, 4, 4), -0.5, 25), "label": LABEL, "index": INDEX},
        {**COMMON, **SHARDS, **CLASSES, **SAMPLED, "sample_size": (2, "rejected"), "flip": (1.0, TRAINING)},
    ),
    "language.PythonSource": Case(
        {"context": 24, "vocab_size": 300, "cache_dir": "{}/cache"},
        {"tokens": (torch.int64, (25,), 0, 299), "bytes": (int, (), 1, None)},
        {
            **COMMON, "context": (16, ORDER), "vocab_size": (280, ORDER), "separate_documents": (True, SAMPLES),
            "cache_dir": ("{}/again", NOTHING), "prompts": ("{}/prompts.txt", PREDICTION),
        },
    ),
    "language.TokenShards": Case(
        {**FOLDERS, "context": 8}, {"tokens": (torch.int64, (9,), 0, 309), "bytes": (int, (), 1, None)},
        {
            **COMMON, **SHARDS, "train": ("{}/other", ORDER), "context": (6, ORDER),
            "shards": [({"shuffle_window": 1}, ORDER), ({**PLAIN, "shuffle_window": None}, NOTHING)], "separate_documents": (True, SAMPLES), "tokenizer": ("{}/tokenizer", NOTHING),
            "prompts": ("{}/prompts.txt", PREDICTION), "assistant_only_loss": (True, SAMPLES),
        },
    ),
    "language.TextPassages": Case(
        {"train": "{}/../train.jsonl", "val": "{}/../val.jsonl", "tokenizer": "{}/tokenizer", "length": 16, "min_characters": 1},
        {"tokens": (torch.int64, (16,), 0, 309), "mask": (torch.int64, (16,), 0, 1)},
        {
            **COMMON, "train": ("{}/../other.jsonl", SAMPLES), "val": ("{}/../other.jsonl", HELD_OUT),
            "tokenizer": ("{}/../tokens/tokenizer", NOTHING), "length": (32, NOTHING), "unit": ("document", NOTHING),
            "min_characters": (15, ORDER), "column": ("copy", SAMPLES), "val_passages": (9, HELD_OUT),
        },
    ),
    "language.AssociativeRecall": Case(
        {"train": [PART], "val": [PART], "vocab_size": 64},
        {"tokens": (torch.int64, (24,), 0, 63), "labels": (torch.int64, (24,), -100, 63), "group": (int, (), 0, 0),
         "bytes": (int, (), 0, 0)},
        {
            **COMMON, "vocab_size": (100, SAMPLES), "power": (2.0, SAMPLES), "random_non_queries": (False, SAMPLES),
            "train": [([{**PART, "tokens": 16}], TRAINING), ([{**PART, "pairs": 3}], TRAINING), ([{**PART, "samples": 31}], ORDER)],
            "val": ([{**PART, "tokens": 16}], HELD_OUT),
        },
    ),
    "language.Needle": Case(
        {"tokens": 16, "lengths": [1, 2], "vocab_size": 30, "samples": 30, "val_samples": 20},
        {"tokens": (torch.int64, (16,), 0, 29), "labels": (torch.int64, (16,), -100, 19), "group": (int, (), 0, 9),
         "bytes": (int, (), 0, 0)},
        {
            **COMMON, "tokens": (24, SAMPLES), "lengths": ([1, 3], HELD_OUT), "vocab_size": (60, SAMPLES), "samples": (31, ORDER),
            "val_samples": (10, HELD_OUT),
        },
    ),
    "text_to_image.DigitScenes": Case(
        {}, {"image": (torch.float32, (3, 32, 32), -1, 1), "caption": CAPTION, "index": INDEX}, {**COMMON, **PROMPTS}
    ),
    "text_to_image.CaptionedImageShards": Case(
        {**FOLDERS, "height": 16, "width": 24},
        {"image": (torch.float32, (3, 16, 24), -1, 1), "caption": CAPTION, "index": INDEX},
        {
            **COMMON, **SHARDS, **PROMPTS, "height": (20, SAMPLES), "width": (16, SAMPLES), "caption_key": ("second", SAMPLES),
            "buckets": (["16x16"], SAMPLES),
        },
    ),
    "text_to_image.ImageLatentShards": Case(
        {**FOLDERS}, {"latent": (torch.float32, (4, 2, 3), -1, 1), "text": (torch.float32, (5, 8), None, None), "index": INDEX},
        {**COMMON, **SHARDS, **PROMPTS, "text_length": (2, SAMPLES)},
    ),
    "video.MovingDigits": Case(
        {"frames": 3, "height": 10, "width": 12},
        {"video": (torch.float32, (1, 3, 10, 12), -1, 1), "caption": CAPTION, "index": INDEX},
        {**COMMON, **PROMPTS, "frames": (4, SAMPLES), "height": (11, SAMPLES), "width": (11, SAMPLES)},
    ),
    "video.MovingMnist": Case(
        {"frames": 3, "height": 22, "width": 24},
        {"video": (torch.float32, (1, 3, 22, 24), -1, 1), "caption": CAPTION, "index": INDEX},
        {**COMMON, **PROMPTS, "frames": (4, SAMPLES), "height": (23, SAMPLES), "width": (23, SAMPLES)},
    ),
    "video.BouncingDigits": Case(
        {"frames": 3, "height": 22, "width": 24, "speed": 2},
        {"video": (torch.float32, (1, 3, 22, 24), -1, 1), "caption": CAPTION, "index": INDEX},
        {
            **COMMON, "digits": ("mnist", ORDER), "frames": (4, SAMPLES), "height": (23, SAMPLES), "width": (23, SAMPLES),
            "speed": (1, SAMPLES), "clips": (4, PREDICTION),
        },
    ),
    "video.VideoShards": Case(
        {**FOLDERS, "frames": 3, "height": 16, "width": 24, "fps": None},
        {"video": (torch.float32, (3, 3, 16, 24), None, None), "caption": CAPTION, "index": INDEX},
        {
            **COMMON, **SHARDS, **PROMPTS, "frames": (2, SAMPLES), "height": (12, SAMPLES), "width": (16, SAMPLES),
            "fps": (4.0, SAMPLES), "caption_key": ("second", SAMPLES), "clips": (4, PREDICTION),
        },
    ),
    "video.VideoFolders": Case(
        {**FOLDERS, "frames": 3, "height": 16, "width": 24, "channels": 3},
        {"video": (torch.float32, (3, 3, 16, 24), None, None), "index": INDEX},
        {
            **COMMON, "train": ("{}/other", SAMPLES), "val": ("{}/other", HELD_OUT), "frames": (2, SAMPLES),
            "height": (12, SAMPLES), "width": (16, SAMPLES), "channels": (1, SAMPLES), "fps": (4.0, SAMPLES), "clips": (4, PREDICTION),
        },
    ),
    "video.VideoLatentShards": Case(
        {**FOLDERS}, {"latent": (torch.float32, (4, 2, 2, 3), -1, 1), "text": (torch.float32, (5, 8), None, None), "index": INDEX},
        {**COMMON, **SHARDS, **PROMPTS, "text_length": (2, SAMPLES)},
    ),
}  # fmt: skip

LIBRARY = ("bisect.py", "keyword.py", "token.py", "this.py", "stat.py", "struct.py", "sched.py", "queue.py", "heapq.py", "getopt.py", "shlex.py", "cmd.py")  # fmt: skip
"""Files of the standard library, of which some are held out by the hash of their names."""

STREAMS = {"language.HubText"}
"""Data modules without numbered samples; tests/tasks/language/test_language_data.py is theirs."""


def files_of(name: str) -> str:
    """The folder of the test data in which the shards of a data module lie."""
    return {
        "language.TokenShards": "tokens", "language.TextPassages": "tokens", "diffusion.LatentShards": "latents", "text_to_image.ImageLatentShards": "encoded",
        "video.VideoLatentShards": "encoded-clips", "video.VideoShards": "videos",
        "video.VideoFolders": "video-files",
    }.get(name, "pictures")  # fmt: skip


def picture(seed: int) -> bytes:
    """Black on its left, white on its right, noise between."""
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 36, 3), dtype=np.uint8)
    pixels[:, :14], pixels[:, 22:] = 0, 255
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def members(kind: str, seed: int, videos: list[bytes]) -> dict[str, Any]:
    """A sample; a latent of a posterior without spread has the mean of its number."""
    captions = b'{"caption": "picture %d", "second": "again %d"}' % (seed, seed)
    text = array_bytes(torch.full((3, 8), float(seed)).half())
    if kind == "pictures":
        return {"png": picture(seed), "json": captions, "cls": seed % 3}
    if kind == "videos":
        return {"mp4": videos[seed % len(videos)], "json": captions}
    if kind == "latents":
        moments = torch.zeros(8, 4, 4)
        moments[:4] = seed
        moments[0] = -1
        flipped = moments.clone()
        flipped[1] = 50
        return {"latent.npy": array_bytes(moments.half()), "flip.npy": array_bytes(flipped.half()), "cls": seed % 3}
    latent = torch.full((4, 2, 3) if kind == "encoded" else (4, 2, 2, 3), seed / 25).half()
    latent[0], latent[1] = -1, 1
    return {"latent.npy": array_bytes(latent), "text.npy": text}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of every kind: ``KIND/train``, ``KIND/val`` and ``KIND/other``."""
    root = tmp_path_factory.mktemp("data")
    videos = [video_file(root / f"{seed}.mp4", frames=8, seed=seed).read_bytes() for seed in range(3)]
    for kind in ("pictures", "videos", "latents", "encoded", "encoded-clips"):
        for part, first, count, per_shard in (("train", 0, TRAIN, 5), ("val", TRAIN, VAL, 4), ("other", 1, TRAIN, 5)):
            made_with = {
                "latents": {"scale": 0.5},
                "encoded": {"text_length": 5},
                "encoded-clips": {"text_length": 5},
            }.get(kind, {})
            numbers = range(first, first + count)
            write_shards(numbers, lambda n, kind=kind: members(kind, n, videos), root / kind / part, part, per_shard, made_with=made_with)  # type: ignore[misc]  # fmt: skip
    for part, first, count in (("train", 0, TRAIN), ("val", TRAIN, VAL), ("other", 1, TRAIN)):
        folder = root / "video-files" / part
        folder.mkdir(parents=True)
        for number in range(first, first + count):
            (folder / f"{number:02}.mp4").write_bytes(videos[number % len(videos)])
    tokenizer = train_tokenizer(SENTENCES, 310)
    for number, part in enumerate(("train", "val", "other")):
        text = root / f"{part}.jsonl"
        text.write_text(
            "".join(
                f'{{"text": "Number {n} of {n * n}", "copy": "Copy {n} of {n}"}}\n' for n in range(number, 40 + number)
            )
        )
        write_token_shards(root / "tokens" / part, [str(text)], tokenizer, part, run_characters=100, runs_per_shard=2)
    (root / "tokens/prompts.txt").write_text("one\n")
    (root / "prompts.txt").write_text("one\n")
    tokenizer.save_pretrained(root / "tokens/tokenizer")
    return root


class Position:
    """The parts of a trainer that say where a run stands and which share of the samples is this process's."""

    def __init__(self, rank: int = 0, world: int = 1, trained: int = 0, steps: int = 1_000_000) -> None:
        self.distributed_sampler_kwargs = {"rank": rank, "num_replicas": world}
        self.num_training_batches, self.overfit_batches = steps, 0.0
        total = SimpleNamespace(processed=trained)
        self.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(total=total)))
        self.state = SimpleNamespace(fn=None)


@pytest.fixture(params=MODULES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make(name: str, world: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the data module with its options and others; the standard library is a few of its files."""
    library = [Path(ast.__file__).with_name(file) for file in sorted(LIBRARY)]
    monkeypatch.setattr(stdlib, "stdlib_files", lambda: library)
    domain, _, kind = name.partition(".")
    data_class = getattr(importlib.import_module(f"mhla_tasks.{domain}"), kind)
    place = world / files_of(name)

    def at(value: Any) -> Any:
        return value.format(place) if isinstance(value, str) else value

    def made(trainer: Any = None, **options: Any) -> Any:
        given = {"batch_size": 6, "seed": 3, **MODULES[name].options, **options}
        data = data_class(**{key: at(value) for key, value in given.items()})
        data.trainer = trainer
        return data

    return made


def batches(loader: Any, count: int = 2) -> list[dict[str, Any]]:
    found = []
    for batch in loader:
        found.append(batch)
        if len(found) == count:
            break
    return found


def same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(two, Tensor) and torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(value, two[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def training(data: Any) -> list[dict[str, Any]]:
    return batches(data.train_dataloader())


def held_out(data: Any) -> list[dict[str, Any]]:
    """The first batch, and the last sample, of the validation data."""
    source = data.source("validate")
    return [*batches(data.val_dataloader(), 1), source[len(source) - 1]]


def test_every_data_module_is_in_the_table() -> None:
    for module in pkgutil.walk_packages(mhla_tasks.__path__, "mhla_tasks."):
        if module.name.rpartition(".")[2] in ("data", "passages", "recall"):
            importlib.import_module(module.name)

    def below(kind: type) -> set[type]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    kinds = [kind for kind in below(ResumableDataModule) if kind.__module__.startswith("mhla_tasks.")]
    exported = [kind for kind in kinds if hasattr(sys.modules[".".join(kind.__module__.split(".")[:2])], kind.__name__)]
    concrete = [kind for kind in exported if not {"source", "samples", "windows", "questions", "clips"} & _open(kind)]
    assert {f"{kind.__module__.split('.')[1]}.{kind.__name__}" for kind in concrete} == {*MODULES, *STREAMS}


def _open(kind: type) -> set[str]:
    """Methods of a class that its subclasses have to implement, and the entries of classes that are bases alone."""
    methods = {
        name
        for name in ("samples", "windows", "questions", "clips")
        if "raise NotImplementedError" in _code(kind, name)
    }
    source = "raise NotImplementedError" in _code(kind, "source")
    annotated = {"command", "extension"} & {
        name for base in kind.__mro__ for name in vars(base).get("__annotations__", {})
    }
    missing = any(not hasattr(kind, name) for name in annotated)
    return methods | ({"source"} if source or missing else set())


def _code(kind: type, name: str) -> str:
    method = getattr(kind, name, None)
    return inspect.getsource(method) if method is not None else ""


def test_every_option_is_in_the_table(name: str, make: Any) -> None:
    parameters = set(inspect.signature(type(make())).parameters)
    assert parameters == set(MODULES[name].changes), "say in MODULES what the option changes"


def test_samples_have_their_types_shapes_and_ranges(name: str, make: Any) -> None:
    """Over the first fifty samples of each stage; both ends of a range occur."""
    data = make()
    for stage in ("train", "validate", "test"):
        source = data.source(stage)
        samples = [source[index] for index in range(min(len(source), 50))]
        for key, (kind, shape, low, high) in MODULES[name].contents.items():
            values = [sample[key] for sample in samples]
            if not isinstance(kind, torch.dtype):
                assert {type(value) for value in values} == {kind}, key
                if kind is str:
                    assert all(values)
                    continue
            elif name == "language.Needle" and stage != "train":
                shape = (2 * shape[0],)
            tensors = [torch.as_tensor(value) for value in values]
            assert {tuple(tensor.shape) for tensor in tensors} == {shape}, key
            if isinstance(kind, torch.dtype):
                assert {tensor.dtype for tensor in tensors} == {kind}, key
            together = torch.stack(tensors).double()
            least, most = float(together.min()), float(together.max())
            if low is not None:
                assert least >= low - 1e-5, (stage, key)
            if high is not None:
                assert most <= high + 1e-5, (stage, key)
            if kind == torch.float32 and low is not None and high is not None and "Latent" not in name:
                slack = 0.02 * (high - low)
                assert (least, most) == (pytest.approx(low, abs=slack), pytest.approx(high, abs=slack)), (stage, key)
        assert all(set(sample) == set(MODULES[name].contents) for sample in samples)
        assert [int(sample.get("index", number)) for number, sample in enumerate(samples)] == list(range(len(samples)))


class Numbers:
    """The numbers of the samples in place of the samples; of many in memory only the first."""

    def __init__(self, source: Any) -> None:
        alone = len(source.shard_sizes) == 1
        self.shard_sizes = [min(len(source), 25)] if alone else source.shard_sizes
        self.count = min(len(source), 25) if alone else len(source)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index}


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_each_sample_is_read_once_by_all_processes_together(name: str, make: Any, processes: int) -> None:
    """In an epoch of training, but for an incomplete last batch, and in every evaluation."""
    orders = []
    for epoch in (0, 1):
        seen: Counter[int] = Counter()
        total = len(Numbers(make().source("train")))
        steps = total // 6
        for rank in range(processes):
            data = make(Position(rank, processes, epoch * steps, steps))
            source = data.source("train")
            data.source = lambda stage, source=source: Numbers(source)
            read = [index for batch in data.train_dataloader() for index in batch["index"].tolist()]
            assert len(read) == steps * 6 // processes
            seen.update(read)
            orders.append(read)
        assert set(seen.values()) == {1}
        assert len(seen) == total // 6 * 6
        assert set(seen) <= set(range(total))
    assert orders[0] != orders[processes], "each epoch has an order of its own"
    for stage in ("val", "test"):
        seen, counts = Counter(), []
        for rank in range(processes):
            data = make(Position(rank, processes))
            source = data.source("validate")
            data.source = lambda stage, source=source: Numbers(source)
            found = list(getattr(data, f"{stage}_dataloader")())
            counts.append(len(found))
            seen.update(int(index) for batch in found for index in batch["index"][batch["valid"]])
        assert seen == Counter(range(len(Numbers(source))))
        assert len(set(counts)) == 1


@pytest.mark.parametrize("name", [name for name, case in MODULES.items() if "shards" in case.changes])
@pytest.mark.parametrize("window", [1, 2, None])
def test_shards_are_shuffled_without_a_loss(name: str, make: Any, window: int | None) -> None:
    data = make(Position(), shards={"shuffle_window": window}, batch_size=1)
    source = data.source("train")
    assert len(source.shard_sizes) >= 3
    assert sum(source.shard_sizes) == len(source)
    if name != "language.TokenShards":
        assert list(source.shard_sizes) == [5, 5, 2]
    data.source = lambda stage: Numbers(source)
    read = [int(batch["index"]) for batch in data.train_dataloader()]
    assert sorted(read) == list(range(len(source)))
    if window == 1:
        shards = np.repeat(np.arange(len(source.shard_sizes)), source.shard_sizes)[read]
        assert np.count_nonzero(np.diff(shards)) == len(source.shard_sizes) - 1, "one shard after the other"


def test_windows_of_several_runs_and_shards_hold_every_token(world: Path) -> None:
    place = world / "tokens"
    data = TokenShards(str(place / "train"), str(place / "val"), context=8, num_workers=0, batch_size=2)
    for stage in ("train", "validate"):
        windows = data.windows(stage)
        runs = windows.runs
        assert len(runs.run_shards) >= 3, "several shards"
        assert max(runs.run_shards) == 2, "several runs in a shard"
        wanted = [
            runs.read(run, start, 9)[0].tolist()
            for run, length in enumerate(runs.lengths)
            for start in range(0, (length - 1) // 8 * 8, 8)
        ]
        assert [windows[index]["tokens"].tolist() for index in range(len(windows))] == wanted
        ends = np.cumsum([0, *runs.run_shards])
        sizes = [sum((length - 1) // 8 for length in runs.lengths[a:b]) for a, b in pairwise(ends)]
        assert list(windows.shard_sizes) == sizes
        assert sum(sizes) == len(windows) == len(wanted)


def test_a_resumed_module_has_the_options_that_its_checkpoint_remembers(name: str, make: Any, tmp_path: Path) -> None:
    """All but those of predict, as plain values; made with them, it gives the same samples."""
    case = MODULES[name]
    data = make()
    torch.save(dict(data.hparams), tmp_path / "options.pt")
    kept = torch.load(tmp_path / "options.pt", weights_only=True)
    forgotten = {
        option for option, change in case.changes.items() if not isinstance(change, list) and change[1] == PREDICTION
    }
    assert set(kept) == set(case.changes) - forgotten
    again = type(data)(**kept)
    assert same(training(again), training(data))
    assert same(held_out(again), held_out(data))
    assert again.train_dataloader().state_dict() == data.train_dataloader().state_dict()


def test_a_changed_option_takes_effect_or_is_rejected(name: str, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    """On resume: the samples change, or the run does not resume; and the log names the option."""
    caplog.set_level(logging.INFO, "lightning_mhla")
    before = make()
    order, trained, validated = before.train_dataloader().state_dict(), training(before), held_out(before)
    memory = dict(before.hparams)
    for option, changes in MODULES[name].changes.items():
        for value, effect in changes if isinstance(changes, list) else [changes]:
            caplog.clear()
            data = make(**{option: value})
            log_changed_options("data", memory, data.hparams)
            if effect == PREDICTION:
                assert not caplog.messages
                assert same(training(data), trained)
                continue
            assert any(f"data.{option}" in message for message in caplog.messages), (option, "is not remembered")
            if effect == "rejected":
                with pytest.raises(ValueError, match=f"{option}="):
                    data.train_dataloader()
                continue
            if option == "num_workers" and name != "language.Needle":
                continue  # the loader is the same for all
            data.load_state_dict({**order, "batches_trained": 2})
            if effect == ORDER:
                with pytest.raises(ValueError, match=r"the checkpoint was trained with \w+=.*, this run has"):
                    data.train_dataloader()
                continue
            if effect != SAMPLES or data.train_dataloader().state_dict() == order:
                assert same(training(data), trained) is (effect in (HELD_OUT, NOTHING)), (option, value)
            assert same(held_out(data), validated) is (effect in (TRAINING, NOTHING)) or (option, effect) == (
                "train",
                SAMPLES,
            ), option


def test_prediction_has_its_own_options(name: str, make: Any) -> None:
    """They are for each call, so that a checkpoint does not remember them."""
    for option, changes in MODULES[name].changes.items():
        for value, effect in changes if isinstance(changes, list) else [changes]:
            if effect != PREDICTION:
                continue
            assert option not in make(**{option: value}).hparams
            if option == "predict_dir":
                with pytest.raises(ValueError, match=r"predict needs images: --data\.predict_dir=FOLDER"):
                    make().source("predict")
            elif option == "prompts" and name.startswith("language"):
                with pytest.raises(ValueError, match=r"predict needs prompts: --data\.prompts=FILE"):
                    make().source("predict")
            elif option == "samples":
                count = 30 if "Digit" in name or "Mnist" in name else 9
                assert len(make(**{option: value}).source("predict")) == count
