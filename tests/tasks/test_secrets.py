"""Secrets of URLs, and local paths, in no file that is written: each file is searched, packed and binary ones too."""

from __future__ import annotations

import ast
import base64
import bz2
import csv
import gzip
import io
import json
import logging
import lzma
import sys
import tarfile
import warnings
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import http_server
import numpy as np
import pytest
import torch
import yaml
from http_server import Server, served
from lightning import LightningDataModule, LightningModule, Trainer
from mhla_tasks.commandline import registry
from mhla_tasks.commandline.arguments import read_words
from mhla_tasks.commandline.console import harmless, prepare_streams
from mhla_tasks.commandline.errors import CommandFailed, printable
from mhla_tasks.commandline.parser import SaveConfig, main
from mhla_tasks.tools import sweep
from mhla_tasks.tools.comparison.curves import draw
from mhla_tasks.tools.comparison.groups import group_runs
from mhla_tasks.tools.comparison.runs import Run
from mhla_tasks.tools.export import remove_private
from PIL import Image
from typing_extensions import override

from lightning_mhla.callbacks.curves import LearningCurves
from lightning_mhla.callbacks.sample_texts import fenced
from lightning_mhla.checkpoints.io import WholeCheckpointIO
from lightning_mhla.data import write_shards
from lightning_mhla.data.lines import open_bytes
from lightning_mhla.data.origins import Origin, ShardSet, resume_order
from lightning_mhla.data.remote import kept_at
from lightning_mhla.system.redaction import check_secrets, hidden_options, published, redact, redacted

ROOT = Path(__file__).parents[2]
USER, PASSWORD, SIGNATURE = "planteduser", "planted/p:ss w?rd", "plantedsignature"
SECRETS = (USER, PASSWORD, "planted/p", SIGNATURE)
SMALL = [
    "--data.init_args.image_size=8", "--data.init_args.batch_size=4", "--data.init_args.num_workers=0",
    "--data.init_args.num_classes=2", "--data.init_args.augment.color_jitter=0", "--model.init_args.shape.dim=8",
    "--model.init_args.shape.depth=1", "--model.init_args.shape.heads=1", "--model.init_args.attention.block_grid=[2,2]",
    "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.log_every_n_steps=1",
]  # fmt: skip
LOGGERS = (
    "[{class_path: TensorBoardLogger, init_args: {save_dir: .}}, {class_path: CSVLogger, init_args: {save_dir: .}}]"
)


def spellings(secret: str) -> set[bytes]:
    """Return a secret as text, in a URL, in base64 at each of three offsets, in UTF-16 and in UTF-32."""
    packed = {base64.b64encode(b" " * shift + secret.encode())[4:-4] for shift in range(3)}
    wide = {secret.encode("utf-16-le"), secret.encode("utf-32-le")}
    return {secret.encode(), quote(secret, safe="").encode(), *wide, *packed} - {b""}


