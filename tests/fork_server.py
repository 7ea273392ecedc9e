"""Server for tests that runs Python programs in separate processes without startup time, forked from a prepared parent.

The parent has imported all libraries that the product imports, but no module of the product, so a program runs the same code as
in a new interpreter. The parent reads one JSON object per line, forks a child for it, and answers with the child's process id
or exit status (``-9`` if it was killed).
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
"""Modules to import in addition to those that the product imports: configurations and tests name them."""


def _of_test() -> dict[str, str]:
    """Return the environment variables of the current test that its processes inherit."""
    names = ("PYTEST_CURRENT_TEST", "COVERAGE_PROCESS_START")
    return {name: os.environ[name] for name in names if name in os.environ}


class Child:
    """Process that runs in the background, with the methods of :class:`subprocess.Popen` that tests need."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        if self.returncode is None:
            self.returncode = self._server._ask({"pid": self.pid})
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        """Wait for the end of the process, and return its exit status.

        Args:
            timeout: time limit in seconds; the test fails after it.
        """
        until = time.monotonic() + timeout
        while self.poll() is None:
            assert time.monotonic() < until, f"process {self.pid} has not ended after {timeout} s"
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """Send SIGKILL to the process and its children."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)


class ForkServer:
    """Parent process from which programs are forked, one after the other."""

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
        """Run ``python -m MODULE ARGUMENTS`` and wait for its end.

        Args:
            arguments: arguments of the program.
            module: name of the module; ``-c`` to run the first argument as code.
            folder: working folder; None for the current one.
            output: file for the output; None for a temporary one.
            kill_at: optimizer step after which the process kills itself by SIGKILL, before the next step begins; None for
                never.
            kill_after_save: optimizer step from which on the process kills itself by SIGKILL once it has written a
                checkpoint; None for never.
            processes: number of processes to start as torchrun does.
            environment: additional environment variables.

        Returns:
            The exit status, that of the first failure if there are several processes; and the output.
        """
        output_file = output or Path(tempfile.gettempdir()) / f"output-of-{self._process.pid}"
        output_file.write_bytes(b"")
        request = {
            "module": module, "arguments": arguments, "folder": str(folder or Path.cwd()), "output": str(output_file),
            "environment": _of_test() | environment, "kill_at": kill_at, "kill_after_save": kill_after_save,
            "processes": processes,
        }  # fmt: skip
        status = self._ask(request)
        text = output_file.read_text(errors="replace")
        if output is None:
            output_file.unlink()
        return status, text

    def program(self, code: str, *arguments: str | Path, **options: Any) -> tuple[int, str]:
        """Run ``python -c CODE ARGUMENTS`` and wait for its end. Options and result are those of :meth:`run`."""
        return self.run(code, *map(str, arguments), module="-c", **options)

    def start(
        self, *arguments: str, module: str, output: Path, folder: Path | None = None, **environment: str
    ) -> Child:
        """Start ``python -m MODULE ARGUMENTS`` in the background.

        Args:
            arguments: arguments of the program.
            module: name of the module; ``-c`` to run the first argument as code.
            output: file to which the output is appended.
            folder: working folder; None for the current one.
            environment: additional environment variables.
        """
        request = {
            "module": module, "arguments": arguments, "folder": str(folder or Path.cwd()), "output": str(output),
            "environment": _of_test() | environment, "kill_at": None, "kill_after_save": None, "processes": 0,
        }  # fmt: skip
        output.touch()
        return Child(self, self._ask(request))

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
                return json.loads(self._process.stdout.readline())
            except BaseException:  # the test timed out: the next test needs a parent that answers no earlier request
                self.close()
                self._open()
                raise

    def close(self) -> None:
        """Kill the parent process and the programs that it waits for."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _kill_after(step: int) -> None:
    """Kill this process after a number of optimizer steps, when all callbacks have run and the metrics are logged."""
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

    advance = _TrainingEpochLoop.on_advance_end

    def wrapped(loop: Any, *arguments: Any) -> None:
        advance(loop, *arguments)
        if loop.trainer.global_step >= step:
            os.kill(os.getpid(), signal.SIGKILL)

    _TrainingEpochLoop.on_advance_end = wrapped  # type: ignore[method-assign]


