"""Prepared shards and what they were made from: edits are named, repairs resume, two calls do not disturb each other."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import signal
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mhla_tasks.commandline import registry
from mhla_tasks.diffusion import LatentShards
from mhla_tasks.text_to_image import ImageLatentShards
from PIL import Image
from processes import fork_server, run_cli
from safetensors.torch import load_file, save_file
from shipped_small import save_clips, save_images, save_models, save_texts

from lightning_mhla.data.origins import MODEL_FILES, Origin, model_digest
from lightning_mhla.data.write import Preparation, write_shards

LONG = [pytest.param(kind, marks=pytest.mark.long) for kind in ("caption-latents", "clip-latents")]
KINDS = ["images", "latents", "captions", "clips", "text", *LONG]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    save_models(folder)
    save_images(folder / "pictures", ("cat", "dog"), {"train": 5})
    save_clips(folder / "clips", 5)
    save_texts(folder / "texts")
    (folder / "captioned").mkdir()
    for number in range(10):
        pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"captioned/{number}.png")
        (folder / f"captioned/{number}.txt").write_text(f"picture {number}")
    return folder


def command(kind: str, world: Path, source: Path, target: Path) -> list[str]:
    """Return the arguments of a command that writes shards of four or five samples."""
    places = [str(source), str(target)]
    clip = ["--frames", "5", "--height", "16", "--width", "16", "--fps", "4", "--text_length", "8"]
    return {
        "images": [*places, "--per_shard", "4"],
        "latents": [*places, "--vae", str(world / "vae"), "--image_size", "16", "--per_shard", "4", "--device", "cpu"],
        "captions": [*places, "--per_shard", "4"],
        "caption-latents": [*places, "--model", str(world / "sana"), "--height", "32", "--width", "32", "--per_shard", "4",
                            "--text_length", "8", "--device", "cpu"],
        "clips": [*places, "--per_shard", "2"],
        "clip-latents": [*places, "--model", str(world / "wan"), *clip, "--per_shard", "2", "--device", "cpu"],
        "text": [str(target), str(source), "--tokenizer", str(world / "tokenizer"), "--run_characters", "3000",
                 "--runs_per_shard", "2"],
    }[kind]  # fmt: skip


SOURCES = {
    "images": "pictures/train", "latents": "pictures/train", "captions": "captioned", "caption-latents": "captioned",
    "clips": "clips", "clip-latents": "clips", "text": "texts",
}  # fmt: skip


def source_of(kind: str, world: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(world / SOURCES[kind], tmp_path / "source"))


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.tar"))}


def samples(folder: Path) -> int:
    keys = set()
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as tar:
            keys |= {(path, name.partition(".")[0]) for name in tar.getnames()}
    return len(keys)


def edited(path: Path) -> None:
    """Change the content of a file, but not its size and times."""
    times = path.stat()
    data = path.read_bytes()
    if path.suffix == ".png":
        image = np.asarray(Image.open(path))
        Image.fromarray(255 - image).save(path)
    else:
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def grown(path: Path) -> None:
    """Append to a file, like a program that is still writing it."""
    with path.open("a") as stream:
        stream.write("one more line\n" * 1000)


@pytest.mark.parametrize("kind", KINDS)
def test_changes_of_the_source_are_named_and_forced(kind: str, world: Path, tmp_path: Path) -> None:
    source, target = source_of(kind, world, tmp_path), tmp_path / "shards"
    name, words = f"prepare {kind}", command(kind, world, source, target)
    registry.run(name, words)
    first, count = digests(target), samples(target)
    for file in source.rglob("*.*"):
        shutil.copy2(file, file.with_suffix(".new"))  # as a copy of the data has other inodes and times
        file.with_suffix(".new").replace(file)
    registry.run(name, words)
    assert digests(target) == first

    files = sorted(path for path in source.rglob("*") if path.suffix in (".txt", ".png"))
    edited(files[0])
    with pytest.raises(
        SystemExit, match=rf"made from different files or options \(changed: .*{files[0].stem}.*--force"
    ) as error:
        registry.run(name, words)
    assert "added" not in str(error.value)
    extra = files[0].with_name(f"more{files[0].suffix}")
    for file in files[0].parent.glob(f"{files[0].stem}.*"):
        shutil.copy(file, extra.with_suffix(file.suffix))
    with pytest.raises(SystemExit, match=r"changed: .*added: .*more"):
        registry.run(name, words)
    assert digests(target) == first, "an error leaves everything as it was"

    registry.run(name, [*words, "--force"])
    assert samples(target) > count or kind == "text"
    assert digests(target) != first
    for file in extra.parent.glob("more.*"):
        file.unlink()
    with pytest.raises(SystemExit, match=r"made from different files or options \(removed: .*more"):
        registry.run(name, words)


@pytest.mark.parametrize(
    ("kind", "change"), [("images", edited), ("captions", edited), ("text", edited), ("text", grown)]
)
def test_a_file_that_changes_while_it_is_read_is_named(
    kind: str, change: Callable[[Path], None], world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = source_of(kind, world, tmp_path), tmp_path / "shards"
    file = sorted(path for path in source.rglob("*") if path.suffix in (".txt", ".png"))[0]

    def enter(self: Preparation) -> Preparation:
        call = enter_before(self)
        change(file)  # after the record is written
        return call

    enter_before = Preparation.__enter__
    words = command(kind, world, source, target)
    with monkeypatch.context() as patch:
        patch.setattr(Preparation, "__enter__", enter)
        with pytest.raises(SystemExit, match=rf"changed while they were read \(changed: .*{file.stem}.*--force"):
            registry.run(f"prepare {kind}", words)
    registry.run(f"prepare {kind}", [*words, "--force"])
    forced = digests(target)
    registry.run(f"prepare {kind}", words)
    assert digests(target) == forced


@pytest.mark.parametrize(
    ("kind", "option", "message"),
    [
        ("images", ["--seed", "3"], "seed was 0 and is 3"),
        ("captions", ["--caption_key", "said"], "caption_key was 'caption' and is 'said'"),
        ("text", ["--limit", "2"], "limit was None and is 2"),
        ("latents", ["--image_size", "24"], "image_size was 16 and is 24"),
    ],
)
def test_changed_options_are_named(kind: str, option: list[str], message: str, world: Path, tmp_path: Path) -> None:
    words = command(kind, world, world / SOURCES[kind], tmp_path)
    registry.run(f"prepare {kind}", words)
    with pytest.raises(SystemExit, match=message):
        registry.run(f"prepare {kind}", [*words, *option])


@pytest.mark.parametrize(
    ("kind", "option", "message"),
    [
        ("images", ["--seed", "-1"], "seed=-1 must be at least 0"),
        ("images", ["--max_skipped", "-1"], "max_skipped=-1 must be at least 0"),
        ("latents", ["--batch_size", "0"], "batch_size=0 must be at least 1"),
        ("latents", ["--image_size", "0"], "image_size=0 must be at least 1"),
        ("text", ["--runs_per_shard", "0"], "runs_per_shard=0 must be at least 1"),
        ("text", ["--skip", "-1"], "skip=-1 must be at least 0"),
        ("text", ["--limit", "0"], "limit=0 must be at least 1"),
    ],
)
def test_numbers_out_of_range_are_named(
    kind: str, option: list[str], message: str, world: Path, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=message):
        registry.run(f"prepare {kind}", [*command(kind, world, world / SOURCES[kind], tmp_path / "out"), *option])
    assert not list(tmp_path.rglob("*.tar"))


@pytest.mark.parametrize("kind", ["images", "latents", "text"])
def test_shards_are_not_written_into_their_source(kind: str, world: Path, tmp_path: Path) -> None:
    source = source_of(kind, world, tmp_path)
    with pytest.raises(SystemExit, match="is inside the source"):
        registry.run(f"prepare {kind}", command(kind, world, source, source / "shards"))
    assert not (source / "shards").exists()


@pytest.mark.parametrize(
    ("kind", "folder"), [("images", ""), ("images", ".shards"), ("latents", ".shards"), ("text", ".shards")]
)
def test_shards_in_a_source_that_does_not_read_them(kind: str, folder: str, world: Path, tmp_path: Path) -> None:
    source = source_of(kind, world, tmp_path)
    words = command(kind, world, source, source / folder)
    registry.run(f"prepare {kind}", words)
    first = digests(source / folder)
    registry.run(f"prepare {kind}", words)
    assert digests(source / folder) == first != {}


@pytest.mark.parametrize("kind", ["images", "captions", "latents"])
def test_samples_that_are_all_broken_are_an_error(kind: str, world: Path, tmp_path: Path) -> None:
    source = source_of(kind, world, tmp_path)
    for image in source.rglob("*.png"):
        image.write_bytes(b"not an image")
    words = command(kind, world, source, tmp_path / "out")
    with pytest.raises(SystemExit, match=r"none of the \d+ samples can be used"):
        registry.run(f"prepare {kind}", words)
    assert not [*(tmp_path / "out").glob("*.tar"), *(tmp_path / "out").glob("*-classes.txt")]
    with pytest.raises(SystemExit, match=r"broken samples: 6, more than --max_skipped 5"):
        registry.run(f"prepare {kind}", [*words, "--max_skipped", "5"])
    assert list((tmp_path / "out").glob("*.tar")), "an empty shard, as an interrupted call leaves it"
    with pytest.raises(SystemExit, match=r"none of the \d+ samples can be used"):
        registry.run(f"prepare {kind}", words)
    assert not list((tmp_path / "out").glob("*.tar"))


def test_shards_without_a_sample_are_an_error(world: Path, tmp_path: Path) -> None:
    tarfile.open(tmp_path / "train-0000.tar", "w").close()
    with pytest.raises(SystemExit, match="the source has no images, so there is nothing to encode"):
        registry.run("prepare latents", command("latents", world, tmp_path / "train-0000.tar", tmp_path / "out"))


@pytest.mark.parametrize("kind", ["images", "latents"])
def test_a_second_call_does_not_rename_the_labels(kind: str, world: Path, tmp_path: Path) -> None:
    words = command(kind, world, world / SOURCES[kind], tmp_path)
    registry.run(f"prepare {kind}", words)
    registry.run(f"prepare {kind}", words)
    (tmp_path / "val-classes.txt").write_text("dog\ncat\n")  # the labels of other prefixes are taken over
    with pytest.raises(
        SystemExit, match=r"have the labels of train-classes\.txt, which lists other classes, or another order"
    ):
        registry.run(f"prepare {kind}", words)
    assert (tmp_path / "train-classes.txt").read_text() == "cat\ndog\n"


def test_latents_of_two_models_are_named(world: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = command("latents", world, world / SOURCES["latents"], tmp_path / "train")
    registry.run("prepare latents", words)
    place = words.index("--vae") + 1
    words[1], words[place] = str(tmp_path / "val"), str(shutil.copytree(words[place], tmp_path / "vae"))
    for changed in (False, True):
        if changed:
            resave(next((tmp_path / "vae").glob("*.safetensors")))
        registry.run("prepare latents", [*words, "--force"])
        data = LatentShards(str(tmp_path / "train"), str(tmp_path / "val"), sample_size=8, batch_size=2)
        data.source("train")
        data.source("validate")
        assert ("name models with different files" in caplog.text) == changed
    for content in ("[]", "version 2", f'{{"{MODEL_FILES}": {{}}}}'):  # a file of a different program
        (tmp_path / "val/train-manifest.json").write_text(content)
        data.shards.compare_encoders("validate")


def test_latents_of_another_model_than_the_one_that_decodes_are_named(
    world: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model counts as the same under every path to it, as a copy, and as part of a pipeline; nothing else does."""
    registry.run("prepare latents", command("latents", world, world / SOURCES["latents"], tmp_path / "shards"))
    data = LatentShards(str(tmp_path / "shards"), str(tmp_path / "shards"), sample_size=8, batch_size=2)
    shutil.copytree(world / "vae", tmp_path / "pipeline/vae")
    shutil.copytree(world / "vae", tmp_path / "changed")
    resave(next((tmp_path / "changed").glob("*.safetensors")))
    monkeypatch.chdir(world)
    for path in (world / "vae", Path("vae"), tmp_path / "pipeline/vae"):
        data.shards.compare_models({"model.vae": str(path)})
    assert "as the model that encoded the data" not in caplog.text
    for path in (tmp_path / "changed", Path("stabilityai/sd-vae-ft-ema"), tmp_path / "shards"):
        caplog.clear()
        data.shards.compare_models({"model.vae": str(path)})
        assert f"model.vae is {path}, and {tmp_path}/shards/train-manifest.json names {world}/vae" in caplog.text
    (tmp_path / "shards/train-manifest.json").write_text('{"vae": 3}')  # a file of a different program
    caplog.clear()
    data.shards.compare_models({"model.vae": "stabilityai/sd-vae-ft-ema"})
    assert not caplog.text


