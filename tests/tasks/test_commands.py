"""The tools beside Lightning's commands: found by name, told in help, parsed as documented, quick to start."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from grouped import grouped
from mhla_tasks.classification import ImageClassifier
from mhla_tasks.commandline import completion, main, registry
from mhla_tasks.tools import measuring
from processes import fork_server

from benchmarks import BENCHMARKS

ROOT = Path(__file__).parents[2]
NAMES = [name for tools in registry.TOOLS.values() for name in tools]
PARSED = [name for name in NAMES if not getattr(registry.function_of(name), "passes_on", False)]


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    """Run a command, and return its exit status, standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["lightning", *words])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        main.main()
    return ended.value.code, *capsys.readouterr()


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_everything_is_listed_by_group(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = call(monkeypatch, capsys, *words)
    assert not status
    for group, tools in {"training": registry.LIGHTNING, **registry.TOOLS}.items():
        part = out.split(f"\n{group}:\n")[1].split("\n\n")[0]
        assert re.findall(r"^  ([a-z]+(?: [a-z-]+)?)  ", part, re.MULTILINE) == list(tools)
        assert all(line.endswith((".", "programs.")) for line in part.split("\n")), "a summary is a sentence"
    assert max(map(len, out.split("\n"))) <= 128


@pytest.mark.parametrize("name", PARSED)
def test_help_says_what_a_tool_does_and_its_examples_are_right(name: str) -> None:
    parser, _ = registry.parser_of(name)
    text = registry.function_of(name).__doc__ or ""
    said = parser.format_help()
    assert text.split("\n")[0] in said
    assert "``" not in said
    examples = re.findall(rf"^ +(?:lightning|torchrun .* -m mhla_tasks) {name} (.*)$", text, re.MULTILINE)
    assert examples, "no example"
    for example in examples:
        parser.parse_args(shlex.split(example.partition(" >> ")[0]))
    for action in parser._actions:
        assert action.help, f"{action.dest} has no help"
        assert all("-" not in option[2:] for option in action.option_strings), "options are written with underscores"


def test_help_imports_no_library() -> None:
    code = (
        "import sys; from mhla_tasks.commandline import registry; registry.listing()\n"
        f"for name in {PARSED}: registry.parser_of(name)[0].format_help()\n"
        "print([name for name in ('torch', 'lightning', 'numpy', 'rich') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fitt"], "fitt is not a command; did you mean fit?"),
        (["genrate"], "genrate is not a command; did you mean generate?"),
        (["xyzzy"], "xyzzy is not a command\n"),
        (["prepare", "picture"], "prepare picture is not a tool"),
        (["prepare", "images", "a", "b", "--per_sharp=3"], "unrecognized arguments: --per_sharp=3"),
        (["prepare", "images", "a", "b", "--per-shard=x"], "argument --per_shard: invalid int value: 'x'"),
        (["export", "a"], "the following arguments are required: folder\nhelp: lightning export --help\n"),
        (["bench", "nothing"], "nothing is not a benchmark; the benchmarks are architectures, attention, "),
    ],
)
def test_what_is_not_there_is_told(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, error = call(monkeypatch, capsys, *words)
    assert status == 2
    assert message in error
    assert len(error) < 1000


def test_a_family_of_tools_is_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["prepare"], ["prepare", "--help"]):
        status, out, _ = call(monkeypatch, capsys, *words)
        assert status == 0
        assert [line.split("  ")[1] for line in out.splitlines()[1:]] == [n for n in NAMES if n.startswith("prepare")]


def test_benchmarks_are_run_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(monkeypatch, capsys, "bench")
    assert status == 0
    assert "  generation" in out
    status, out, _ = call(monkeypatch, capsys, "bench", "generation", "--help")
    assert status == 0
    assert "usage: lightning bench generation" in out
    status, out, _ = call(monkeypatch, capsys, "paper", "--list", "--only", "mqar")
    assert not status
    assert "mqar: Associative recall" in out


def test_the_table_of_benchmarks_is_the_modules_with_a_main() -> None:
    folder = ROOT / "benchmarks"
    programs = {path.stem for path in folder.glob("*.py") if "\ndef main(" in path.read_text()} - {"__main__"}
    assert set(BENCHMARKS) == programs
    assert list(BENCHMARKS) == sorted(BENCHMARKS)
    for name, summary in BENCHMARKS.items():
        assert re.fullmatch(r"[^\n]{20,110}\.", summary), name