def contents(data: bytes, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield the bytes of a file, and of all files packed in it."""
    yield name, data
    for magic, unpack in ((b"\x1f\x8b", gzip.decompress), (b"BZh", bz2.decompress), (b"\xfd7zXZ", lzma.decompress)):
        if data.startswith(magic):
            yield from contents(unpack(data), f"{name}!")
    if data.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.namelist():
                yield from contents(archive.read(member), f"{name}!{member}")
    elif name.endswith(".tar"):
        with tarfile.open(fileobj=io.BytesIO(data)) as members:
            for entry in members:
                stream = members.extractfile(entry)
                yield from contents(stream.read() if stream else b"", f"{name}!{entry.name}")


def leaks(folder: Path, secrets: tuple[str, ...] = SECRETS) -> list[str]:
    """Return the files whose name or content contains one of the secrets."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        for name, data in contents(path.read_bytes(), str(path.relative_to(folder))):
            if any(text in data or text in name.encode() for secret in secrets for text in spellings(secret)):
                found.append(name)
    return found


class Guarded(http_server._Handler):
    """Request handler that requires the password and the signature."""

    @override
    def do_GET(self) -> None:
        asked = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if self.headers.get("Authorization") == f"Basic {asked}" and SIGNATURE in self.path:
            super().do_GET()
        else:
            self.send_error(401)


def url(server: Server, password: str = PASSWORD) -> str:
    address = server.url.removeprefix("http://")
    return f"http://{USER}:{quote(password, safe='')}@{address}/train-{{0000..0001}}.tar?signature={SIGNATURE}"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two shards of gray images in two classes."""
    folder = tmp_path_factory.mktemp("served")

    def member(index: int) -> dict[str, Any]:
        stream = io.BytesIO()
        Image.fromarray(np.full((8, 8, 3), index * 9, np.uint8)).save(stream, "PNG")
        return {"png": stream.getvalue(), "cls": str(index % 2)}

    write_shards(range(16), member, folder, "train", per_shard=8)
    return folder


@pytest.fixture(scope="module")
def server(shards: Path) -> Iterator[Server]:
    with served(shards) as running:
        running.RequestHandlerClass = partial(Guarded, directory=str(shards))  # type: ignore[assignment]
        yield running


def words(where: str, *more: str) -> list[str]:
    data = [f"--data.init_args.{name}={where}" for name in ("train", "val") if where]
    return ["fit", f"--config={ROOT}/configs/classification/folder.yaml", "--run_dir=run", *data, *SMALL, *more]


@pytest.fixture(scope="module")
def trained(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run on guarded shards, its cache, and its output."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(words(url(server), "--trainer.max_epochs=2", f"--trainer.logger={LOGGERS}",
                   "--model.init_args.training.optimizer.min_lr=1e-5", "--data.init_args.shards.cache_dir=cache", "--data.init_args.shards.cache_bytes=1000000"))  # fmt: skip
    return folder


def test_no_file_of_a_run_holds_a_secret(trained: Path) -> None:
    names = {path.name for path in trained.rglob("*")}
    assert {"config.yaml", "hparams.yaml", "report.html", "last.ckpt", "run.json"} <= names
    assert any("tfevents" in name for name in names)
    assert leaks(trained) == []
    train = yaml.safe_load((trained / "run/config.yaml").read_text())["data"]["init_args"]["train"]
    assert train.startswith("http://***@127.0.0.1:")
    assert train.endswith("/train-{0000..0001}.tar?***")


def test_a_search_finds_what_is_planted(tmp_path: Path) -> None:
    """The search itself: plain, gzip in gzip, a checkpoint, base64 and a file name."""
    (tmp_path / "a.gz").write_bytes(gzip.compress(gzip.compress(f"x{USER}".encode())))
    torch.save({"hyper_parameters": {"train": f"http://{USER}@h"}}, tmp_path / "b.ckpt")
    (tmp_path / "c").write_bytes(base64.b64encode(f"Basic {USER}:{PASSWORD}".encode()))
    np.savez_compressed(tmp_path / "d.npz", text=np.array(SIGNATURE))
    (tmp_path / f"{SIGNATURE}.txt").touch()
    assert {name.partition("!")[0][0] for name in leaks(tmp_path)} == {"a", "b", "c", "d", "p"}


def test_a_run_resumes_once_the_url_is_given_again(
    trained: Path, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(trained)
    with pytest.raises(CommandFailed) as failed:
        main(["fit", "--run_dir=run", "--trainer.max_epochs=3"])
    for part in ("data.train, data.val: ", "--data.train=... --data.val=...", "not complete"):
        assert part in str(failed.value)
    assert "\n" not in str(failed.value)
    again = [f"--data.{name}={url(server)}" for name in ("train", "val")]
    with caplog.at_level(logging.INFO):
        main(["fit", "--run_dir=run", "--trainer.max_epochs=3", "--data.shards.max_skipped=7", *again])
    changes = [text for text in caplog.messages if text.startswith("resumed with a changed option")]
    assert changes == ["resumed with a changed option: data.shards.max_skipped 100 -> 7"]
    assert torch.load(trained / "run/checkpoints/last.ckpt", weights_only=True)["epoch"] == 2
    assert leaks(trained) == []


@pytest.mark.parametrize("command", ["validate", "test"])
def test_an_evaluation_by_the_checkpoint_alone_asks_for_the_url(
    trained: Path, server: Server, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    with pytest.raises(CommandFailed, match=r"\*\*\*@.*tar\?\*\*\*: .*--data\.(train|val)=URL"):
        main([command, "--ckpt_path=run", "--data.init_args.shards.cache_bytes=null"])
    main([command, "--ckpt_path=run", *(f"--data.init_args.{name}={url(server)}" for name in ("train", "val"))])
    assert leaks(trained) == []


@pytest.mark.parametrize("password", ["planted-wrong", "planted wrong/p:ss?"])
def test_a_server_that_denies_access_is_reported_without_secrets(
    server: Server, password: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandFailed):
        main(words(url(server, password)))
    printed = capsys.readouterr()
    assert "may not be read" in printed.err
    assert not any(text in printed.out + printed.err for text in ("planted", quote(password, safe="")))
    assert leaks(tmp_path, ("planted",)) == []


SECRET_URL = f"http://{USER}:{SIGNATURE}@host/x?sig={SIGNATURE}"


@pytest.mark.parametrize(
    "arguments",
    [
        [f"--data.trian={SECRET_URL}"],
        [f"--data.batch_size={SECRET_URL}", "--data.train=x", "--data.val=x"],
        [f"--data.train={SECRET_URL}", f"--data.train={SECRET_URL}2"],
        ["--data.train=x", f"--model={SECRET_URL}"],
        [f"--data.train=ftp{SECRET_URL[4:]}", "--data.val=x"],
        [f"--config={SECRET_URL}"],
    ],
    ids=["unknown key", "wrong type", "given twice", "class", "scheme", "configuration"],
)
def test_a_wrong_command_line_is_quoted_without_secrets(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as failed:
        main(["fit", f"--config={ROOT}/configs/classification/folder.yaml", *arguments])
    said = capsys.readouterr()
    assert "***" in said.err
    assert not any(text in said.out + said.err + str(failed.value) for text in (USER, SIGNATURE))
    assert leaks(tmp_path) == []


@pytest.mark.parametrize("tool", ["export", "consolidate", "compare"])
def test_tools_quote_what_they_are_given_without_secrets(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ([SECRET_URL, "b"], ["a", "b", f"--wrong={SECRET_URL}"]):
        with pytest.raises(SystemExit):
            registry.run(tool, words)
        said = capsys.readouterr()
        assert "***" in said.err
        assert not any(text in said.out + said.err for text in (USER, SIGNATURE))


def test_what_is_published_has_no_secrets_and_no_local_paths(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = dict(WholeCheckpointIO().load_checkpoint(trained / "run"))
    content.pop("read_from")
    private = tmp_path / "private home/shards/train.tar"  # as checkpoints of earlier versions remember them
    content["datamodule_hyper_parameters"] |= {
        "train": ["https://planteduser@h/x?plantedsignature", str(private)],
        "shards": {"cache_dir": str(private.parent)},
    }
    torch.save(content, "old.ckpt")
    registry.run("export", ["old.ckpt", "exported"])
    assert leaks(tmp_path / "exported", (*SECRETS, str(tmp_path), "private home")) == []
    card = (tmp_path / "exported/README.md").read_text()
    assert "https://***@h/x?***" in card
    assert "train.tar" in card


def test_configurations_of_libraries_lose_paths_and_tokenizers_keep_their_words(tmp_path: Path) -> None:
    config = {"_name_or_path": str(tmp_path / "teacher"), "id2label": {"0": "/a/b"}, "n": 1, "scale": [0.5, None]}
    words = {"model": {"vocab": {"/home/alice/": 1}}, "text": "https://a/b?c /home/alice/x"}
    tokenizer = {"name_or_path": f"https://{USER}@h/x", "added_tokens_decoder": {"0": {"content": "/home/alice/"}}}
    (tmp_path / "vae").mkdir()
    for name, content in {
        "config.json": config,
        "tokenizer.json": words,
        "vae/tokenizer_config.json": tokenizer,
    }.items():
        (tmp_path / name).write_text(json.dumps(content))
    remove_private(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {**config, "_name_or_path": "teacher"}
    assert json.loads((tmp_path / "tokenizer.json").read_text()) == words
    changed = json.loads((tmp_path / "vae/tokenizer_config.json").read_text())
    assert changed == {**tokenizer, "name_or_path": "https://***@h/x"}


class ForeignData(LightningDataModule):
    """Data module without code of this suite."""

    def __init__(self, where: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters()


class ForeignModel(LightningModule):
    """Model without code of this suite."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_classes_of_others_keep_their_options_and_write_none() -> None:
    secret = f"https://{USER}@host/x"
    model, data = ForeignModel(secret), ForeignData(secret, {"api_key": SIGNATURE, "count": 3})
    trainer = Trainer(logger=False, enable_checkpointing=False)
    trainer.datamodule = data  # type: ignore[attr-defined]
    callback = SaveConfig.__new__(SaveConfig)
    callback.already_saved = True
    callback.setup(trainer, model, "fit")
    assert data.hparams["where"] == model.hparams["where"] == secret
    assert data.hparams_initial["options"] == {"api_key": "***", "count": 3}
    checkpoint = {"hyper_parameters": dict(model.hparams), "datamodule_hyper_parameters": dict(data.hparams)}
    callback.on_save_checkpoint(trainer, model, checkpoint)
    assert checkpoint["hyper_parameters"]["where"] == "https://***@host/x"
    assert checkpoint["datamodule_hyper_parameters"]["options"]["api_key"] == "***"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:word@host:80/a/b.tar", "https://***@host:80/a/b.tar"),
        ("https://token@host/x", "https://***@host/x"),
        ("s3://KEY:SE/CR?T@bucket/x", "s3://***@bucket/x"),
        ("https://host/x.tar?X-Amz-Signature=abc&Expires=1#part", "https://host/x.tar?***"),
        ("https://host/x#access_token=abc", "https://host/x?***"),
        ("zip://a.csv::https://u:p@host/z.zip?sig=1", "zip://a.csv::https://***@host/z.zip?***"),
        ("https:/u:p@host/x", "https:/***@host/x"),  # a URL that was taken for a path
        ("http://u:p@[::1]:80/x", "http://***@[::1]:80/x"),
        ("failed: 'https://u:p@h/x?s=1', then https://h/y?z (again)", "failed: 'https://***@h/x?***', then https://h/y?*** (again)"),
        ("--trainer.logger.init_args.api_key=abc", "--trainer.logger.init_args.api_key=***"),
        ("{'password': 'a b', 'n': 1}", "{'password': ***, 'n': 1}"),
        ("hf://datasets/a/b@main/train.parquet", "hf://datasets/a/b@main/train.parquet"),
        ("https://host/train-{0000..0009}.tar", "https://host/train-{0000..0009}.tar"),
        ("pad_token=3, tokenizer: x; see docs://", "pad_token=3, tokenizer: x; see docs://"),
    ],
)  # fmt: skip
def test_redaction(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown


def test_options_without_secrets_are_the_same_objects() -> None:
    options = {"a": [1, {"b": "hf://x/y@z"}], "tensor": torch.ones(2), "token": None, "c": ("x",)}
    assert redacted(options) is options
    assert redacted({"token": "abc", "urls": ("https://u@h/x", "y")}) == {
        "token": "***",
        "urls": ("https://***@h/x", "y"),
    }
    assert list(hidden_options({"a": [{"b": "https://***@h/x"}], "api_key": "***", "c": "***", "d": "https://h/?***"})) == [
        "a.b", "api_key", "d",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/home/alice/data/train-{0..9}.tar", "train-{0..9}.tar"),
        ("/home/alice/my data/x", "x"),
        ("/a home/x", "x"),
        ("~/data/x", "x"),
        ("~alice/x", "x"),
        ("../../alice/x/", "x"),
        ("file:///home/alice/x.csv", "x.csv"),
        ("from /home/alice/x, to /scratch/alice/y", "from x, to y"),
        (Path("/home/alice/x"), "x"),
        (
            ["</s>", "/no_think", "a/b", "https://h/a/b", "..", "~"],
            ["</s>", "/no_think", "a/b", "https://h/a/b", "..", "~"],
        ),
    ],
)
def test_local_paths_are_not_published(value: Any, shown: Any) -> None:
    assert published({"key": value}) == {"key": shown}


