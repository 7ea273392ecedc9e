"""Python programs of this suite in processes of their own that need no start-up: forked from one that has the libraries.

The parent has imported what the product imports, and nothing of the product: a program that starts here is as new to it as
one in a fresh interpreter. It reads one JSON object a line, forks a child for it, and answers with its number or with its
exit status (``-9`` where it was killed). ``kill_at`` is an optimiser step after which the child kills itself with SIGKILL,
before anything of the next one; ``kill_after_save`` one whose first checkpoint from then on is the last thing that it does.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FLOORS = {"mhla_kernels": ROOT / "kernels", "lightning_mhla": ROOT, "mhla_tasks": ROOT / "tasks"}
LIBRARIES = ("lightning.pytorch.loggers", "lightning.pytorch.callbacks", "transformers.models.auto", "peft")
"""Beside those that the product names: what configurations and tests name."""


def _of_test() -> dict[str, str]:
    """Environment variables of the present test that its processes inherit."""
    names = ("PYTEST_CURRENT_TEST", "COVERAGE_PROCESS_START")
    return {name: os.environ[name] for name in names if name in os.environ}


class Child:
    """A process that was started and not waited for, with the methods of :class:`subprocess.Popen` that tests need."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server._ask({"pid": self.pid})
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        """Its exit status, once it has ended."""
        until = time.monotonic() + timeout
        while self.poll() is None:
            assert time.monotonic() < until, f"process {self.pid} has not ended after {timeout} s"
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """SIGKILL, to it and its children."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)


class ForkServer:
    """One parent process; commands run one after another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "200"}
        self._environment.pop("PL_GLOBAL_SEED", None)
        self._open()

    def _open(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
            start_new_session=True,
        )

    def run(
        self,
        *arguments: str,
        module: str = "mhla_tasks.commandline.parser",
        folder: Path | None = None,
        output: Path | None = None,
        kill_at: int | None = None,
        kill_after_save: int | None = None,
        processes: int = 1,
        **environment: str,
    ) -> tuple[int, str]:
        """Exit status of ``python -m module arguments`` in ``folder``, and what it printed (to ``output``, if that is given).

        Several ``processes`` are started as torchrun starts them; the status is that of the first one that failed.
        """
        place = output or Path(tempfile.gettempdir()) / f"output-of-{self._process.pid}"
        place.write_bytes(b"")
        asked = {
            "module": module, "arguments": arguments, "folder": str(folder or Path.cwd()), "output": str(place),
            "environment": _of_test() | environment, "kill_at": kill_at, "kill_after_save": kill_after_save, "processes": processes,
        }  # fmt: skip
        status = self._ask(asked)
        text = place.read_text(errors="replace")
        if output is None:
            place.unlink()
        return status, text

    def program(self, code: str, *arguments: str | Path, **options: Any) -> tuple[int, str]:
        """Likewise for ``python -c code arguments``."""
        return self.run(code, *map(str, arguments), module="-c", **options)

    def start(
        self, *arguments: str, module: str, output: Path, folder: Path | None = None, **environment: str
    ) -> Child:
        """``python -m module arguments`` (or ``-c``, as :meth:`program`), which goes on by itself; ``output`` grows."""
        asked = {
            "module": module, "arguments": arguments, "folder": str(folder or Path.cwd()), "output": str(output),
            "environment": _of_test() | environment, "kill_at": None, "kill_after_save": None, "processes": 0,
        }  # fmt: skip
        output.touch()
        return Child(self, self._ask(asked))

    def _ask(self, asked: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            try:
                self._process.stdin.write(json.dumps(asked) + "\n")
                self._process.stdin.flush()
                return json.loads(self._process.stdout.readline())
            except BaseException:  # the test's time is up: the next one gets a parent without an open question
                self.close()
                self._open()
                raise

    def close(self) -> None:
        """End the parent, and what it waits for."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
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
    from lightning_mhla.checkpoints.io import WholeCheckpointIO

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
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts in the background ignore it
    os.chdir(asked["folder"])
    os.environ.update(asked["environment"])
    sys.path[:0] = [os.environ["PATH_OF_TESTS"]] if "PATH_OF_TESTS" in os.environ else []
    import numpy as np
    import torch

    np.random.seed()
    torch.set_num_threads(1)
    if asked["kill_at"] is not None:
        _kill_after(asked["kill_at"])
    if asked["kill_after_save"] is not None:
        _kill_after_save(asked["kill_after_save"])
    sys.path[:0] = [str(Path.cwd())]
    module, arguments = asked["module"], asked["arguments"]
    recording = None
    if "COVERAGE_PROCESS_START" in os.environ:  # set by tests/record_coverage.py
        import coverage

        recording = coverage.Coverage(config_file=os.environ["COVERAGE_PROCESS_START"])
        recording.start()
    status = 1
    try:
        if module == "-c":
            sys.argv = ["-c", *arguments[1:]]
            sys.modules["__main__"] = program = types.ModuleType("__main__")
            exec(compile(arguments[0], "<program>", "exec"), program.__dict__)
        else:
            sys.argv = [module, *arguments]
            sys.modules.pop(module, None)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
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
        if recording is not None:  # os._exit would lose it
            recording.stop()
            recording.save()
        os._exit(status)


def _places(processes: int) -> list[dict[str, str]]:
    """What torchrun tells each of so many processes; nothing to one."""
    if processes <= 1:
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
    if not asked["processes"]:
        with contextlib.suppress(PermissionError):  # the other one of the two was faster
            os.setpgid(child, child)  # so that it can be killed with its own children
    if child == 0:
        _child({**asked, "environment": {**asked["environment"], **place}})
    return child


def preload() -> None:
    """Import every library that a module of the product names, and no module of it."""
    for package, folder in FLOORS.items():
        for path in sorted((folder / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [each.name for each in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
                modules = names if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""]
                for module in modules if names else ():
                    if module.split(".")[0] not in FLOORS:
                        with contextlib.suppress(ImportError, AttributeError):
                            library = importlib.import_module(module)
                            _ = [getattr(library, name) for name in names if isinstance(node, ast.ImportFrom)]
    for module in LIBRARIES:
        importlib.import_module(module)


def main() -> None:
    """The parent."""
    preload()
    gc.freeze()  # or every child copies the pages that its collector touches
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ended: dict[int, int] = {}

    def status_of(child: int, options: int = 0) -> int | None:
        while child not in ended:
            found, status = os.waitpid(-1, options)
            if not found:
                return None
            ended[found] = os.waitstatus_to_exitcode(status)
        return ended[child]

    for line in sys.stdin:
        asked = json.loads(line)
        if "pid" in asked:
            answer = status_of(asked["pid"], os.WNOHANG)
        else:
            children = [_start(asked, place) for place in _places(asked["processes"])]
            for child in children:
                ended.pop(child, None)  # an earlier process of this number
            answer = _first_failure(children, ended) if asked["processes"] else children[0]
        answers.write(f"{json.dumps(answer)}\n")
        answers.flush()


def _first_failure(children: list[int], ended: dict[int, int]) -> int:
    """Wait for all; the status of the first that fails, at which the others are told to end, or 0."""
    failed = 0
    while set(children) - set(ended):
        child, status = os.wait()
        ended[child] = os.waitstatus_to_exitcode(status)
        if child in children and ended[child]:
            failed = failed or ended[child]
            for other in set(children) - set(ended):  # they would wait for it
                os.kill(other, signal.SIGTERM)
    return failed


if __name__ == "__main__":
    main()