@pytest.mark.parametrize("words", [(), ("-h",), ("--help",)])
def test_benchmarks_are_listed_with_their_summaries(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, error = call(monkeypatch, capsys, "bench", *words)
    assert (status, error) == (0, "")
    assert dict(re.findall(r"^  (\w+) +(.+)$", out, re.MULTILINE)) == BENCHMARKS


def test_the_list_of_benchmarks_imports_none_and_no_package_of_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/__init__.py").write_text("print('planted')")
    (tmp_path / "benchmarks/paper.py").write_text("")
    code = (
        "import sys; from mhla_tasks.commandline import registry\n"
        "try: registry.run('bench', [])\n"
        "except SystemExit as ended: assert ended.code == 0\n"
        "print([name for name in sys.modules if name.startswith(('benchmarks.', 'torch.', 'matplotlib.'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "planted" not in done.stdout
    assert "  attention " in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["Attention"], "Attention is not a benchmark; the benchmarks are "),
        (["machine"], "machine is not a benchmark; the benchmarks are "),  # a module without a main
        (["paper"], "paper is not a benchmark; the benchmarks are "),
        (["../gpu"], "../gpu is not a benchmark; the benchmarks are "),
        (["paper.__main__"], "paper.__main__ is not a benchmark; the benchmarks are "),
        (["--device=cpu", "attention"], "--device=cpu is not a benchmark; the benchmarks are "),
        (["\x1b[31mred"], "is not a benchmark"),
    ],
)
def test_what_is_not_a_benchmark_is_told(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, error = call(monkeypatch, capsys, "bench", *words)
    assert status == 2
    assert message in error
    assert "attention, " in error
    assert error.endswith("help: lightning bench\n")
    assert "\x1b" not in error


@pytest.mark.parametrize("words", [("bench",), ("bench", "gpu"), ("paper", "--list")])
def test_without_a_checkout_the_way_to_the_benchmarks_is_told(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measuring, "CHECKOUT", tmp_path)
    status, out, error = call(monkeypatch, capsys, *words)
    assert (status, out) == (2, "")
    assert error == (
        "error: the benchmarks are part of the repository, not of the package: clone it, then pip install -e .\n"
    )


def test_a_benchmark_gets_its_options_and_its_status_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--device", "cpu", "--only", "nothing", "--out", str(tmp_path))
    status, _, error = call(monkeypatch, capsys, "bench", "gpu", *options)
    assert status == 2
    assert "lightning bench gpu: error: unknown parts: nothing; the parts are doctor, native, forms, attention" in error
    status, _, error = call(monkeypatch, capsys, "paper", "--jobs", "0")
    assert status == 2
    assert "lightning paper: error: --jobs: 0 must be at least 1" in error


def small(**options: object) -> ImageClassifier:
    sizes = {"num_classes": 3, "image_size": 8, "channels": 1, "patch_size": 2, "dim": 16, "depth": 1, "heads": 2}
    return ImageClassifier(attention={"kind": "linear"}, **grouped(**{**sizes, **options}))  # type: ignore[arg-type]


def written(module: ImageClassifier, path: Path, **memory: object) -> Path:
    """Write a checkpoint by a Trainer in Python."""
    kept = {"state_dict": module.state_dict(), "hyper_parameters": {**module.hparams, **memory}, "global_step": 1}
    torch.save({**kept, "pytorch-lightning_version": "2.6.0"}, path)
    return path


def test_a_checkpoint_that_names_no_class_is_exported(tmp_path: Path) -> None:
    path = written(small(), tmp_path / "some.ckpt")
    registry.run("export", [str(path), str(tmp_path / "out"), "--license=mit"])
    assert (tmp_path / "out/classes.txt").exists()
    card = (tmp_path / "out/README.md").read_text()
    _, header, text = card.split("---\n", 2)
    assert yaml.safe_load(header) == {
        "library_name": "lightning-mhla",
        "tags": ["mhla", "linear-attention"],
        "license": "mit",
    }
    assert "An `ImageClassifier` of " in text
    assert "attention: `linear`.\n" in text
    assert "The checkpoint has none. This command measures them, with its file:" in text
    registry.run("export", [str(path), str(tmp_path / "out")])
    assert "Not stated" in (tmp_path / "out/README.md").read_text(), "our own card is written anew"
    (tmp_path / "out/README.md").write_text("Mine.")
    registry.run("export", [str(path), str(tmp_path / "out")])
    assert (tmp_path / "out/README.md").read_text() == "Mine."
    assert "Not stated" in (tmp_path / "out/README.new.md").read_text()
    assert "  patch_size: 2\n" in text or "\npatch_size: 2\n" in text


@pytest.mark.parametrize(
    ("options", "memory", "message"),
    [
        (
            ["--context=64"],
            {},
            "--context is not an option for .*some.ckpt, which contains the model of ImageClassifier",
        ),
        ([], {"_class_path": "os.system"}, "was trained with the class os.system: "),
        (
            [],
            {"_class_path": "mhla_tasks.classification.Gone"},
            "mhla_tasks.classification.Gone: there is no such class",
        ),
        ([], {"_class_path": "mhla_tasks.gone.Gone"}, "mhla_tasks.gone.Gone: cannot import mhla_tasks.gone"),
        ([], {"_class_path": "lightning.fabric.utilities.cloud_io._load"}, "_load: is private"),
        ([], {"_class_path": "lightning.pytorch.LightningModule"}, "LightningModule: is not a TrainingModule"),
        (
            [],
            {"unheard_of": 1},
            "does not contain a module of classification, diffusion, language, text_to_image, video",
        ),
    ],
)
def test_what_cannot_be_exported_is_told(
    options: list[str], memory: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = written(small(), tmp_path / "some.ckpt", **memory)
    with pytest.raises(SystemExit, match=message):
        registry.run("export", [str(path), str(tmp_path / "out"), *options])
    assert not (tmp_path / "out").exists()


def test_python_m_mhla_tasks_is_the_command(tmp_path: Path) -> None:
    status, said = fork_server().run("export", "absent.ckpt", "out", module="mhla_tasks", folder=tmp_path)
    assert (status, said) == (1, "error: checkpoint absent.ckpt does not exist\n")


def test_shipped_comments_name_tools_that_parse() -> None:
    """Commands in the comments of configurations."""
    root = Path(registry.__file__).parents[3]
    found = 0
    for path in sorted((root / "configs").rglob("*.yaml")):
        text = path.read_text()
        yaml.safe_load(text)
        comment = re.sub(r" \\\n# +", " ", text)
        for line in re.findall(r"^#\s+(lightning prepare .*)$", comment, re.MULTILINE):
            words = shlex.split(line)[1:]
            name = registry.tool_named(words)
            assert name, line
            registry.parser_of(name)[0].parse_args(words[2:])
            found += 1
    assert found > 20


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["exp"], ["export"]),
        (["pre"], ["predict", "prepare"]),
        (["prepare", "cl"], ["clips", "clip-latents"]),
        (["export", "run", "--li"], ["--live", "--license"]),
        (["fit", "--sw"], ["--sweep", "--sweep_sbatch"]),
        (["fit", "--config", "mhla://classification/mnist."], ["mhla://classification/mnist.yaml"]),
        (["fit", "--config=mhla://classification/mnist_v"], ["--config=mhla://classification/mnist_vlt.yaml"]),
        (["xyzzy", "a"], []),
    ],
)
def test_words_are_completed(words: list[str], found: list[str]) -> None:
    assert completion.complete(words) == found


