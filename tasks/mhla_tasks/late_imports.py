"""Packages that Lightning imports whole for a name or two are imported when something else of them is asked for.

``torchmetrics`` alone brings torchvision, scipy and transformers, half of the time that a command needs to start. Here its
packages are put in place empty: a few names come from the modules that define them, and any other runs the package itself,
so that nothing is missing.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType, NoneType
from typing import Any

LATE: dict[str, dict[str, str]] = {
    "torchmetrics": {
        "__version__": "__about__",
        "CatMetric": "aggregation",
        "MaxMetric": "aggregation",
        "MeanMetric": "aggregation",
        "Metric": "metric",
        "MetricCollection": "collections",
        "MinMetric": "aggregation",
        "SumMetric": "aggregation",
    },
    "torchmetrics.functional": {},
    "torchmetrics.classification": {"MulticlassAccuracy": "accuracy"},
}
"""Names by package, and the module of it that defines each."""

FIRST = "torchmetrics.utilities"
"""Imports ``torchmetrics.metric`` in a circle, which works from this end only."""


class LatePackage(ModuleType):
    """A package whose own text runs when a name is asked for that no module of :data:`LATE` gives."""

    __spec__: ModuleSpec

    def __getattr__(self, name: str) -> Any:
        if module := LATE[self.__name__].get(name):
            if module != "__about__":
                import_module(FIRST)
            value = getattr(import_module(f"{self.__name__}.{module}"), name)
            setattr(self, name, value)
            return value
        if (name.startswith("__") and name != "__all__") or self.__dict__.get("_started"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self._started = True
        import_module(FIRST)
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def put_off_imports() -> None:
    """Put the packages of :data:`LATE` in place, those that are installed and not imported yet."""
    for name in LATE:
        parent = sys.modules.get(name.rpartition(".")[0])
        if name in sys.modules or type(parent) not in (LatePackage, NoneType):
            continue
        spec = PathFinder.find_spec(name, None if parent is None else parent.__path__)
        if spec is None or spec.loader is None:
            continue
        module = module_from_spec(spec)
        module.__class__ = LatePackage
        module.__dict__["_logger"] = logging.getLogger(name)
        sys.modules[name] = module
        if parent is not None:
            setattr(parent, name.rpartition(".")[2], module)