@pytest.mark.parametrize("where", ["https://***@host/x", "s3://bucket/x?***"])
def test_an_incomplete_url_is_not_opened(where: str) -> None:
    with pytest.raises(ValueError, match="give it again"):
        check_secrets(where)
    with pytest.raises(ValueError, match="give it again"), open_bytes(where):
        pass


def test_messages_warnings_and_errors_are_redacted(capsys: pytest.CaptureFixture[str]) -> None:
    prepare_streams()
    secret = f"https://{USER}:{SIGNATURE}@host/x"
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)  # of a library
    logger = logging.getLogger("somebody.else")
    logger.addHandler(handler)
    logger.warning("%s is \x1b[2Jgone", secret)
    logger.removeHandler(handler)
    assert stream.getvalue() == "https://***@host/x is \\x1b[2Jgone\n"
    assert USER not in printable(secret) + harmless(secret) + warnings.formatwarning(
        UserWarning(secret), UserWarning, "f", 1
    )
    sys.excepthook(RuntimeError, RuntimeError(secret), None)
    assert USER not in capsys.readouterr().err


def test_names_of_folders_and_records_hold_no_secrets(tmp_path: Path) -> None:
    one, two = f"https://{USER}:a@h/d/x.tar", "https://h/d/x.tar"
    assert kept_at(one, tmp_path) == kept_at(two, tmp_path)
    value = f"https://{USER}@h/x?sig={SIGNATURE}"
    line = read_words(["fit", f"--data.init_args.train={value}"], ["fit"])
    sweep._begin(tmp_path / sweep.name_of({"data.init_args.train": value}), line)
    resume_order(ShardSet(tmp_path, "train"), {"model": value}, [Origin("a")], 1)
    assert leaks(tmp_path) == []


