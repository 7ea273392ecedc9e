"""Commands of this suite in processes of their own that need no start-up: forked from one that has imported everything.

The parent reads one JSON object a line, ``{"module", "arguments", "folder", "output", "environment", "kill_at"}``, forks a child
for it, and answers with the child's exit status (``-9`` where it was killed). ``kill_at`` is an optimiser step after which
the child kills itself with SIGKILL, before anything of the next one; ``kill_after_save`` one whose first checkpoint from then
on is the last thing that the child does.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

PRELOADED = (
    "mhla_tasks.cli",
    "mhla_tasks.classification",
    "mhla_tasks.diffusion.callbacks",
    "mhla_tasks.language.evaluation",
    "mhla_tasks.video",
    "lightning.pytorch.loggers",
    "lightning.pytorch.callbacks",
    "transformers.models.auto",
    "timm.data",
    "peft",
)


class ForkServer:
    """One parent process; commands run one after another."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "200"}
        environment.pop("PL_GLOBAL_SEED", None)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._lock = threading.Lock()

    def run(
        self,
        *arguments: str,
        module: str = "mhla_tasks.cli",
        folder: Path | None = None,
        kill_at: int | None = None,
        kill_after_save: int | None = None,
        processes: int = 1,
        **environment: str,
    ) -> tuple[int, str]:
        """Exit status of ``python -m module arguments`` in ``folder``, and what it printed.

        Several ``processes`` are started as torchrun starts them; the status is that of the first one that failed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        output = Path(folder or ".").resolve() / f".output-{os.getpid()}"
        asked = {
            "module": module, "arguments": arguments, "folder": str(folder or Path.cwd()), "output": str(output),
            "environment": environment, "kill_at": kill_at, "kill_after_save": kill_after_save, "processes": processes,
        }  # fmt: skip
        with self._lock:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            status = int(self._process.stdout.readline())
        text = output.read_text(errors="replace")
        output.unlink()
        return status, text

    def close(self) -> None:
        """End the parent."""
        self._process.kill()
        self._process.wait()


def _kill_after(step: int) -> None:
    """Have this process killed when the optimiser has made so many steps, all callbacks are done and the row is logged."""
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

    advance = _TrainingEpochLoop.on_advance_end

    def wrapped(loop: Any, *arguments: Any) -> None:
        advance(loop, *arguments)
        if loop.trainer.global_step >= step:
            os.kill(os.getpid(), signal.SIGKILL)

    _TrainingEpochLoop.on_advance_end = wrapped  # type: ignore[method-assign]


def _kill_after_save(step: int) -> None:
    """Have this process killed when the checkpoint of a step is on the disk, before anything else happens."""
    from lightning_mhla.checkpoint_io import WholeCheckpointIO

    save = WholeCheckpointIO.save_checkpoint

    def wrapped(io: Any, checkpoint: dict[str, Any], *arguments: Any, **options: Any) -> None:
        save(io, checkpoint, *arguments, **options)
        if checkpoint["global_step"] >= step:
            os.kill(os.getpid(), signal.SIGKILL)

    WholeCheckpointIO.save_checkpoint = wrapped  # type: ignore[method-assign]


def _child(asked: dict[str, Any]) -> None:
    stream = os.open(asked["output"], os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(stream, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(asked["folder"])
    os.environ.update(asked["environment"])
    sys.path[:0] = [os.environ["PATH_OF_TESTS"]] if "PATH_OF_TESTS" in os.environ else []
    sys.argv = [asked["module"], *asked["arguments"]]
    import torch

    torch.set_num_threads(1)
    if asked["kill_at"] is not None:
        _kill_after(asked["kill_at"])
    if asked["kill_after_save"] is not None:
        _kill_after_save(asked["kill_after_save"])
    sys.modules.pop(asked["module"], None)
    status = 1
    try:
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            sys.stderr.write(f"{stop.code}\n")
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _places(processes: int) -> list[dict[str, str]]:
    """What torchrun tells each of so many processes; nothing to one."""
    if processes == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes), "GROUP_RANK": "0",
        "LOCAL_WORLD_SIZE": str(processes), "TORCHELASTIC_RUN_ID": "tests",
    }  # fmt: skip
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _start(asked: dict[str, Any], place: dict[str, str]) -> int:
    child = os.fork()
    if child == 0:
        _child({**asked, "environment": {**asked["environment"], **place}})
    return child


def main() -> None:
    """The parent."""
    import importlib

    for name in PRELOADED:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        Path(asked["output"]).write_bytes(b"")
        children = [_start(asked, place) for place in _places(asked["processes"])]
        statuses = [0]
        while children:
            child, status = os.wait()
            children.remove(child)
            statuses.append(os.waitstatus_to_exitcode(status))
            if statuses[-1]:
                for other in children:  # they would wait for it
                    os.kill(other, signal.SIGTERM)
        answers.write(f"{next((status for status in statuses if status), 0)}\n")
        answers.flush()


if __name__ == "__main__":
    main()
