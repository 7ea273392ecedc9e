"""The classification domain: shards to a trained model, metrics that count, options of the trainer.

Longer than other files: one domain, from its data to its export.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grouped import grouped
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from mhla_tasks.classification import Digits, ImageClassifier, ImageNetShards, VisionTransformer
from mhla_tasks.classification.base import Classifier, MixupConfig
from mhla_tasks.classification.data import AugmentConfig
from mhla_tasks.classification.prepare import images_to_shards
from mhla_tasks.commandline import registry
from PIL import Image
from processes import fork_server
from torch.utils.data import DataLoader

from lightning_mhla import AttentionConfig
from lightning_mhla.callbacks import LearningCurves
from lightning_mhla.data import ShardReader
from lightning_mhla.data.pack import Packing
from lightning_mhla.training.optim import OptimizerConfig, parameter_groups
from lightning_mhla.training.options import TrainingOptions

CONSTANT = OptimizerConfig(schedule="constant")
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def classifier(**options: Any) -> ImageClassifier:
    defaults: dict[str, Any] = {
        "attention": AttentionConfig(block_grid=[2, 2]),
        "num_classes": 10,
        "image_size": 8,
        "channels": 1,
        "patch_size": 2,
        "dim": 16,
        "depth": 1,
        "heads": 2,
    }
    return ImageClassifier(**grouped(**{**defaults, **options}))


def photo_folder(folder: Path, classes: int = 2, each: int = 6) -> Path:
    """Write folders of PNG and JPEG photographs, one for each class, each with its own color."""
    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True)
        for number in range(each):
            pixels = np.full((40, 48, 3), 40 + 150 * label, dtype=np.uint8) + np.uint8(number)
            suffix = "png" if number % 2 else "jpg"
            Image.fromarray(pixels).save(folder / f"class{label}" / f"{number}.{suffix}")
    return folder


def test_the_command_makes_shards_that_hold_every_image(tmp_path: Path) -> None:
    source = photo_folder(tmp_path / "photos")
    command = partial(fork_server().run, "prepare", "images", module="mhla_tasks")
    status, said = command(str(source), str(tmp_path / "shards"), "--per_shard", "5")
    assert status == 0
    assert "12 images in 3 shards" in " ".join(said.split())
    assert (tmp_path / "shards/train-classes.txt").read_text() == "class0\nclass1\n"
    reader = ShardReader(sorted((tmp_path / "shards").glob("*.tar")))
    found = set()
    for index in range(len(reader)):
        extension = reader.extension(index, ("jpg", "png"))
        found.add((int(reader.read(index, "cls")), reader.read(index, extension)))
    want = {(label, path.read_bytes()) for label in range(2) for path in (source / f"class{label}").iterdir()}
    assert found == want
    assert command("absent", "x") == (1, "error: absent must hold one folder of images for each class\n")


def test_the_command_leaves_out_what_is_no_whole_image(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = photo_folder(tmp_path / "photos")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(source / "class0/cut.jpg")
    (source / "class0/cut.jpg").write_bytes((source / "class0/cut.jpg").read_bytes()[:-400])
    (source / "class1/none.png").write_bytes(b"no image")
    command = [str(source), str(tmp_path / "shards"), "--per-shard", "5"]
    registry.run("prepare images", command)
    assert "12 images in 3 shards" in (printed := " ".join(capsys.readouterr().out.split()))
    assert "; 2 images skipped (" in printed
    assert all(f"skipped: {source}/{name}: the image" in caplog.text for name in ("class0/cut.jpg", "class1/none.png"))
    assert len(ShardReader(sorted((tmp_path / "shards").glob("*.tar")))) == 12
    with pytest.raises(SystemExit, match="broken samples: 2, more than --max_skipped 1"):
        registry.run("prepare images", [command[0], str(tmp_path / "other"), "--max_skipped=1"])


def test_a_model_learns_from_shards(tmp_path: Path) -> None:
    images_to_shards(photo_folder(tmp_path / "photos"), Packing(tmp_path, per_shard=5))
    data = ImageNetShards(
        str(tmp_path),
        str(tmp_path),
        batch_size=4,
        num_workers=0,
        image_size=32,
        num_classes=2,
        augment=AugmentConfig(auto_augment=None, random_erasing=0.0, color_jitter=0.0),
    )
    model = classifier(
        num_classes=2, image_size=32, channels=3, patch_size=8, mixup=MixupConfig(mixup=0.1, cutmix=0.1, prob=0.2)
    )
    trainer = Trainer(max_epochs=8, **QUIET)
    trainer.fit(model, datamodule=data)
    assert trainer.callback_metrics["val/accuracy"] == 1.0
    assert trainer.callback_metrics["val/samples"] == 12
    for evaluate in (trainer.validate, trainer.test):
        (result,) = evaluate(model, datamodule=data, verbose=False)
        assert {value for name, value in result.items() if name.endswith("samples")} == {12}


def test_skipped_images_are_counted_in_the_log(tmp_path: Path) -> None:
    photos = photo_folder(tmp_path / "photos")
    (photos / "class1" / "3.png").write_bytes(b"no image")
    good = photo_folder(tmp_path / "good")
    data = ImageNetShards(str(photos), str(good), batch_size=4, num_workers=0, image_size=32, num_classes=2)
    trainer = Trainer(max_epochs=2, **QUIET)
    trainer.fit(classifier(num_classes=2, image_size=32, channels=3, patch_size=8), datamodule=data)
    assert trainer.callback_metrics["data/skipped"] == 1, "one image, in two epochs"


def test_a_run_on_shards_from_python_can_be_resumed(tmp_path: Path) -> None:
    images_to_shards(photo_folder(tmp_path / "photos"), Packing(tmp_path, per_shard=5))

    def fit(epochs: int, resume: Path | None = None) -> dict[str, torch.Tensor]:
        data = ImageNetShards(str(tmp_path), str(tmp_path), batch_size=4, num_workers=0, image_size=32, num_classes=2)
        model = classifier(num_classes=2, image_size=32, channels=3, patch_size=8, optimizer=CONSTANT)
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        trainer = Trainer(max_epochs=epochs, callbacks=[keep], **{**QUIET, "enable_checkpointing": True})
        trainer.fit(model, datamodule=data, ckpt_path=resume, weights_only=True)
        return model.state_dict()

    whole = fit(2)
    again = fit(2, tmp_path / "epoch=0.ckpt")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize(("batch", "limit"), [(7, None), (360, None), (100, None), (50, 2)])
def test_validation_counts_every_sample_once(batch: int, limit: int | None) -> None:
    data, model = Digits(batch_size=batch), classifier()
    trainer = Trainer(limit_val_batches=limit, **QUIET)
    (result,) = trainer.validate(model, datamodule=data, verbose=False)
    images, labels = data.source("validate").images, data.source("validate").labels
    count = len(labels) if limit is None else limit * batch
    assert result["val/samples"] == count
    model.eval()
    with torch.no_grad():
        scores = model(images[:count])
    assert result["val/accuracy"] == pytest.approx(
        float((scores.argmax(-1) == labels[:count]).float().mean()), abs=1e-6
    )
    assert result["val/loss"] == pytest.approx(
        float(torch.nn.functional.cross_entropy(scores, labels[:count])), abs=1e-5
    )
    top5 = (scores.topk(5).indices == labels[:count, None]).any(-1).float().mean()
    assert result["val/accuracy_top5"] == pytest.approx(float(top5), abs=1e-6)


def test_overfitting_sees_the_same_batches_in_every_epoch() -> None:
    data = Seen(batch_size=256)
    Trainer(max_epochs=3, overfit_batches=2, **QUIET).fit(classifier(), datamodule=data)
    assert data.read[:512] == data.read[512:1024] == data.read[1024:]


def test_another_length_of_the_epochs_is_refused_at_a_resume(tmp_path: Path) -> None:
    def fit(limit: float, epochs: int, resume: Path | None = None) -> None:
        keep = ModelCheckpoint(tmp_path, filename="last")
        options = {**QUIET, "enable_checkpointing": True, "max_epochs": epochs, "limit_train_batches": limit}
        Trainer(callbacks=[keep], **options).fit(
            classifier(optimizer=CONSTANT), datamodule=Digits(batch_size=256), ckpt_path=resume, weights_only=True
        )

    fit(3, 1)
    with pytest.raises(ValueError, match="epochs had 3 batches, this run's have 5"):
        fit(1.0, 2, tmp_path / "last.ckpt")


def test_resuming_without_the_average_goes_on_from_the_live_weights(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, filename="last")
    options = {**QUIET, "enable_checkpointing": True}
    averaged = classifier(ema_decay=0.9, optimizer=CONSTANT)
    Trainer(max_epochs=1, callbacks=[keep], **options).fit(averaged, datamodule=Digits(batch_size=256))
    model = classifier(optimizer=CONSTANT)

    class Start(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            live = torch.load(tmp_path / "last.ckpt", weights_only=True)["current_model_state"]
            assert all(torch.equal(live[name], tensor) for name, tensor in pl_module.state_dict().items())
            self.ran = True

    start = Start()
    Trainer(max_epochs=2, callbacks=[start], **QUIET).fit(
        model, datamodule=Digits(batch_size=256), ckpt_path=tmp_path / "last.ckpt", weights_only=True
    )
    assert start.ran


def test_a_checkpoint_of_other_blocks_is_refused() -> None:
    theirs = classifier()
    ours = classifier(attention=AttentionConfig(block_grid=[4, 1]))
    with pytest.raises(ValueError, match=r"attention block_grid \[2, 2\], this run asks for \[4, 1\]"):
        ours.on_load_checkpoint({"hyper_parameters": dict(theirs.hparams), "state_dict": theirs.state_dict()})


def test_mixup_of_an_odd_batch_is_refused() -> None:
    model = classifier(mixup=MixupConfig(mixup=0.2))
    with pytest.raises(ValueError, match="each process has 5"):
        Trainer(max_steps=1, **QUIET).fit(model, datamodule=Digits(batch_size=5))


class Seen(Digits):
    """Data module of digits that records the images that a run reads."""

    def source(self, stage: str) -> Any:
        source = super().source(stage)
        if stage == "train":
            self.read = read = []
            plain = type(source).__getitem__

            class Noting(type(source)):  # type: ignore[misc]
                def __getitem__(self, index: int) -> dict[str, Any]:
                    read.append(index)
                    return plain(self, index)

            source.__class__ = Noting
        return source


@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        ({"max_epochs": 2, "accumulate_grad_batches": 3}, 2),
        ({"max_epochs": 2, "val_check_interval": 0.5}, 2),
        ({"max_steps": 10}, 2),
        ({"max_epochs": 3, "limit_train_batches": 2}, 3),
        ({"max_epochs": 3, "limit_train_batches": 0.5}, 3),
    ],
    ids=["accumulate", "validate inside", "max steps", "limited", "limited to a share"],
)
def test_no_sample_comes_twice_in_an_epoch(options: dict[str, Any], epochs: int) -> None:
    data = Seen(batch_size=256)
    Trainer(**options, **QUIET).fit(classifier(), datamodule=data)
    per_epoch = len(data.read) // epochs
    passes = [data.read[i * per_epoch : (i + 1) * per_epoch] for i in range(epochs)]
    for number, seen in enumerate(passes):
        assert len(set(seen)) == len(seen) == per_epoch, f"epoch {number} repeats a sample"
    assert len({tuple(seen) for seen in passes}) == epochs, "two epochs in one order"


def test_the_average_is_what_is_validated_and_saved(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, filename="last", save_top_k=1)
    model = classifier(ema_decay=0.99)
    trainer = Trainer(max_epochs=2, callbacks=[keep], **{**QUIET, "enable_checkpointing": True})
    trainer.fit(model, datamodule=Digits(batch_size=256))
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    average, live = content["state_dict"], content["current_model_state"]
    moved = [
        name for name in average if average[name].is_floating_point() and not torch.equal(average[name], live[name])
    ]
    assert len(moved) > 10, "the saved weights are not the average"
    again = ImageClassifier.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    (result,) = Trainer(**QUIET).validate(again, datamodule=Digits(batch_size=256), verbose=False)
    assert result["val/loss"] == pytest.approx(float(trainer.callback_metrics["val/loss"]), abs=1e-6)


def test_layer_decay_reaches_the_layers_of_the_model() -> None:
    model = classifier(depth=2, optimizer=OptimizerConfig(lr=1.0, layer_decay=0.5))
    groups = parameter_groups(model.network, model.optimizer_config, model._layer_names())
    rate = {id(p): group["lr"] for group in groups for p in group["params"]}
    network = model.network
    below = [network.position, network.stem.proj.weight]
    blocks = [block.mlp.fc1.weight for block in network.backbone.blocks]
    above = [network.backbone.norm.weight, network.head.weight]
    assert [rate[id(p)] for p in (*below, *blocks, *above)] == [0.125, 0.125, 0.25, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    "options",
    [{"limit_train_batches": 0}, {"log_every_n_steps": 0}, {"fast_dev_run": True}],
    ids=lambda o: next(iter(o)),
)
def test_options_at_their_edge(options: dict[str, Any]) -> None:
    model = classifier()
    trainer = Trainer(max_epochs=1, callbacks=[LearningCurves()], **{**QUIET, **options})
    trainer.fit(model, datamodule=Digits(batch_size=256))
    assert trainer.state.finished


def test_mixing_stays_within_its_bounds_while_training() -> None:
    model = classifier()
    Trainer(max_epochs=1, **QUIET).fit(model, datamodule=Digits(batch_size=128))
    coefficients = model.network.backbone.blocks[0].attn.mixing()
    assert coefficients.min() >= 1e-5
    assert coefficients.max() <= 1.0
    assert not torch.equal(coefficients, classifier().network.backbone.blocks[0].attn.mixing()), "nothing was learned"


def test_padding_the_image_keeps_it_in_the_middle() -> None:
    model = VisionTransformer(
        28, 3, AttentionConfig(block_grid=[4, 4]), dim=8, depth=1, heads=2, patch_size=2, pad_to=32
    )
    assert model.backbone.layout.grid == (16, 16)
    assert model.backbone.layout.operator_blocks == {"block_size": 16}
    assert model(torch.randn(2, 3, 28, 28)).shape == (2, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 3}, "patch_size=3 does not divide the image's side of 8 pixels"),
        ({"pad_to": 7}, "must exceed image_size=8 by an even number"),
        ({"size": "tiny"}, "sets dim, depth and heads"),
        ({"dim": None}, "give size"),
        ({"ema_decay": 1.0}, "must lie between 0 and 1"),
        ({"ema_batch": 0}, "ema_batch=0 must be a number of samples"),
        ({"class_names": ["a"]}, "1 names for num_classes=10"),
        ({"attention": AttentionConfig(block_grid=[5, 2])}, r"does not fit the token grid \(4, 4\)"),
    ],
)
def test_model_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        classifier(**options)


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="images of \\(9, 9\\) pixels do not fit the model, which has image_size=8"):
        classifier()(torch.randn(1, 1, 9, 9))


def test_labels_are_smoothed_as_asked() -> None:
    model = classifier(label_smoothing=0.3)
    model.log_loss = lambda loss, count: loss  # type: ignore[method-assign]
    torch.nn.init.normal_(model.network.head.weight)
    batch = {"image": torch.rand(4, 1, 8, 8), "label": torch.tensor([1, 2, 3, 9])}
    scores = model(batch["image"]).log_softmax(-1)
    wanted = -(0.7 * scores.gather(1, batch["label"][:, None])[:, 0] + 0.3 * scores.mean(-1)).mean()
    torch.testing.assert_close(model.training_step(batch, 0), wanted)


def test_mixed_labels_are_smoothed_too() -> None:
    model = classifier(label_smoothing=0.2, mixup=MixupConfig(mixup=0.5, prob=0.0))
    assert model.mixup is not None
    _, targets = model.mixup(torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 3]))
    torch.testing.assert_close(targets.min(1).values, torch.full((4,), 0.02))
    torch.testing.assert_close(targets.diagonal(), torch.full((4,), 0.82))


def test_samples_that_fill_up_a_batch_are_not_scored() -> None:
    """The last batch of several processes is filled up with samples that must not count."""
    model = classifier().eval()
    model.log = lambda *_, **__: None  # type: ignore[method-assign]
    batch = {"image": torch.rand(3, 1, 8, 8), "label": torch.tensor([1, 2, 2])}
    model.validation_step({**batch, "valid": torch.tensor([True, True, False])}, 0)
    assert float(model.val_metrics["samples"].compute()) == 2
    wanted = torch.nn.functional.cross_entropy(model(batch["image"][:2]), batch["label"][:2])
    torch.testing.assert_close(model.val_metrics["loss"].compute(), wanted)


def test_digits_are_left_alone_without_augmentation() -> None:
    plain = Digits(augment=False).source("train")
    assert torch.equal(plain[5]["image"], plain.images[5])


def test_every_look_at_a_digit_is_another() -> None:
    source = Digits().source("train")
    looks = torch.stack([source[5]["image"] for _ in range(20)])
    assert len({tuple(look.flatten().tolist()) for look in looks}) > 8


def test_the_mean_of_all_tokens_goes_to_the_head() -> None:
    network = classifier().network.eval()
    torch.nn.init.normal_(network.head.weight)
    seen: list[torch.Tensor] = []
    network.backbone.register_forward_hook(lambda module, args, out: seen.append(out))
    scores = network(torch.rand(2, 1, 8, 8))
    torch.testing.assert_close(scores, network.head(seen[0].mean(1)))


def test_zeros_are_put_around_the_image_evenly() -> None:
    model = VisionTransformer(
        28, 3, AttentionConfig(block_grid=[4, 4]), dim=8, depth=1, heads=2, patch_size=2, pad_to=32
    )
    seen: list[torch.Tensor] = []
    model.stem.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    images = torch.rand(2, 3, 28, 28)
    model(images)
    assert torch.equal(seen[0][:, :, 2:30, 2:30], images)
    assert seen[0].sum().item() == pytest.approx(images.sum().item(), rel=1e-5)


def test_warm_up_epochs_count_optimiser_steps() -> None:
    trainer = Trainer(max_epochs=2, accumulate_grad_batches=2, limit_val_batches=0, **QUIET)
    model = classifier(optimizer=OptimizerConfig(warmup_epochs=1))
    trainer.fit(model, datamodule=Digits(batch_size=143))  # ten batches of 1,437 digits, so five steps
    assert trainer.lr_scheduler_configs[0].scheduler.lr_lambdas[0].warmup == 5


def test_the_average_takes_each_step_once_under_accumulation() -> None:
    from lightning_mhla.callbacks.averaging import ExponentialMovingAverage

    trainer = Trainer(max_steps=3, accumulate_grad_batches=2, limit_val_batches=0, **QUIET)
    trainer.fit(classifier(ema_decay=0.9), datamodule=Digits(batch_size=120))
    (average,) = [each for each in trainer.callbacks if isinstance(each, ExponentialMovingAverage)]
    assert average._steps == trainer.global_step == 3


def test_the_average_follows_the_size_of_the_batch() -> None:
    from lightning_mhla.callbacks.averaging import ExponentialMovingAverage

    trainer = Trainer(max_steps=1, limit_val_batches=0, accumulate_grad_batches=2, **QUIET)
    trainer.fit(classifier(ema_decay=0.9, ema_batch=60), datamodule=Digits(batch_size=60))
    (average,) = [each for each in trainer.callbacks if isinstance(each, ExponentialMovingAverage)]
    assert callable(average.decay)
    assert average.decay() == pytest.approx(0.81)


def test_every_step_draws_numbers_of_its_own() -> None:
    class Draw(Callback):
        def __init__(self) -> None:
            self.drawn: list[float] = []

        def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: torch.Tensor) -> None:
            self.drawn.append(float(torch.rand(())))

    draw = Draw()
    trainer = Trainer(max_epochs=2, callbacks=[draw], limit_val_batches=0, **QUIET)
    trainer.fit(classifier(), datamodule=Digits(batch_size=256))
    assert len(set(draw.drawn)) == len(draw.drawn) == 10


PLAIN = AugmentConfig(auto_augment=None, random_erasing=0.0, color_jitter=0.0)


def of_photos(**options: Any) -> ImageClassifier:
    return classifier(**{"num_classes": 2, "image_size": 32, "channels": 3, "patch_size": 8, **options})


def photos(folder: Path, names: tuple[str, str], **options: Any) -> ImageNetShards:
    """Write photographs of two classes with the given names, and return their data module."""
    photo_folder(folder)
    for label, name in enumerate(names):
        (folder / f"class{label}").rename(folder / name)
    defaults: dict[str, Any] = {"batch_size": 4, "num_workers": 0, "image_size": 32, "augment": PLAIN}
    return ImageNetShards(str(folder), str(folder), **{**defaults, **options})


def test_a_second_fit_has_the_names_and_the_preprocessing_of_its_own_data(tmp_path: Path) -> None:
    model, trainer = of_photos(), Trainer(max_steps=1, **QUIET)
    trainer.fit(model, datamodule=photos(tmp_path / "first", ("cat", "dog")))
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    again = ImageClassifier.load_from_checkpoint(tmp_path / "first.ckpt", weights_only=True)
    assert again.class_names == ["cat", "dog"]
    second = photos(tmp_path / "second", ("apple", "pear"))
    Trainer(max_steps=1, **QUIET).fit(again, datamodule=second)
    assert again.class_names == ["apple", "pear"]
    loader = DataLoader([{"image": torch.rand(3, 32, 32), "label": 1}])
    Trainer(max_steps=1, **QUIET).fit(again, train_dataloaders=loader)
    assert again.class_names == ["0", "1"]
    assert again.preprocessing is None, "that of the earlier data would transform images wrongly"


class OwnClassifier(Classifier):
    """Classifier of a user, whose constructor has no option for the names of classes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(3, None, 0.0, MixupConfig(), TrainingOptions())
        self.save_hyperparameters()
        self.network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, width), torch.nn.Linear(width, 3))