# Text that means something to a terminal, to Markdown, HTML and spreadsheets


def test_names_are_no_formulas_and_no_lines_of_their_own(trained: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    images = tmp_path / "photos"
    images.mkdir()
    for name in ("=1+1.png", "@a.png", "line\nbreak.png", "-2.png"):
        Image.new("RGB", (8, 8)).save(images / name)
    content = dict(WholeCheckpointIO().load_checkpoint(trained / "run"))
    content.pop("read_from")
    content["class_names"] = ['=HYPERLINK("http://h")', "two\nlines\u2028of"]
    torch.save(content, "odd.ckpt")
    monkeypatch.chdir(images)
    main(["predict", "--ckpt_path=../odd.ckpt", "--data.init_args.predict_dir=.", "--data.init_args.val=x",
          "--data.init_args.train=x"])  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with next(tmp_path.rglob("predictions.csv")).open(newline="", encoding="utf-8") as stream:
        lines = list(csv.reader(stream))
    assert lines[0] == ["path", "predicted", '\'=HYPERLINK("http://h")', "two\\nlines\\u2028of"]
    assert [row[0] for row in lines[1:]] == ["'-2.png", "'=1+1.png", "'@a.png", "line\\nbreak.png"]
    assert {row[1] for row in lines[1:]} <= set(lines[0])
    registry.run("export", ["odd.ckpt", "exported"])
    assert (tmp_path / "exported/classes.txt").read_text() == '=HYPERLINK("http://h")\ntwo\\nlines\\u2028of\n'


def test_a_card_shows_markdown_and_html_as_text(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = dict(WholeCheckpointIO().load_checkpoint(trained / "run"))
    content.pop("read_from")
    content["datamodule_hyper_parameters"]["train"] = "a\n```\n<script>alert(1)</script>\n````\n# Title"
    content["pytorch-lightning_version"] = "2 <img src=x onerror=alert(1)> [click](http://h)\n# Title"
    content["callbacks"]["RunReport"]["points"] = {"val/`x|y`<b>": [[1, 0.5]]}
    torch.save(content, "odd.ckpt")
    folder = 'x"); import os; ("<b>[y](z)'
    registry.run("export", ["odd.ckpt", folder])
    card = (tmp_path / folder / "README.md").read_text()
    outside, fence = [], ""
    for line in card.splitlines():
        if line.startswith("```") and not fence:
            fence = line[: len(line) - len(line.lstrip("`"))]
        elif fence and line == fence:
            fence = ""
        elif not fence:
            outside.append(line)
    text = "\n".join(outside)
    assert "alert(1)</script>" not in text
    assert "\\<img src" in text
    assert "\\[click\\]" in text
    assert "\\<b\\>\\[y\\](z)" in text
    assert "val/\\`x\\|y\\`\\<b\\>" in text
    assert [line for line in outside if line.startswith("# ")] == [
        outside[next(i for i, x in enumerate(outside) if x[:2] == "# ")]
    ]
    code = card.partition("```python\n")[2].partition("\n```")[0]
    imported = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(node) for node in imported] == ["from mhla_tasks.classification import VisionTransformer"]


@pytest.mark.parametrize("text", ["plain", "a ```` b\n<script>", "`````\n# Title"])
def test_a_fence_is_longer_than_any_in_its_text(text: str) -> None:
    first, *inside, last = fenced(text, "md").splitlines()
    assert first == f"{last}md"
    assert "\n".join(inside) == text
    assert last not in text


def test_names_in_pictures_are_no_formulas(tmp_path: Path) -> None:
    name = r"val/$\frac$ [bold]"
    curves = LearningCurves()
    curves._path = tmp_path / "curves.png"
    curves.points[name] = [(1, 0.5), (2, 0.25)]
    curves.draw()
    record = {
        "metrics": {name: [[1, 0.5], [2, 0.25]]},
        "seconds": 1,
        "steps": 2,
        "finished": True,
        "parameters": 1,
        "best": {},
        "versions": {},
    }
    runs = [Run(tmp_path / number, record, {"model.name": f"$\\frac$ {number}\x1b[2J"}) for number in "12"]
    draw(group_runs(runs), tmp_path / "compared.png")
    assert {path.name for path in tmp_path.iterdir()} == {"curves.png", "compared.png"}


@pytest.mark.parametrize("name", ["run[/red]", "run[bold]x", "run\x1b[2Jx"])
def test_names_are_neither_markup_nor_commands_of_the_terminal(
    trained: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(trained / "run")
    registry.run("consolidate", [name, f"{name}.ckpt"])
    registry.run("export", [f"{name}.ckpt", f"{name}-exported"])
    registry.run("compare", [name, str(trained / "run")])
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert harmless(name) in printed