def _kill_after_save(step: int) -> None:
    """Kill this process as soon as a checkpoint of the given optimizer step, or of a later one, is on the disk."""
    from lightning_mhla.checkpoints.io import WholeCheckpointIO

    save = WholeCheckpointIO.save_checkpoint

    def wrapped(io: Any, checkpoint: dict[str, Any], *arguments: Any, **options: Any) -> None:
        save(io, checkpoint, *arguments, **options)
        if checkpoint["global_step"] >= step:
            os.kill(os.getpid(), signal.SIGKILL)

    WholeCheckpointIO.save_checkpoint = wrapped  # type: ignore[method-assign]


def _child(request: dict[str, Any]) -> None:
    stream = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(stream, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes its background processes ignore SIGINT
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # the libraries of the parent have looked it up; TMPDIR may be different now
    sys.path[:0] = [os.environ["PATH_OF_TESTS"]] if "PATH_OF_TESTS" in os.environ else []
    import numpy as np
    import torch

    np.random.seed()
    torch.set_num_threads(1)
    if request["kill_at"] is not None:
        _kill_after(request["kill_at"])
    if request["kill_after_save"] is not None:
        _kill_after_save(request["kill_after_save"])
    sys.path[:0] = [str(Path.cwd())]
    module, arguments = request["module"], request["arguments"]
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
        if recording is not None:  # os._exit would discard it
            recording.stop()
            recording.save()
        os._exit(status)


def _torchrun_variables(processes: int) -> list[dict[str, str]]:
    """Return the environment variables that torchrun sets for each of several processes; none for a single process."""
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


def _fork(request: dict[str, Any], variables: dict[str, str]) -> int:
    child = os.fork()
    if not request["processes"]:
        with contextlib.suppress(PermissionError):  # the other of parent and child has already done it
            os.setpgid(child, child)  # so that it can be killed with its own children
    if child == 0:
        _child({**request, "environment": {**request["environment"], **variables}})
    return child


def preload() -> None:
    """Import every library that a module of the product imports, but no module of the product."""
    for package, folder in FLOORS.items():
        for path in sorted((folder / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
                modules = names if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""]
                for module in modules if names else ():
                    if module.split(".")[0] not in FLOORS:
                        with contextlib.suppress(ImportError, AttributeError):
                            library = importlib.import_module(module)
                            _ = [getattr(library, name) for name in names if isinstance(node, ast.ImportFrom)]
    for module in LIBRARIES:
        importlib.import_module(module)


def main() -> None:
    """Run the parent process: fork a child for each request on standard input, and answer on standard output."""
    preload()
    gc.freeze()  # otherwise every child copies the memory pages that its garbage collector touches
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ended: dict[int, int] = {}

    def status_of(child: int, options: int = 0) -> int | None:
        while child not in ended:
            ended_child, status = os.waitpid(-1, options)
            if not ended_child:
                return None
            ended[ended_child] = os.waitstatus_to_exitcode(status)
        return ended[child]

    for line in sys.stdin:
        request = json.loads(line)
        if "pid" in request:
            answer = status_of(request["pid"], os.WNOHANG)
        else:
            children = [_fork(request, variables) for variables in _torchrun_variables(request["processes"])]
            for child in children:
                ended.pop(child, None)  # status of an earlier process with the same id
            answer = _first_failure(children, ended) if request["processes"] else children[0]
        answers.write(f"{json.dumps(answer)}\n")
        answers.flush()


def _first_failure(children: list[int], ended: dict[int, int]) -> int:
    """Wait for the end of all child processes. If one fails, the others receive SIGTERM.

    Args:
        children: process ids of the children.
        ended: exit statuses by process id, updated in place.

    Returns:
        Exit status of the first child that failed; 0 if none failed.
    """
    failed = 0
    while set(children) - set(ended):
        child, status = os.wait()
        ended[child] = os.waitstatus_to_exitcode(status)
        if child in children and ended[child]:
            failed = failed or ended[child]
            for other in set(children) - set(ended):  # they would wait for the failed process
                os.kill(other, signal.SIGTERM)
    return failed


if __name__ == "__main__":
    main()