def test_a_classifier_of_the_user_has_no_option_for_names(tmp_path: Path) -> None:
    loader = DataLoader([{"image": torch.rand(3, 2, 2), "label": 1}])
    trainer = Trainer(max_steps=1, **QUIET)
    trainer.fit(OwnClassifier(), train_dataloaders=loader)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    again = OwnClassifier.load_from_checkpoint(tmp_path / "own.ckpt", weights_only=True)
    assert again.class_names == ["0", "1", "2"]


def test_numbers_of_classes_and_channels_are_those_of_the_data(tmp_path: Path) -> None:
    message = r"model\.num_classes=5 does not fit the data, which has 2 classes; give --model\.num_classes=2, or the 5 classes"
    with pytest.raises(ValueError, match=message):
        Trainer(max_steps=1, **QUIET).fit(of_photos(num_classes=5), datamodule=photos(tmp_path, ("cat", "dog")))
    for option, wanted in (({"num_classes": 5}, "num_classes=10"), ({"channels": 3}, "channels=1")):
        with pytest.raises(ValueError, match=f"does not fit the data, which has {wanted}"):
            Trainer(max_steps=1, **QUIET).fit(classifier(**option), datamodule=Digits(batch_size=64))


def test_an_unknown_augmentation_is_named(tmp_path: Path) -> None:
    data = photos(tmp_path, ("cat", "dog"), augment=AugmentConfig(auto_augment="rand-q9"))
    with pytest.raises(
        ValueError, match=r"augment\.auto_augment='rand-q9' is not a policy of timm \(Unknown RandAugment"
    ):
        data.source("train")


