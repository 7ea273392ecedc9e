"""Base class of image classifiers: training, validation and prediction for any network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from lightning import Callback
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from lightning_mhla.callbacks import RunReport
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.system.ranges import check_range
from lightning_mhla.training.classes import NamesClasses
from lightning_mhla.training.options import TrainingOptions
from lightning_mhla.vision.preprocessing import Preprocessing
from mhla_tasks.classification.predict import PredictionTable
from mhla_tasks.classification.results import ClassResults

Stage = Literal["val", "test"]


@dataclass(frozen=True)
class MixupConfig:
    """Options of timm's mixup and cutmix, which mix the images and the labels of a batch.

    Args:
        mixup: parameter of the beta distribution that mixup draws its weights from; 0 disables mixup.
        cutmix: parameter of the beta distribution that determines the area of the patch that cutmix pastes; 0 disables cutmix.
        prob: probability that a batch is mixed.
        switch_prob: probability of using cutmix instead of mixup if both are enabled.

    Raises:
        ValueError: if a parameter is negative, or a probability is not between 0 and 1.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    prob: float = 1.0
    switch_prob: float = 0.5

    def __post_init__(self) -> None:
        check_range("mixup.", least=0, mixup=self.mixup, cutmix=self.cutmix)
        check_range("mixup.", least=0, most=1, prob=self.prob, switch_prob=self.switch_prob)