def test_the_model_of_every_folder_of_shards_is_compared_by_its_files(
    world: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights replaced in place, another folder of the same relative path, and the second of two sources."""
    shutil.copytree(world / "vae", tmp_path / "a/vae")
    monkeypatch.chdir(tmp_path / "a")
    words = command("latents", world, world / SOURCES["latents"], tmp_path / "one")
    words[words.index("--vae") + 1] = "vae"
    registry.run("prepare latents", words)
    both = [str(tmp_path / "one"), str(tmp_path / "two")]
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    text = json.loads((tmp_path / "two/train-manifest.json").read_text())
    data = LatentShards(both, both[0], sample_size=8, batch_size=2)
    data.shards.compare_models({"model.vae": "vae"})
    assert "WARNING" not in caplog.text
    (tmp_path / "two/train-manifest.json").write_text(
        json.dumps({**text, "vae": "hub/\x1b[2Jtwo\n", "model_files": None})
    )
    data.shards.compare_models({"model.vae": "vae"})
    assert caplog.text.count("as the model that encoded the data") == 1
    assert r"two/train-manifest.json names hub/\x1b[2Jtwo\n as the model" in caplog.text
    (tmp_path / "two/train-manifest.json").write_text(json.dumps({**text, "vae": "a\0b", "model_files": None}))
    caplog.clear()
    data.shards.compare_models({"model.vae": "vae"})
    assert "model.vae=vae is not compared with" in caplog.text
    caplog.clear()
    (tmp_path / "b").mkdir()
    resave(next(Path("vae").glob("*.safetensors")))
    shutil.copytree("vae", tmp_path / "b/vae")
    for folder in ("a", "b"):
        monkeypatch.chdir(tmp_path / folder)
        LatentShards(both[0], both[0], sample_size=8, batch_size=2).shards.compare_models({"model.vae": "vae"})
    assert caplog.text.count(f"{tmp_path}/one/train-manifest.json names vae as the model that encoded the data") == 2


def test_encoded_captions_of_another_pipeline_are_named(
    world: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = command("caption-latents", world, world / SOURCES["caption-latents"], tmp_path / "shards")
    registry.run("prepare caption-latents", words)
    data = ImageLatentShards(str(tmp_path / "shards"), str(tmp_path / "shards"), batch_size=2)
    shutil.copytree(world / "sana", tmp_path / "copy")
    for folder in (world / "sana", tmp_path / "copy"):
        data.shards.compare_models({"model.vae": str(folder)})
        data.shards.compare_models({"model.vae": str(folder / "vae")})
        data.shards.compare_models({"model.text.encoder": str(folder)})
    assert "as the model that encoded the data" not in caplog.text
    resave(next((tmp_path / "copy/text_encoder").glob("*.safetensors")))
    data.shards.compare_models({"model.text.encoder": str(tmp_path / "copy")})
    assert f"names {world}/sana as the model that encoded the data" in caplog.text


def test_training_names_the_model_of_the_data(world: Path, tmp_path: Path) -> None:
    registry.run("prepare latents", command("latents", world, world / SOURCES["latents"], tmp_path / "shards"))
    shutil.copytree(world / "vae", tmp_path / "changed")
    resave(next((tmp_path / "changed").glob("*.safetensors")))
    model = {"num_classes": 2, "sample_size": 8, "channels": 4, "attention": {"block_grid": [2, 2]}}
    model |= {"shape": {"patch_size": 2, "depth": 1, "heads": 1, "dim": 16}}
    shards = {"train": f"{tmp_path}/shards", "val": f"{tmp_path}/shards", "sample_size": 8, "batch_size": 2}
    trainer = {"accelerator": "cpu", "max_steps": 1, "logger": False, "enable_checkpointing": False}
    for folder, is_named in ((world / "vae", False), (tmp_path / "changed", True)):
        config = {
            "model": {"class_path": "mhla_tasks.diffusion.ClassToImage", "init_args": {**model, "vae": str(folder)}},
            "data": {"class_path": "mhla_tasks.diffusion.LatentShards", "init_args": {**shards, "num_workers": 0}},
            "trainer": trainer,
        }
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        text = " ".join(run_cli("fit", "--config", str(tmp_path / "config.yaml")).split())
        assert ("set model.vae to the model that encoded the data" in text) == is_named


@pytest.mark.parametrize("repair", ["removed", "repaired", "renamed"])
@pytest.mark.parametrize("kind", ["images", "latents", "captions", LONG[0]])
def test_a_stopped_command_resumes_after_a_repair(
    kind: str, repair: str, world: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last sample in the order of writing is broken, and no broken sample is allowed."""
    source, target = source_of(kind, world, tmp_path), tmp_path / "shards"
    words = [*command(kind, world, source, target), "--max_skipped", "0"]
    registry.run(f"prepare {kind}", words)
    complete = digests(target)
    with tarfile.open(sorted(target.glob("*.tar"))[-1]) as tar:
        last = max(member.name for member in tar).partition(".")[0]
    lines = json.loads("[" + ",".join(_origins(target)[1:]) + "]")
    broken = source / lines[int(last)]["name"]
    good = broken.read_bytes()
    shutil.rmtree(target)
    broken.write_bytes(good[:100])
    with pytest.raises(SystemExit, match="broken samples: 1, more than --max_skipped 0"):
        registry.run(f"prepare {kind}", words)
    assert broken.name in caplog.text
    written = digests(target)
    assert written == {name: complete[name] for name in sorted(complete)[:-1]}

    if repair == "removed":
        broken.unlink()
    elif repair == "repaired":
        broken.write_bytes(good)
    else:  # the name is another file: it would be one more sample
        broken.rename(broken.with_name("z.png"))
        with pytest.raises(SystemExit, match=r"added: .*z\.png"):
            registry.run(f"prepare {kind}", words)
        return
    registry.run(f"prepare {kind}", words)
    assert samples(target) == len(lines) - (repair == "removed")
    assert {name: value for name, value in digests(target).items() if name in written} == written
    if repair == "repaired":
        assert digests(target) == complete
    registry.run(f"prepare {kind}", words)  # and once more: nothing has changed


def _origins(target: Path) -> list[str]:
    import gzip

    return gzip.decompress((target / "train-origins.jsonl.gz").read_bytes()).decode().splitlines()


def test_a_skipped_sample_that_is_repaired_is_mentioned(
    world: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    source = source_of("images", world, tmp_path)
    file = source / "cat/2.png"
    good = file.read_bytes()
    file.write_bytes(good[:90])
    words = command("images", world, source, tmp_path / "shards")
    registry.run("prepare images", words)
    assert "9 images in 3 shards" in capsys.readouterr().out
    file.write_bytes(good)
    registry.run("prepare images", words)
    assert "1 skipped files have changed since; --force" in caplog.text
    registry.run("prepare images", [*words, "--force"])
    assert samples(tmp_path / "shards") == 10


def test_latents_of_shards_name_the_shard_that_changed(world: Path, tmp_path: Path) -> None:
    """Two folders with shards of the same names are one source."""
    for part in ("a", "b"):
        registry.run("prepare images", command("images", world, world / SOURCES["images"], tmp_path / part))
    words = command("latents", world, tmp_path, tmp_path / "latents")
    words[0] = str(tmp_path / "{a,b}/train-*.tar")
    registry.run("prepare latents", words)
    assert samples(tmp_path / "latents") == 20
    registry.run(
        "prepare images",
        [*command("images", world, world / SOURCES["images"], tmp_path / "b"), "--force", "--seed", "5"],
    )
    with pytest.raises(SystemExit, match=r"changed: .*b/train-0000\.tar"):
        registry.run("prepare latents", words)


@pytest.mark.parametrize("record", [
    b"cut", gzip.compress(b"[" * 200_000), gzip.compress(b"{}\n[]\n"), gzip.compress(b"{}\n3\n"),
    gzip.compress(b'{}\n{"name": "a", "note": "", "files": [[1, 2]]}\n'),
    gzip.compress(b'{}\n{"name": "a", "note": "", "files": [[1e999, 2, "b"]]}\n'),
])  # fmt: skip
def test_shards_without_a_record_are_not_mixed_with_others(record: bytes, world: Path, tmp_path: Path) -> None:
    words = command("images", world, world / SOURCES["images"], tmp_path)
    registry.run("prepare images", words)
    (tmp_path / "train-origins.jsonl.gz").write_bytes(record)
    with pytest.raises(SystemExit, match=r"no train-origins\.jsonl\.gz says what they were made from"):
        registry.run("prepare images", words)
    registry.run("prepare images", [*words, "--force"])


def test_a_source_that_is_named_twice_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    origins = [Origin("a.txt", (tmp_path / "a.txt",))] * 2
    with pytest.raises(ValueError, match=r"a\.txt is named more than once"):
        write_shards([0, 1], lambda number: {"txt": b"x"}, tmp_path, "train", 2, origins=origins)


WRITER = """
import sys, time
from pathlib import Path
from lightning_mhla.data import write_shards
folder, prefix, go = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
def encode(number):
    while number >= 96 and not go.exists():
        time.sleep(0.01)
    return {"txt": (b"%08d" % number) * 500}
write_shards(list(range(150)), encode, folder, prefix, 150)
"""
"""Writes the first samples of a shard, then waits until a file is there."""

NO_LOCKS = "import fcntl\nfcntl.flock = lambda *_: None\n"
"""Two hosts on a file system whose locks they do not see of each other."""


class Writer:
    """Process that writes shards."""

    def __init__(self, folder: Path, prefix: str = "train", program: str = WRITER) -> None:
        self.folder, self.prefix, self.go = folder, prefix, folder.parent / "go"
        self.errors = folder.parent / f"errors-{time.monotonic_ns()}"
        words = (program, str(folder), prefix, str(self.go))
        self.process = fork_server().start(*words, module="-c", output=self.errors)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 180
        while not condition():
            assert time.monotonic() < end, self.errors.read_text()
            time.sleep(0.01)

    def wait_until_begun(self, parts: int = 1) -> None:
        """Wait until all processes have written half of a shard."""
        pattern = f"{self.prefix}-0000.tar*.part"
        self.wait_for(lambda: sum(path.stat().st_size > 50_000 for path in self.folder.glob(pattern)) == parts)

    def wait_until_waiting(self) -> None:
        self.wait_for(lambda: "waiting until it has finished" in self.errors.read_text())

    def end(self, status: int = 0) -> None:
        assert self.process.wait(timeout=180) == status, self.errors.read_text()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the shard that a single process writes."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "go").touch()
    Writer(folder / "shards").end()
    return digests(folder / "shards")["train-0000.tar"]


@pytest.mark.parametrize("case", ["both", "first killed", "second killed", "other prefix", "without locks"])
def test_two_calls_at_once(case: str, expected: str, tmp_path: Path) -> None:
    program = NO_LOCKS + WRITER if case == "without locks" else WRITER
    both = tmp_path / "both"
    first = Writer(both, program=program)
    first.wait_until_begun()
    second = Writer(both, "val" if case == "other prefix" else "train", program)
    if case == "other prefix":
        second.wait_until_begun()
    elif case == "without locks":
        second.wait_until_begun(parts=2)
    else:
        second.wait_until_waiting()
    killed = {"first killed": first, "second killed": second}.get(case)
    if killed is not None:
        killed.process.kill()
    first.go.touch()
    for writer in (first, second):
        writer.end(-signal.SIGKILL if writer is killed else 0)
    assert set(digests(both).values()) == {expected}
    assert not list(both.glob("*.part"))


def test_calls_that_were_killed_leave_no_wrong_shard(expected: str, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    for _ in range(2):
        writer = Writer(folder)
        writer.wait_until_begun()
        writer.process.kill()
        writer.end(-signal.SIGKILL)
        assert not list(folder.glob("*.tar"))
        for part in folder.glob("*.part"):
            os.truncate(part, 0)  # so that the next one is seen to have begun
    (tmp_path / "go").touch()
    Writer(folder).end()
    assert set(digests(folder).values()) == {expected}
    assert not list(folder.glob("*-0000.tar.part"))


def resave(file: Path) -> None:
    """Multiply all weights of a file by 1.5, as training would change them, without a change of the file's size."""
    save_file({name: 1.5 * tensor for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


@pytest.mark.parametrize(("kind", "option", "part"), [
    ("latents", "--vae", "."), pytest.param("caption-latents", "--model", "vae", marks=pytest.mark.long),
    pytest.param("caption-latents", "--model", "text_encoder", marks=pytest.mark.long),
    pytest.param("clip-latents", "--model", "vae", marks=pytest.mark.long),
])  # fmt: skip
def test_a_model_that_changed_in_its_folder_is_named(
    kind: str, option: str, part: str, world: Path, tmp_path: Path
) -> None:
    words = command(kind, world, source_of(kind, world, tmp_path), tmp_path / "out")
    place = words.index(option) + 1
    words[place] = str(shutil.copytree(words[place], tmp_path / "model"))
    registry.run(f"prepare {kind}", words)
    registry.run(f"prepare {kind}", words)
    resave(next((tmp_path / "model" / part).glob("*.safetensors")))
    with pytest.raises(SystemExit, match=r"made from different files or options \(changed: files of the model\)"):
        registry.run(f"prepare {kind}", words)
    registry.run(f"prepare {kind}", [*words, "--force"])
    registry.run(f"prepare {kind}", words)


def test_shards_of_earlier_versions_are_resumed_without_a_digest_of_the_model(world: Path, tmp_path: Path) -> None:
    words = command("latents", world, source_of("latents", world, tmp_path), tmp_path / "out")
    registry.run("prepare latents", words)
    record = tmp_path / "out/train-origins.jsonl.gz"
    options, *lines = gzip.decompress(record.read_bytes()).decode().splitlines(keepends=True)
    earlier = {name: value for name, value in json.loads(options).items() if name != MODEL_FILES}
    record.write_bytes(gzip.compress((json.dumps(earlier) + "\n" + "".join(lines)).encode()))
    written = digests(tmp_path / "out")
    registry.run("prepare latents", words)
    assert digests(tmp_path / "out") == written


@pytest.mark.parametrize(("file", "same"), [
    ("vae/model.safetensors", False), ("text_encoder/config.json", False), ("tokenizer/tokenizer.json", False),
    ("model.safetensors", True), ("transformer/model.safetensors", True), ("vae/.hidden", True),
])  # fmt: skip
def test_the_digest_of_a_model_covers_what_encodes_samples(file: str, same: bool, tmp_path: Path) -> None:
    for name in ("vae/config.json", file):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(200_000))
    parts = ["vae", "text_encoder", "tokenizer"]
    digest = model_digest(str(tmp_path), parts)
    (tmp_path / file).write_bytes(bytes(100_000) + b"x" + bytes(99_999))
    assert (model_digest(str(tmp_path), parts) == digest) == same
    assert model_digest("some/name-on-the-hub", parts) is None


def test_the_digest_of_an_autoencoder_ignores_what_does_not_encode(tmp_path: Path) -> None:
    """The pipeline may get a model card or another text encoder, which image latents do not depend on."""
    for name in ("vae/config.json", "vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(100))
    digest = model_digest(str(tmp_path), ["vae"])
    for name in (
        "README.md",
        "model_index.json",
        "text_encoder/model.safetensors",
        "vae/README.md",
        "vae/.gitattributes",
    ):
        (tmp_path / name).write_bytes(b"changed")
        assert model_digest(str(tmp_path), ["vae"]) == digest, name
    own = model_digest(str(tmp_path / "vae"), ["vae"])
    (tmp_path / "vae/config.json").write_bytes(b"changed")
    assert model_digest(str(tmp_path), ["vae"]) != digest
    assert model_digest(str(tmp_path / "vae"), ["vae"]) != own
