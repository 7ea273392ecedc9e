"""Deferred imports of large packages, such as torchmetrics and timm, of which few names are usually needed.

``import torchmetrics`` alone imports torchvision, scipy and transformers and takes half of a command's startup time. This
module replaces such packages in ``sys.modules`` with placeholders. A placeholder imports a few frequent names from the
submodules that define them. The first access to any other name imports the full package. Error messages for wrong options thus
appear in half the time.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    "timm": {},
    "torchvision.datasets": {},
    "torchvision.models": {},
}
"""Deferred packages, each with the names that are available without executing the package, and the modules that define them."""

PLOT = "torchmetrics.utilities.plot"
"""Module of torchmetrics that imports matplotlib, which is needed only to plot a metric."""

FIRST = "torchmetrics.utilities"
"""Module to import before ``torchmetrics.metric``, because the two import each other."""


class LatePackage(ModuleType):
    """Module that takes the place of a package until a name is used that requires the full package.

    A few frequent names are imported directly from the submodules that define them. The first access to any other name imports
    the full package.
    """

    __spec__: ModuleSpec

    def __getattr__(self, name: str) -> Any:
        if module := LATE.get(self.__name__, {}).get(name):
            if module != "__about__":
                _import_first(self.__name__)
            value = getattr(import_module(f"{self.__name__}.{module}"), name)
            setattr(self, name, value)
            return value
        # While the package executes, a name that it does not have yet must be an error, not start it a second time.
        if (name.startswith("__") and name != "__all__") or self.__dict__.get("_started"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self._started = True
        _import_first(self.__name__)
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def _plot(*arguments: Any, **options: Any) -> Any:
    """Import torchmetrics' ``plot_single_or_multi_val``, for which this function is a placeholder, and call it."""
    module = sys.modules[PLOT]
    if module.__dict__["plot_single_or_multi_val"] is _plot:
        del module.__dict__["plot_single_or_multi_val"]
    return module.plot_single_or_multi_val(*arguments, **options)


def _import_first(package: str) -> None:
    if package.partition(".")[0] == FIRST.partition(".")[0]:
        import_module(FIRST)


@contextmanager
def without_collection() -> Iterator[None]:
    """Context manager that disables garbage collection, to speed up imports.

    Imports create many objects and little garbage, so garbage collection during imports wastes time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def put_off_imports() -> None:
    """Defer the import of slow packages, such as torchmetrics and timm, until a name in them is used.

    Packages that are already imported, or not installed, are skipped.
    """
    for name in LATE:
        package = name.rpartition(".")[0]
        parent = sys.modules.get(package)
        # A package imports its submodules when it is executed. They can be deferred only if it has not been executed.
        if name in sys.modules or type(parent) not in (LatePackage, NoneType):
            continue
        inside = PathFinder.find_spec(package) if package else None
        folders = inside.submodule_search_locations if inside else None
        spec = PathFinder.find_spec(name, folders) if folders or not package else None
        if spec is None or spec.loader is None:
            continue
        module = module_from_spec(spec)
        module.__class__ = LatePackage
        # torchmetrics.utilities.prints imports this name from the package.
        module.__dict__["_logger"] = logging.getLogger(name)
        sys.modules[name] = module
        if parent is not None:
            setattr(parent, name.rpartition(".")[2], module)
    metrics = sys.modules.get("torchmetrics")
    if isinstance(metrics, LatePackage) and PLOT not in sys.modules:
        folder = [f"{path}/utilities" for path in metrics.__path__]
        spec = PathFinder.find_spec(PLOT, folder)
        if spec is not None and spec.loader is not None:
            module = module_from_spec(spec)
            module.__class__ = LatePackage
            module.__dict__.update(_AX_TYPE=Any, _PLOT_OUT_TYPE=Any, plot_single_or_multi_val=_plot)
            sys.modules[PLOT] = module
