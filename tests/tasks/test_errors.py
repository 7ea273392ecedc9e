"""Errors on the command line: what a user can remove is a line or two, behind whichever command it comes up."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import rich
import torch
from fork_server import ForkServer
from mhla_tasks.commandline.console import log_handler, show_log
from mhla_tasks.commandline.errors import INTERRUPTED, READER_GONE, explain, reported
from mhla_tasks.commandline.failures import explain_failure
from mhla_tasks.commandline.parser import main
from processes import END, IN_TURN, run_apart, run_cli, run_in_turn
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from lightning_mhla.checkpoints.io import check_checkpoint
from lightning_mhla.system.processes import check_open_files

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "configs/classification/digits.yaml")
SMALL = """\
model: {init_args: {shape: {depth: 1, dim: 16, heads: 2}}}
trainer:
  accelerator: cpu
  max_epochs: 1
  limit_train_batches: 4
  limit_val_batches: 1
  check_val_every_n_epoch: 1
  enable_progress_bar: false
  log_every_n_steps: 1
  callbacks:
    - {class_path: ModelCheckpoint, init_args: {monitor: val/loss, save_last: true}}
    - {class_path: lightning_mhla.callbacks.Recovery, init_args: {every_n_steps: 2, keep: 20}}
"""
TOOL = "import sys; from mhla_tasks.commandline.main import main; main()"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def trained(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    run_cli("fit", "--config", DIGITS, "--config", str(small), f"--run_dir={folder}")
    return folder


def only_error(status: int, text: str) -> str:
    """Check that a failing command prints a single error line, and return it."""
    assert status not in (0, None), text
    assert "Traceback" not in text, text
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, text
    assert text.splitlines().index(lines[0]) >= len(text.splitlines()) - 2, f"more follows than a hint:\n{text}"
    return lines[0]


def fit(server: ForkServer, small: Path, *words: str, prelude: str = "") -> str:
    """The error of a fit in a process of its own, to which ``prelude`` does what this one must not suffer."""
    code = f"{prelude}\n{TOOL}"
    return only_error(*server.program(code, "fit", "--config", DIGITS, "--config", str(small), *words))


def fit_here(capsys: pytest.CaptureFixture[str], small: Path, *words: str) -> str:
    """The error of a fit in this process."""
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", DIGITS, "--config", str(small), *words])
    assert isinstance(stop.value.code, int)
    return only_error(stop.value.code, "".join(capsys.readouterr()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trainer.accelerator=gpu"], "No supported gpu backend found!; torch finds no GPU here: --trainer.accelerator=cpu"),
        (["--trainer.accelerator=bogus"], "Available names are: auto"),
        (["--trainer.devices=0"], "--trainer.devices takes a number above 0, or auto"),
        (["--trainer.precision=7"], "--trainer.precision=7: trainer.precision: "),
        (["--trainer.strategy=bogus"], "You selected an invalid strategy name: `strategy='bogus'`"),
        (["--trainer.val_check_interval=1000"], "must be less than or equal to the number of the training batches (4)"),
        (["--trainer.max_epochs=-7"], "You passed in -7"),
        (["--trainer.accumulate_grad_batches=0"], "--trainer.accumulate_grad_batches=0 must be at least 1"),
        (["--trainer.check_val_every_n_epoch=0"], "--trainer.check_val_every_n_epoch=0 must be at least 1"),
        (["--trainer.profiler=bogus"], "['simple', 'advanced', 'pytorch', 'xla']"),
        (["--seed_everything=-1"], "set --seed_everything to a number in these bounds"),
        (["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor=val/no"], "'val/loss', 'val/samples', 'epoch', 'step']"),
        (["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/no"], "set the callback's monitor to one of these metrics"),
    ],
    ids=lambda value: value[-1].removeprefix("--trainer.") if isinstance(value, list) else "",
)  # fmt: skip
def test_lightnings_own_errors_are_a_line(
    capsys: pytest.CaptureFixture[str], small: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    assert message in fit_here(capsys, small, f"--run_dir={tmp_path / 'run'}", *words)


LIMIT = "import resource, signal; resource.setrlimit(resource.RLIMIT_{name}, ({limit}, {limit}))"


def test_a_disk_that_fills_up_leaves_the_earlier_checkpoints(server: ForkServer, small: Path, tmp_path: Path) -> None:
    """The limit of a file's size stands for the disk; the optimizer of the second save is past it."""
    run = tmp_path / "run"
    run_cli("fit", "--config", DIGITS, "--config", str(small), f"--run_dir={run}")
    earlier = sorted(run.rglob("*.ckpt"))
    assert earlier
    prelude = LIMIT.format(name="FSIZE", limit=20_000)
    said = fit(server, small, f"--run_dir={run}", "--trainer.max_epochs=2", prelude=prelude)
    assert "could not be written" in said
    assert "Earlier checkpoints are unchanged" in said
    assert sorted(path for path in run.rglob("*") if ".ckpt" in path.name and path.is_file()) == earlier
    for path in earlier:
        check_checkpoint(path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("file/run", "file/run: a part of this path is a file, where a folder is needed"),
        ("file", "file: a file of this name exists already"),
        ("n" * 300, "the name is too long for the file system; choose a shorter one"),
        ("/proc/run", "there is no such file or folder"),
    ],
    ids=["below a file", "a file", "long", "proc"],
)
def test_a_run_folder_that_cannot_be_made(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    small: Path,
    tmp_path: Path,
    path: str,
    message: str,
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.chdir(tmp_path)
    assert message in fit_here(capsys, small, f"--run_dir={path}")


@pytest.mark.parametrize("logger", ["CSVLogger", "TensorBoardLogger"])
def test_a_log_that_cannot_be_written(server: ForkServer, small: Path, tmp_path: Path, logger: str) -> None:
    """The events of TensorBoard are written by a thread, whose traceback is not shown either."""
    prelude = LIMIT.format(name="FSIZE", limit=3000)
    code = f"{prelude}\n{TOOL}"
    words = [
        "fit",
        "--config",
        DIGITS,
        "--config",
        str(small),
        f"--run_dir={tmp_path}/run",
        f"--trainer.logger={logger}",
    ]
    status, text = server.program(code, *words)
    assert status == 1
    assert "Traceback" not in text
    assert "larger than the limit of this process; raise it (ulimit -f unlimited)" in text


def test_too_few_open_files(server: ForkServer, small: Path, tmp_path: Path) -> None:
    said = fit(
        server, small, f"--run_dir={tmp_path}/run", "--data.num_workers=2", prelude=LIMIT.format(name="NOFILE", limit=24)
    )  # fmt: skip
    assert "too many open files: the limit is 24" in said
    assert "raise the limit of this process (ulimit -n 65536), or use fewer worker processes" in said
    check_open_files(0)


WRONG_CALLS = [
    (["export", "RUN", "file"], "file: a file of this name exists already"),
    (["export", "RUN", "file/model"], "a part of this path is a file"),
    (["export", "absent", "model"], "checkpoint absent does not exist"),
    (["consolidate", "RUN", "file/x.ckpt"], "could not be written"),
    (["compare", "RUN", "--picture", "file/x.png"], "contains no run.json"),
    (["prepare", "images", "absent", "shards"], "absent"),
    (["arrange", "absent", "target", "--layout", "geneval", "--prompts", "absent.jsonl"], "absent"),
    (["score", "absent", "file"], "absent"),
    (["layers", "absent"], "absent"),
    (["generate", "absent.ckpt", "x"], "absent.ckpt does not exist"),
    (["evaluate", "--model_args", "pretrained=absent.ckpt", "--tasks", "nothing"], "Tasks not found: nothing"),
    (["evaluate", "--model_args", "pretrained=absent.ckpt", "--tasks", "arc_easy"], "absent.ckpt does not exist"),
    (["timm", "absent.py"], "absent.py: there is no such script"),
]
"""Arguments of tools, and what the error says; ``RUN`` is a trained one."""


@pytest.fixture(scope="module")
def reports(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit status and text of each wrong call, by its arguments."""
    folder = tmp_path_factory.mktemp("tools")
    (folder / "file").write_text("x")
    calls = [[str(trained) if word == "RUN" else word for word in words] for words, _ in WRONG_CALLS]
    names = [" ".join(words) for words, _ in WRONG_CALLS]
    return dict(zip(names, run_in_turn(*calls, folder=folder), strict=True))


@pytest.mark.parametrize(
    ("words", "message"), WRONG_CALLS, ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else ""
)
def test_tools_report_in_the_same_way(reports: dict[str, tuple[int, str]], words: list[str], message: str) -> None:
    status, text = reports[" ".join(words)]
    assert status != 0
    assert "Traceback" not in text, text
    assert message in text
    assert "error" in text.lower()


def raised(kind: type[BaseException], *values: object) -> BaseException:
    try:
        raise kind(*values)
    except BaseException as error:
        return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "x", "a/b"), "a/b: no space is left on the device"),
        (OSError(errno.EDQUOT, "x", "a"), "a: your disk quota is used up"),
        (OSError(errno.EROFS, "x", "a", None, "b"), "b: the file system is read-only"),
        (PermissionError(errno.EACCES, "x", b"caf\xe9"), "permission denied"),
        (IsADirectoryError(errno.EISDIR, "x", "a"), "a: this is a folder, where a file is needed"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that"), "/dev/shm"),
        (RuntimeError("unable to write to file </torch_7_8_0>: No space left on device (28)"), "/dev/shm"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "the memory is used up"),
        (RuntimeError("received 0 items of ancdata"), "too many open files"),
        (RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"), "no space is left"),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), "no space is left"),
        (RuntimeError("Error while serializing: I/O error: Read-only file system (os error 30)"), "read-only"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "the memory of the GPU is used up"),
        (MemoryError(), "the memory of the machine is used up"),
        (OSError("Caught OSError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\nOSError: [Errno 24] Too many open files: 'x'"), "too many open files"),
    ],
)  # fmt: skip
def test_failures_of_the_machine_are_recognised(error: BaseException, message: str) -> None:
    line = explain(error)
    assert line is not None
    assert message in line
    assert "\n" not in line


def test_safetensors_on_a_device_that_is_full() -> None:
    from safetensors.torch import save_file

    with pytest.raises(Exception) as caught:  # noqa: PT011  an error of its own
        save_file({"a": torch.zeros(9)}, "/proc/nothing/a.safetensors")
    assert explain(caught.value) is not None


def _slip() -> None:
    explain(None + 1)  # type: ignore[operator]


@pytest.mark.parametrize(
    "fail",
    [lambda: torch.zeros(2) @ torch.zeros(3), _slip, lambda: {}["x"], lambda: [][1], lambda: 1 / 0],
    ids=["shapes", "types", "key", "index", "division"],
)
def test_mistakes_of_the_suite_keep_their_traceback(fail: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, TypeError, KeyError, IndexError, ZeroDivisionError)) as caught, reported():
        fail()
    assert explain(caught.value) is None


def test_a_handled_error_behind_a_mistake_does_not_hide_it() -> None:
    def fall_back() -> None:
        try:
            Path("absent").read_text()
        except OSError:
            {}["x"]

    with pytest.raises(KeyError) as caught:
        fall_back()
    assert explain(caught.value) is None
    assert explain_failure(caught.value) is None


def test_the_traceback_is_shown_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_MHLA_TRACEBACK", "1")
    with pytest.raises(OSError, match="full"), reported():
        raise OSError(errno.ENOSPC, "full", "a")


def test_threads(capsys: pytest.CaptureFixture[str]) -> None:
    def write() -> None:
        raise OSError(errno.ENOSPC, "full", "events")

    with reported():
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    said = capsys.readouterr().err
    assert said.startswith("error: events: no space is left on the device")
    assert "Traceback" not in said


def shell(line: str, folder: Path) -> tuple[int, str, str]:
    """Run a pipe, and return the exit status of its first command and the output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PY": sys.executable}
    done = subprocess.run(
        ["bash", "-c", f'{line}; exit "${{PIPESTATUS[0]}}"'], capture_output=True, text=True, env=environment, cwd=folder, timeout=240
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_reader_that_ends_first_is_no_error(tmp_path: Path) -> None:
    for index in range(4):
        (tmp_path / f"r{index}").mkdir()
        (tmp_path / f"r{index}" / "run.json").write_text("{}")
    assert shell('"$PY" -m mhla_tasks --help | true', tmp_path)[::2] in ((READER_GONE, ""), (0, ""))
    code = "import time; time.sleep(1); from mhla_tasks.commandline.main import main; main()"
    assert shell(f'"$PY" -c "{code}" --help | true', tmp_path)[::2] == (READER_GONE, "")
    assert shell(f'"$PY" -c "{code}" fit --config {DIGITS} --print_config | true', tmp_path)[::2] == (READER_GONE, "")


def test_output_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    status, _, said = shell('PYTHONUNBUFFERED= "$PY" -m mhla_tasks --help > /dev/full', tmp_path)
    assert status == 1
    assert said.startswith("error: standard output: no space is left on the device")
    assert len(said.splitlines()) == 1
    status, _, said = shell('PYTHONUNBUFFERED=1 "$PY" -m mhla_tasks --help > /dev/full', tmp_path)
    assert status == 1
    assert said.startswith("error: no space is left on the device")
    assert len(said.splitlines()) == 1
    assert shell('"$PY" -m mhla_tasks --help >&-', tmp_path)[::2] == (0, "")


@pytest.mark.parametrize("expression", ["(a+a+)+b", "^(a|a?)+$", "(?=(a*)*c)a"])
def test_a_tokenizer_that_never_ends_is_a_line(capsys: pytest.CaptureFixture[str], expression: str) -> None:
    """Its library gives up and panics, in any command."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(expression), "isolated")
    with pytest.raises(SystemExit) as left, reported():
        tokenizer.encode("a" * 60 + "!")
    assert left.value.code == 1
    assert "the tokenizers library fails on this input" in only_error(1, capsys.readouterr().err)


def test_ctrl_c_ends_a_tool_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
    with pytest.raises(SystemExit) as stop, reported():
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert stop.value.code == INTERRUPTED
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_names_that_are_not_unicode_are_printed(tmp_path: Path, encoding: str) -> None:
    name = os.fsdecode(b"caf\xe9")
    (tmp_path / name).mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": encoding}
    calls = json.dumps([["compare", name], ["export", name, "x"], ["validate", f"--run_dir=no-{name}"]])
    done = subprocess.run(
        [sys.executable, "-c", IN_TURN, calls], capture_output=True, cwd=tmp_path, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    parts = done.stderr.split(END.encode())
    assert len(parts) == 7
    for said, status in zip(parts[:-1:2], parts[1::2], strict=True):
        assert status in (b"1", b"2")
        assert rb"caf\udce9" in said


def test_tools_say_which_checkpoint_they_use(server: ForkServer, trained: Path, tmp_path: Path) -> None:
    status, said, errors = run_apart(server, "export", str(trained), "model", folder=tmp_path)
    assert status == 0, errors
    assert "using checkpoint " in errors
    assert "epoch 0, step 4" in errors
    assert "using checkpoint" not in said


CONFIGS = {
    "value": ("trainer:\n  max_epochs: ten\n", "trainer.max_epochs: expected int, got ten (line 2)"),
    "subcommand": ("fit:\n  trainer:\n    max_epochs: ten\n", "trainer.max_epochs: expected int, got ten (line 3)"),
    "nested": ("model:\n  init_args:\n    training:\n      optimizer: {lr: fast}\n", "model.init_args.training.optimizer.lr: "),
    "list": ("trainer:\n  callbacks:\n  - class_path: lightning_mhla.callbacks.Recovery\n    init_args: {keep: many}\n", "trainer.callbacks[0].init_args.keep: expected int, got many (line 4)"),
    "key": ("trainer:\n\n  max_epoch: 3\n", "did you mean trainer.max_epochs? (line 3)"),
    "included": ("model: model.yaml\n", "sub/model.yaml: model.init_args.shape.depth: expected int, got deep (line 3)"),
    "tab": ("trainer:\n\tmax_epochs: 7\n", "line 2 is indented by a tab: YAML accepts only spaces"),
    "brace": ("trainer: {max_epochs: 3\n", "line 2, column 1: while parsing a flow mapping"),
    "twice": ("trainer:\n  max_epochs: 3\n  max_epochs: 4\n", "trainer.max_epochs is given twice, in line 2 and in line 3"),
    "twice in one line": ("trainer: {max_epochs: 3, max_epochs: 4}\n", "trainer.max_epochs is given twice, in line 1; remove one"),
    "empty": ("", "contains no options: it is empty"),
    "text": ("hello\n", "must contain named options (KEY: VALUE), not a str"),
    "sequence": ("- a\n", "must contain named options (KEY: VALUE), not a list"),
    "zero bytes": ("\0\0", "is not YAML"),
    "other command": ("validate:\n  trainer: {max_epochs: 3}\n", "contains options of `lightning validate`, but this is `lightning fit`"),
    "no options": ("trainer: [1, 2]\n", "trainer must contain options (KEY: VALUE), got [1, 2]"),
    "nothing": ("trainer:\n", "trainer must contain options (KEY: VALUE), got None"),
    "not there": ("model: absent.yaml\n", "model: there is no file absent.yaml"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("place", ["second", "first", "absolute", "beaten"])
def test_errors_name_the_file_they_are_in(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, place: str
) -> None:
    text, message = CONFIGS[name]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/mine.yaml").write_text(text)
    (tmp_path / "sub/model.yaml").write_text(
        "class_path: mhla_tasks.classification.ImageClassifier\ninit_args:\n  shape: {depth: deep}\n"
    )
    path = str(tmp_path / "sub/mine.yaml") if place == "absolute" else "sub/mine.yaml"
    files = [path, DIGITS] if place == "first" else [DIGITS, path]
    words = [f"--config={file}" for file in files] + (["--trainer.max_epochs=3"] if place == "beaten" else [])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning", "fit", *words, "--print_config"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert message in said[0]
    assert ("sub/model.yaml" if name == "included" else "sub/mine.yaml") in said[0]


@pytest.mark.parametrize("content", [b"\xef\xbb\xbftrainer:\n  max_epochs: 3\n", b"trainer:\r\n  max_epochs: 3\r\n"])
def test_files_of_other_editors_are_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    words = ["fit", f"--config={DIGITS}", f"--config={tmp_path / 'mine.yaml'}", "--print_config"]
    monkeypatch.setattr(sys, "argv", ["lightning", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert "max_epochs: 3\n" in capsys.readouterr().out


def test_limits_of_the_tests_are_those_of_a_process() -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 24


@pytest.mark.parametrize(
    ("number", "message"), [(errno.ENOSPC, "no space is left"), (errno.EFBIG, "limit of this process")]
)
def test_rust_libraries_that_raise_exception_itself(number: int, message: str) -> None:
    line = explain(raised(Exception, f"{os.strerror(number)} (os error {number})"))
    assert line is not None
    assert message in line
    assert explain(raised(Exception, "data did not match any variant")) is None


def test_a_tokenizer_on_a_full_device(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    (tmp_path / "full.json").symlink_to("/dev/full")
    with pytest.raises(Exception) as caught:  # noqa: PT011  the library raises Exception itself
        Tokenizer(models.BPE()).save(str(tmp_path / "full.json"))
    assert "no space is left on the device" in str(explain(caught.value))


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("a/tokenizer.mhla-0123456789ab.12.part", "a/tokenizer:"),
        ("a/out.mhla-0123456789ab.12.part/weights.bin", "a/out/weights.bin:"),
        ("a/out/out.mhla-0123456789ab.12.part/weights.bin", "a/out/weights.bin:"),
        ("a/thesis.part", "a/thesis.part:"),
    ],
)
def test_temporary_names_are_not_shown(path: str, shown: str) -> None:
    assert str(explain(OSError(errno.EROFS, "x", path))).startswith(shown)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_log_line_has_its_level_once(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    stream, root = Stream(), logging.Logger("root")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(logging, "root", root)
    show_log(stream)
    root.warning("skipped a broken image: %s", "a [b] c.png")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    monkeypatch.setattr(sys, "stdout", stream)
    shared = getattr(log_handler(sys.stdout), "console", None) is rich.get_console()
    assert shared is is_terminal, "on the console of the progress bar, above which it prints"
    assert re.fullmatch(r"WARNING +skipped a broken image: a \[b\] c\.png *\n", plain)
