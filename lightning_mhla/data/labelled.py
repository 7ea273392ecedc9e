"""Classes of a data set of labeled samples: their number and names, and the labels of each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_mhla.data.classes import check_count
from lightning_mhla.data.images import class_names, shard_labels
from lightning_mhla.data.module import ShardSets
from lightning_mhla.data.remote import url_scheme


class LabelledShards:
    """Mixin for data modules that read labeled shards, or folders with one subfolder per class.

    The class names of the training data define the labels of the data set. A validation set with fewer classes keeps these
    labels. The class names of a trained model take precedence over those of the data.
    """

    shards: ShardSets
    trainer: Any
    _num_classes: int | None = None

    @property
    def num_classes(self) -> Any:
        """Number of classes: the option ``num_classes`` if it is set, otherwise the number of class names in the training data.

        Raises:
            ValueError: if the option is not set, and the training data does not name its classes.
        """
        if self._num_classes is None:
            names = self.class_names
            if names is None:
                raise ValueError(
                    f"the number of classes of {self.shards.locations['train']} is not known: shards without a "
                    "PREFIX-classes.txt do not state it; give --data.num_classes"
                )
            self._num_classes = len(names)
        return self._num_classes

    @num_classes.setter
    def num_classes(self, value: int | None) -> None:
        self._num_classes = None if value is None else check_count(value)

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes, in the order of their labels; None if they are not known."""
        trained: Sequence[str] | None = getattr(getattr(self.trainer, "lightning_module", None), "label_names", None)
        if trained is not None:
            return list(trained)
        try:
            return class_names(self.shards)
        except FileNotFoundError:  # validation does not need the training data
            return None

    def check_classes(self, stage: str) -> None:
        """Check that the option ``num_classes`` agrees with the class names of the training data.

        Args:
            stage: stage that begins; the check is skipped unless it is ``"fit"``.

        Raises:
            ValueError: if the option is set and differs from the number of class names.
        """
        names = class_names(self.shards) if stage == "fit" else None
        if names is not None and self._num_classes not in (None, len(names)):
            raise ValueError(contradiction(self.shards.locations["train"], names, f"num_classes={self._num_classes}"))

    def stage_classes(self, stage: str) -> list[str] | None:
        """Return the data set's class names, in label order, to which the classes of a stage are matched; None if not known.

        Raises:
            ValueError: if the training data does not name its classes, and the number of class folders of the stage is not the
                number of classes.
        """
        names, folder = self.class_names, self.shards.class_folder(stage)
        if names is None and folder is not None and stage != "train":
            folder_names = class_names(self.shards, stage) or []
            if len(folder_names) != self.num_classes:
                raise ValueError(
                    f"{folder} has folders for {len(folder_names)} of {self.num_classes} classes, and the training data does "
                    "not name its classes, so that labels cannot be matched; put PREFIX-classes.txt beside the training shards"
                )
        return names

    def stage_labels(self, stage: str) -> list[int] | None:
        """Map the labels in the shards of a stage to labels of the data set.

        Returns:
            List whose entry i is the label in the data set for label i in the shards; None if both are the same, or if class
            names are not known.
        """
        return shard_labels(self.shards, stage, self.stage_classes(stage))

    @classmethod
    def count_classes(cls, options: Mapping[str, Any]) -> list[str] | None:
        """Read the class names of the training data in a configuration.

        Args:
            options: arguments of the data module, with the location of the training data under ``train``.

        Returns:
            Names in the order of their labels; None if the data is remote, missing, or does not name its classes.
        """
        train = options.get("train")
        locations = train if isinstance(train, str) else [str(location) for location in train or ()]
        if not locations or any(
            url_scheme(location) for location in ([locations] if isinstance(locations, str) else locations)
        ):
            return None
        try:
            return class_names(ShardSets(locations, locations))
        except FileNotFoundError:
            return None  # the data module raises the error when it opens the data


def contradiction(where: object, names: Sequence[str], option: str) -> str:
    """Compose the error message for an option that contradicts the number of classes in the data.

    Args:
        where: location of the data.
        names: names of the classes in the data.
        option: option with its value, such as ``num_classes=10``.
    """
    examples = ", ".join(names[:5]) + (", .." if len(names) > 5 else "")
    finding = f"{where} holds {len(names)} classes ({examples})"
    return f"{finding}, but {option} is given; leave it out: the number follows from the data"