def test_mixing_leaves_the_batch_alone() -> None:
    images = torch.rand(4, 1, 8, 8)
    unmixed = images.clone()
    mixed, _ = classifier(mixup=MixupConfig(mixup=0.8)).mixed(images, torch.arange(4))
    assert torch.equal(images, unmixed)
    assert not torch.equal(mixed, unmixed)


@pytest.mark.parametrize("mixup", [0.0, 0.8])
def test_the_loss_of_half_precision_is_not_rounded(mixup: float) -> None:
    model = classifier(mixup=MixupConfig(mixup=mixup))
    scores = torch.randn(64, 10, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.eye(10)[torch.arange(64) % 10] if mixup else torch.arange(64) % 10
    loss = model.label_loss(scores, labels)
    assert loss.dtype == torch.float32
    targets = labels.double() if mixup else labels
    torch.testing.assert_close(loss.double(), torch.nn.functional.cross_entropy(scores.double(), targets))
    assert model.label_loss(scores.double(), labels).dtype == torch.float64


def test_images_that_a_limit_leaves_out_are_not_called_broken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(5):
        Image.new("L", (8, 8), 20 * number).save(tmp_path / f"{number}.png")
    trainer = Trainer(limit_predict_batches=1, default_root_dir=tmp_path / "run", **QUIET)
    trainer.predict(classifier(), datamodule=Digits(batch_size=2, predict_dir=str(tmp_path)), return_predictions=False)
    assert "3 files were not read (trainer.limit_predict_batches); their rows are empty" in caplog.text
