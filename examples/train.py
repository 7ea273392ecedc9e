"""Complete training run in plain Python: data, model, trainer, fit, test, export and prediction. A minute on two CPU cores.

    python examples/train.py
    python examples/train.py --attention linear --epochs 5 --folder runs/linear

The digits of 8 x 8 pixels are part of scikit-learn. For your own data, pass a different data module: see docs/guides/data.md.
The command line (``lightning fit``) does the same from a YAML file, and adds run folders that resume, sweeps and clusters.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from mhla_tasks.classification import Digits, ImageClassifier, VisionShape, VisionTransformer
from mhla_tasks.tools.export import write_export
from PIL import Image

from lightning_mhla import AttentionConfig
from lightning_mhla.callbacks import LearningCurves
from lightning_mhla.data.digits import load_digits
from lightning_mhla.training import OptimizerConfig, TrainingOptions


def make_model(attention: str) -> ImageClassifier:
    """Build a vision transformer for the 8 x 8 pixels of a digit. Each pixel is a token, in 4 x 4 blocks of 2 x 2 tokens."""
    blocks = {"block_grid": [4, 4]} if attention == "mhla" else {}
    return ImageClassifier(
        attention=AttentionConfig(kind=attention, lepe=3, **blocks),
        num_classes=10,
        image_size=8,
        channels=1,
        shape=VisionShape(dim=64, depth=4, heads=4, patch_size=1, stem="conv", mlp_ratio=2.0),
        drop_path=0.1,
        label_smoothing=0.1,
        training=TrainingOptions(OptimizerConfig(lr=2e-3, weight_decay=0.05, warmup_epochs=2), ema_decay=0.99),
    )


def make_trainer(folder: Path, epochs: int, best: ModelCheckpoint) -> Trainer:
    """Build a trainer that writes checkpoints, a table of metrics, and a picture of their curves."""
    return Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=epochs,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[best, LearningRateMonitor(), LearningCurves()],
        default_root_dir=folder,
    )


def main() -> None:
    """Train and test a model, export it, and classify a digit with the exported model."""
    parser = argparse.ArgumentParser(description="Train a classifier of digits.")
    parser.add_argument("--attention", default="mhla", help="kind of attention: mhla, linear, softmax and others")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("runs/example"), help="folder for all files")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    seed_everything(arguments.seed)
    data = Digits(batch_size=64)
    model = make_model(arguments.attention)
    best = ModelCheckpoint(monitor="val/accuracy", mode="max", save_last=True, filename="best")
    trainer = make_trainer(arguments.folder, arguments.epochs, best)
    trainer.fit(model, data)

    (results,) = trainer.test(model, data, ckpt_path=best.best_model_path)
    print(f"accuracy on held-out digits: {results['test/accuracy']:.3f}")

    exported = arguments.folder / "exported"
    write_export(Path(best.best_model_path), exported, live=False, options={})
    print(f"exported to {exported}")

    classifier = VisionTransformer.from_pretrained(exported)  # as another program loads it
    images, labels = load_digits(train=False)
    digit = Image.fromarray((images[0, 0] * 255).byte().numpy())
    ((name, probability),) = classifier.predict(digit, top=1).items()
    print(f"a held-out digit {labels[0].item()} is classified as {name} with probability {probability:.2f}")


if __name__ == "__main__":
    main()
