"""Packages that are imported whole for a name or two are imported when something else of them is asked for.

``torchmetrics`` alone brings torchvision, scipy and transformers, half of the time that a command needs to start. Here such
packages are put in place empty: a few names come from the modules that define them, and any other runs the package itself,
so that nothing is missing. Without this, a wrong option is reported after twice the time.
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
}
"""Names by package, and the module of it that defines each."""

PLOT = "torchmetrics.utilities.plot"
"""Imports matplotlib, for annotations and for a method that draws a metric."""

FIRST = "torchmetrics.utilities"
"""Imports ``torchmetrics.metric`` in a circle, which works from this end only."""


class LatePackage(ModuleType):
    """A package whose own text runs when a name is asked for that no module of :data:`LATE` gives."""

    __spec__: ModuleSpec

    def __getattr__(self, name: str) -> Any:
        if module := LATE.get(self.__name__, {}).get(name):
            if module != "__about__":
                _import_first(self.__name__)
            value = getattr(import_module(f"{self.__name__}.{module}"), name)
            setattr(self, name, value)
            return value
        if (name.startswith("__") and name != "__all__") or self.__dict__.get("_started"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self._started = True
        _import_first(self.__name__)
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def _plot(*given: Any, **named: Any) -> Any:
    """``plot_single_or_multi_val``, from the module itself."""
    module = sys.modules[PLOT]
    if module.__dict__["plot_single_or_multi_val"] is _plot:
        del module.__dict__["plot_single_or_multi_val"]
    return module.plot_single_or_multi_val(*given, **named)


def _import_first(package: str) -> None:
    if package.partition(".")[0] == FIRST.partition(".")[0]:
        import_module(FIRST)


@contextmanager
def without_collection() -> Iterator[None]:
    """Leave out the search for garbage while modules are imported: there is little, among many objects that stay."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def put_off_imports() -> None:
    """Put the packages of :data:`LATE` in place, those that are installed and not imported yet."""
    for name in LATE:
        package = name.rpartition(".")[0]
        parent = sys.modules.get(package)
        if name in sys.modules or type(parent) not in (LatePackage, NoneType):
            continue
        inside = PathFinder.find_spec(package) if package else None
        folders = inside.submodule_search_locations if inside else None
        spec = PathFinder.find_spec(name, folders) if folders or not package else None
        if spec is None or spec.loader is None:
            continue
        module = module_from_spec(spec)
        module.__class__ = LatePackage
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
