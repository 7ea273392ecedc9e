"""Names of the classes that a model was trained on, saved in its checkpoints."""

from __future__ import annotations

from typing import Any

from lightning_mhla.data.classes import check_count
from lightning_mhla.training.module import TrainingModule


def known_classes(num_classes: int | None) -> int:
    """Check that the number of classes of a model is known and supported, and return it unchanged.

    Args:
        num_classes: number of classes; None if unknown.

    Raises:
        ValueError: if the number is None, below 1, or above 16,777,216.
    """
    if num_classes is None:
        raise ValueError(
            "num_classes is not known: it follows from data with a folder for each class, or shards with a "
            "PREFIX-classes.txt; otherwise give --model.num_classes"
        )
    return check_count(num_classes)


class NamesClasses(TrainingModule):
    """Base class of training modules that save the class names of the data, and check on resume that the names are the same.

    Attributes:
        label_names: names of the classes in the order of their labels; None if they are not known.
    """

    label_names: list[str] | None = None

    def setup(self, stage: str) -> None:
        """Read the names of the classes from the data module at the start of training. Other stages do not change them.

        Raises:
            ValueError: if the data has a different number of classes than the model.
        """
        super().setup(stage)
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]  # set when the data is attached
        if stage == "fit":
            self.label_names = None  # those of an earlier fit
            names = getattr(data, "class_names", None)
            number = self.hparams.get("num_classes")
            if names is not None and number is not None and len(names) != number:
                raise ValueError(
                    f"model.num_classes={number} does not fit the data, which has {len(names)} classes; give "
                    f"--model.num_classes={len(names)}, or the {number} classes that the model was trained on"
                )
            self.label_names = names

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the names of the classes in a checkpoint."""
        checkpoint["label_names"] = self.label_names

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the names of the classes from a checkpoint, and compare them with those of the training data.

        Raises:
            ValueError: if the classes of the training data, or their order, differ from those of the checkpoint.
        """
        super().on_load_checkpoint(checkpoint)
        names = checkpoint.get("label_names")
        if not isinstance(names, list):
            return
        names = [str(name) for name in names]
        if self.label_names is not None and names != self.label_names:
            lost, new = (sorted(set(a) - set(b)) for a, b in ((names, self.label_names), (self.label_names, names)))
            what = f"without {lost[:5]}, with {new[:5]}" if lost or new else "in another order"
            raise ValueError(
                f"the checkpoint was trained on {len(names)} classes, and the data has {len(self.label_names)}, {what}: labels "
                "would mean other classes. Bring the folders back, or start a new run from the weights "
                "(--model.pretrained)"
            )
        self.label_names = names
