"""Class names, number of classes and label mapping for data modules with labeled samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_mhla.data.classes import check_count, folder_classes
from lightning_mhla.data.images import class_names
from lightning_mhla.data.module import ShardSets
from lightning_mhla.data.remote import url_scheme


class LabelledShards:
    """Mixin for data modules that read labeled tar shards, or folders with one subfolder per class.

    Labels are matched by class name. The class names of the training data define the labels, so a class has the same label in a
    validation set that lacks some of the classes. If the trainer's model stores class names, such as those in its checkpoint,
    they take precedence over those of the training data.

    Attributes:
        shards: locations of the training and validation data, which the data module sets.
        trainer: trainer of the data module; None if it is not attached to one.
    """

    shards: ShardSets
    trainer: Any
    _num_classes: int | None = None

    @property
    def num_classes(self) -> Any:
        """Number of classes, an integer: the option ``num_classes`` if it is set, otherwise the number of class names.

        Raises:
            ValueError: if the option is not set and the class names are not known.
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
        """Class names in the order of their labels.

        The names come from the trainer's model if it stores any, as after loading a checkpoint, otherwise from the training
        data. The value is None if the training data is missing or does not name its classes.
        """
        trained: Sequence[str] | None = getattr(getattr(self.trainer, "lightning_module", None), "label_names", None)
        if trained is not None:
            return list(trained)
        try:
            return class_names(self.shards)
        except FileNotFoundError:  # validation does not need the training data
            return None

    def setup(self, stage: str) -> None:
        """Check before training that ``num_classes``, if set, equals the number of class names in the training data.

        Args:
            stage: stage of the trainer. Only ``"fit"`` is checked.

        Raises:
            ValueError: if the two numbers differ.
        """
        super().setup(stage)  # type: ignore[misc]  # of the data module
        names = class_names(self.shards) if stage == "fit" else None
        if names is not None and self._num_classes not in (None, len(names)):
            raise ValueError(contradiction(self.shards.locations["train"], names, f"num_classes={self._num_classes}"))

    def stage_classes(self, stage: str) -> list[str] | None:
        """Return the class names that define the labels of a stage, in the order of the labels.

        Args:
            stage: ``"train"``, ``"validate"`` or ``"test"``.

        Returns:
            Class names of the trainer's model if it stores any, as after loading a checkpoint, otherwise those of the training
            data; None if the training data is missing or does not name its classes.

        Raises:
            ValueError: if the class names are not known, and the stage has a number of class subfolders that differs from
                ``num_classes``, so that labels cannot be assigned.
        """
        names, folder = self.class_names, self.shards.class_folder(stage)
        if names is None and folder is not None and stage != "train":
            count = len(folder_classes(folder))
            if count != self.num_classes:
                raise ValueError(
                    f"{folder} has folders for {count} of {self.num_classes} classes, and the training data does "
                    "not name its classes, so that labels cannot be matched; put PREFIX-classes.txt beside the training shards"
                )
        return names

    @classmethod
    def count_classes(cls, options: Mapping[str, Any]) -> list[str] | None:
        """Read the class names of the training data that the arguments of a data module name, without creating the data module.

        Args:
            options: arguments of the data module by name. The entry ``train`` is the location of the training data.

        Returns:
            Class names in the order of their labels. None if ``train`` is missing, or if the training data is remote or does
            not name its classes.

        Raises:
            FileNotFoundError: if the training data does not exist.
        """
        train = options.get("train") or ()
        locations = [train] if isinstance(train, str) else [str(location) for location in train]
        if not locations or any(url_scheme(location) for location in locations):
            return None
        return class_names(ShardSets(locations, locations))


def contradiction(where: object, names: Sequence[str], option: str) -> str:
    """Compose the error message for an option that contradicts the number of classes in the data.

    Args:
        where: location of the data.
        names: names of the classes in the data.
        option: option and its value as the user gave them, such as ``num_classes=10``.
    """
    examples = ", ".join(names[:5]) + (", .." if len(names) > 5 else "")
    finding = f"{where} holds {len(names)} classes ({examples})"
    return f"{finding}, but {option} is given; leave it out: the number follows from the data"
