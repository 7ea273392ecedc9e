"""Classes that ``transformers`` is asked for by their names."""

from __future__ import annotations

import sys


def publish(name: str, kind: type) -> None:
    """Let the module ``transformers`` have a class, as ``transformers serve`` and pipelines look it up.

    transformers executes its own ``__init__`` a second time when its processors are imported, so that whatever imported it
    earlier, such as the server, holds another module object than ``sys.modules``.

    Args:
        name: name of the class there.
        kind: the class.
    """
    import transformers

    server = sys.modules.get("transformers.cli.serving.model_manager")
    modules = [transformers, sys.modules["transformers"], *([] if server is None else [server.transformers])]
    for module in modules:
        setattr(module, name, kind)
