"""Registration of classes as attributes of the module ``transformers``."""

from __future__ import annotations

import sys


def publish(name: str, kind: type) -> None:
    """Add a class to the module ``transformers``, where the library's server and pipelines look up classes by name.

    transformers executes its own ``__init__`` a second time when its processors are imported. Code that imported it earlier,
    such as the server, therefore holds a different module object than ``sys.modules`` does. The class is added to each of these
    objects.

    Args:
        name: name under which the class is looked up.
        kind: class to add.
    """
    import transformers

    server = sys.modules.get("transformers.cli.serving.model_manager")
    modules = [transformers, sys.modules["transformers"], *([] if server is None else [server.transformers])]
    for module in modules:
        setattr(module, name, kind)