def test_bash_completes(tmp_path: Path) -> None:
    """In a real shell, by the script that the command prints."""
    program = Path(sys.executable).with_name("lightning")
    lines = [
        "lightning fit --config mhla://video/digits_p",
        "lightning fit --config=mhla://video/digits_p",
        "lightning prepare ima",
    ]
    asked = "".join(
        f'COMP_LINE="{line}"; COMP_POINT={len(line)}; _lightning_mhla lightning; echo "${{COMPREPLY[@]}}"\n'
        for line in lines
    )
    code = f'PATH={program.parent}:$PATH; before=$COMP_WORDBREAKS; eval "$(lightning completion bash)"\n{asked}'
    code += '[ "$before" = "$COMP_WORDBREAKS" ] && echo kept\n'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "//video/digits_pretrain.yaml",
        "//video/digits_pretrain.yaml",
        "images",
        "kept",
    ]


@pytest.mark.parametrize(
    "words",
    [("nowhere", "--max-new-tokens=3", "hello"), ("--seed=1", "nowhere", "hello"), ("nowhere", "--", "--hello x-y")],
)
def test_options_may_stand_anywhere(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, said = call(monkeypatch, capsys, "generate", *words)
    assert "error: nowhere is not a" in said


def test_the_help_of_timm_has_no_markup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(monkeypatch, capsys, "timm", "--help")
    assert "usage: lightning timm SCRIPT" in out
    assert "``" not in out