class Classifier(NamesClasses):
    """Base class of image classifiers: training loss, validation and test metrics, and predictions.

    A subclass sets ``self.network``, which computes class scores of images, at the end of its constructor.

    Args:
        num_classes: number of classes.
        class_names: class names to show in predictions, in the order of the labels. None uses the names in the data or, if
            there are none, the label numbers.
        label_smoothing: fraction of each label's probability that is spread evenly over all classes; 0 for none.
        mixup: options of mixup and cutmix, which mix images and labels; both are off by default.
        training: options of the optimizer, the moving average of the weights, activation checkpointing and compilation.

    Raises:
        ValueError: if ``num_classes`` is below :attr:`least_classes` (2, unless a subclass changes it) or is not the number of
            class names, or if ``label_smoothing`` is not between 0 and 1.
    """

    least_classes: ClassVar[int] = 2
    """Minimum number of classes that the training data must have."""

    usage: ClassVar[dict[str, str]] = {"Classify images": "lightning predict {run} --data.predict_dir=IMAGES"}
    network: Any
    output_names: tuple[str, ...] = ("head", "proj", "norm")
    train_batch = ("image", "label")
    evaluation_batch = ("image", "label")
    predict_batch = ("image", "index")

    def __init__(
        self,
        num_classes: int,
        class_names: list[str] | None,
        label_smoothing: float,
        mixup: MixupConfig,
        training: TrainingOptions,
    ) -> None:
        super().__init__(training)
        mixup = as_dataclass(MixupConfig, mixup)
        if num_classes < self.least_classes:
            raise ValueError(
                f"num_classes={num_classes} must be at least {self.least_classes}, the classes to tell apart"
            )
        if class_names is not None and len(class_names) != num_classes:
            raise ValueError(f"class_names lists {len(class_names)} names for num_classes={num_classes}")
        check_range(least=0, most=1, label_smoothing=label_smoothing)
        self.num_classes, self.label_smoothing = num_classes, label_smoothing
        self._shown_names = self._option_names = class_names
        self.preprocessing: Preprocessing | None = None
        self.mixup: Any = None
        if mixup.mixup or mixup.cutmix:
            from timm import data as timm_data  # imports all of timm's models

            self.mixup = timm_data.Mixup(
                mixup_alpha=mixup.mixup,
                cutmix_alpha=mixup.cutmix,
                prob=mixup.prob,
                switch_prob=mixup.switch_prob,
                label_smoothing=label_smoothing,
                num_classes=num_classes,
            )
        self.val_metrics, self.test_metrics = _metrics(num_classes), _metrics(num_classes)

    @override
    def configure_callbacks(self) -> list[Callback]:
        """Return the callbacks of the base class, and :class:`ClassResults` if a training run writes a report.

        :class:`ClassResults` records results of each class, which the report shows.
        """
        reports = any(isinstance(callback, RunReport) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        records_classes = [ClassResults()] if reports and self.trainer.state.fn == "fit" else []
        return [*records_classes, *super().configure_callbacks()]

    @override
    def prediction_callbacks(self) -> list[Callback]:
        return [PredictionTable()]

    @property
    def class_names(self) -> list[str]:
        """Class names to show in predictions, in the order of the labels.

        The option ``class_names`` takes precedence over the names in the training data. If neither exists, the label numbers
        serve as names.
        """
        return self._shown_names or self.label_names or [str(number) for number in range(self.num_classes)]

    @override
    def setup(self, stage: str) -> None:
        """Store the class names and the image preprocessing of the data module at the start of training.

        Names and preprocessing from an earlier fit, or from the checkpoint that the weights come from, are discarded.
        """
        super().setup(stage)
        if stage == "fit":  # Lightning restores those of a checkpoint to resume from after this hook
            preprocessing = getattr(self.trainer.datamodule, "preprocessing", None)  # type: ignore[attr-defined]
            self.preprocessing = preprocessing if isinstance(preprocessing, Preprocessing) else None
            self._shown_names = self._option_names

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the class names and the image preprocessing to a checkpoint."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["class_names"] = self.class_names
        checkpoint["preprocessing"] = None if self.preprocessing is None else self.preprocessing.as_dict()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the class names and the image preprocessing from a checkpoint.

        The option ``class_names`` takes precedence over the names in the checkpoint.
        """
        super().on_load_checkpoint(checkpoint)
        names, options = checkpoint.get("class_names"), checkpoint.get("preprocessing")
        if self._option_names is None and isinstance(names, list) and len(names) == self.num_classes:
            self._shown_names = [str(name) for name in names]
        if isinstance(options, dict):
            self.preprocessing = as_dataclass(Preprocessing, options)

    def forward(self, images: Tensor) -> Tensor:
        """Compute class scores (logits) of images.

        Args:
            images: images ``[B, channels, image_size, image_size]``.

        Returns:
            Class scores ``[B, num_classes]``.
        """
        return self.network(images)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Compute and log the mean cross-entropy of one batch, after mixup and cutmix if they are enabled.

        Args:
            batch: batch with ``image`` ``[B, channels, image_size, image_size]`` and ``label`` ``[B]`` int64.
            batch_idx: index of the batch; not used.

        Returns:
            Scalar loss.
        """
        images, labels = self.mixed(batch["image"], batch["label"])
        return self.log_loss(self.label_loss(self(images), labels), len(images))

    def mixed(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Apply mixup and cutmix to a batch if they are enabled.

        Args:
            images: images ``[B, channels, image_size, image_size]``.
            labels: class indices ``[B]`` int64.

        Returns:
            The images, and the labels: class probabilities ``[B, num_classes]`` if mixing is enabled, otherwise the given
            indices.

        Raises:
            ValueError: if mixing is enabled and the number of images is odd.
        """
        if self.mixup is None:
            return images, labels
        if len(images) % 2:
            raise ValueError(
                f"mixup and cutmix pair the images of a batch, but each process has {len(images)}; use a batch_size "
                "that gives each process an even number"
            )
        images, labels = self.mixup(images.clone(), labels)  # timm mixes in place, also in data that is read again
        return images, labels

    def label_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean cross-entropy of class scores and labels.

        Args:
            scores: class scores ``[B, num_classes]``.
            labels: labels that :meth:`mixed` returned: class probabilities ``[B, num_classes]`` if mixup or cutmix is enabled,
                otherwise class indices ``[B]``.

        Returns:
            Scalar loss.
        """
        # A loss in bfloat16 would have two or three digits. Scores in float64 keep their precision.
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if self.mixup is not None:  # mixed labels are probabilities that are smoothed already
            return torch.sum(-labels * F.log_softmax(scores, dim=-1), dim=-1).mean()
        return F.cross_entropy(scores, labels, label_smoothing=self.label_smoothing)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Update the validation metrics with the scores of one batch.

        Args:
            batch: batch with ``image`` ``[B, channels, image_size, image_size]``, ``label`` ``[B]`` int64 and ``valid`` ``[B]``
                bool. Images for which ``valid`` is False, such as padding, do not count.
            batch_idx: index of the batch; not used.

        Returns:
            A dict with the entry ``scores``, the class scores of all images, ``[B, num_classes]``.
        """
        return {"scores": self._evaluate(batch, "val")}

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Update the test metrics with the scores of one batch.

        Args:
            batch: batch with ``image`` ``[B, channels, image_size, image_size]``, ``label`` ``[B]`` int64 and ``valid`` ``[B]``
                bool. Images for which ``valid`` is False, such as padding, do not count.
            batch_idx: index of the batch; not used.
        """
        self._evaluate(batch, "test")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Compute the class probabilities of the images in a batch, except padding and images that cannot be decoded.

        Args:
            batch: batch with ``image`` ``[B, channels, image_size, image_size]``, ``index`` ``[B]`` (sample indices), ``valid``
                ``[B]`` bool, False for padding, and optionally ``broken`` ``[B]`` bool, True for images that cannot be decoded.
            batch_idx: index of the batch; not used.

        Returns:
            A dict with two entries for the n remaining images:

            * ``probability``: class probabilities, ``[n, num_classes]``.
            * ``index``: sample indices, ``[n]``.
        """
        probabilities = self(batch["image"]).float().softmax(-1)
        decoded = batch["valid"] & ~batch["broken"] if "broken" in batch else batch["valid"]
        return {"probability": probabilities[decoded], "index": batch["index"][decoded]}

    def _evaluate(self, batch: dict[str, Tensor], stage: Stage) -> Tensor:
        all_scores = self(batch["image"])
        valid = batch["valid"]
        scores, labels = all_scores[valid], batch["label"][valid]
        metrics = self.val_metrics if stage == "val" else self.test_metrics
        if len(labels):
            metrics["loss"].update(F.cross_entropy(scores.float(), labels, reduction="none"))
            metrics["samples"].update(torch.ones_like(labels))
            for name in ("accuracy", "accuracy_top5"):
                if name in metrics:
                    metrics[name].update(scores, labels)
        # Also if the batch is only padding: all processes have to log, because the metrics are synchronized between them.
        for name, metric in metrics.items():
            self.log(f"{stage}/{name}", metric, on_epoch=True, prog_bar=name == "accuracy", batch_size=len(valid))
        return all_scores


def _metrics(num_classes: int) -> MetricCollection:
    """Build the evaluation metrics: accuracy, top-5 accuracy (for more than five classes), mean loss and number of samples."""
    metrics: dict[str, Metric | MetricCollection] = {
        "accuracy": MulticlassAccuracy(num_classes, average="micro"),
        "loss": MeanMetric(nan_strategy="disable"),
        "samples": SumMetric(),
    }
    if num_classes > 5:
        metrics["accuracy_top5"] = MulticlassAccuracy(num_classes, top_k=5, average="micro")
    return MetricCollection(metrics, compute_groups=False)
