"""README and documentation: every command and every code block works, the site builds, what they name exists.

A page is worked through from top to bottom in one folder, as a reader does it: blocks with a title become files, Python
blocks are programs of their own, commands run one after the other. Configurations are the shipped ones in small.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import sana
import yaml
from fork_server import ForkServer
from mhla_tasks.commandline import registry
from shipped_small import save_clips, save_images, save_models, save_task_data, save_texts, shrunk

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / f"{each}.md" for each in ("README", "CONTRIBUTING", "CHANGELOG")),
]
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
LOCAL = {
    "stabilityai/sd-vae-ft-ema": "vae",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "wan",
    "Efficient-Large-Model/Sana_600M_512px_diffusers": "sana",
}
"""Models of the hub, and what stands for them here."""
SMALLER = {
    "--vocab_size 2048": "--vocab_size 300",
    "--image_size 256": "--image_size 16",
    "kind=mhla,linear,softmax": "kind=mhla,linear",
    "--trainer.max_steps=600": "--trainer.max_steps=4",
    "seed_everything=0,1": "seed_everything=0",
}
ENDINGS = {
    "prepare clip-latents": "--frames 5 --height 32 --width 48 --fps 8 --text_length 16",
    "prepare caption-latents": "--height 16 --width 16 --text_length 16",
    "fit --config mhla://c": "--trainer.limit_train_batches=2 --trainer.limit_val_batches=1",
    "mhla-lm-eval": "--data_dir DATA --limit 1",
    "linearize llama": "--steps 2 2 --length 16 --block_size 8 --batch_size 1 --val_batches 1",
    "llama.yaml": "--trainer.max_steps=4 --trainer.limit_val_batches=1",
}
"""Options that shorten commands which have no small configuration."""
PARSED = ("--trainer.devices=2", "docs/guides/migration.md")
"""Commands that are parsed: those of several processes, and those of a page on full sizes."""
WRITTEN = {
    "docs/start.md": (
        "runs/mnist/version_0/report.html", "runs/mnist/version_0/predict/predictions.csv", "exported/README.md", "kinds.png",
    ),
    "docs/tutorials/classification.md": ("runs/photos/predict/predictions.csv", "shards/train-classes.txt"),
    "docs/tutorials/class-to-image.md": (
        "runs/dit/predict/samples/000001-class2.png", "runs/dit/generation.jsonl", "latents/train-manifest.json",
    ),
    "docs/tutorials/language.md": (
        "runs/mine/samples.md", "runs/mine/predict/continuations.jsonl", "shards/tokenizer/tokenizer.json",
        "runs/chat/report.html",
    ),
    "docs/tutorials/text-to-image.md": (
        "runs/sana/predict/images/a red three left of a green seven-1.png", "latents/train-empty-caption.npy",
        "geneval/00000/samples/0003.png", "geneval/00000/metadata.jsonl",
    ),
    "docs/tutorials/video.md": (
        "runs/clips/predict/videos/*.mp4", "vbench/mhla/videos/*-0.mp4", "vbench/softmax/videos.jsonl",
        "latents/train-empty-caption.npy",
    ),
}  # fmt: skip
"""Files that pages say their commands write."""
OTHERS = (r"python3 -m venv", r"\. \.venv/bin/activate", r"pip install", r"lightning$", r"transformers serve", r"curl ")
"""Commands that no test runs."""


@dataclass(frozen=True)
class Block:
    """Code block of a page."""

    language: str
    title: str
    code: str

    def commands(self) -> list[str]:
        """Return the commands of a shell block, without comments."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [line for line in (re.sub(r"(^|\s+)#\s.*$", "", line).strip() for line in lines) if line]


def blocks(page: Path) -> list[Block]:
    return [Block(*(part or "" for part in match)) for match in FENCE.findall(page.read_text())]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the files that the pages assume a reader to have."""
    home = tmp_path_factory.mktemp("home")
    save_images(home / "photos", ("cat", "dog", "fox"), {"train": 8, "val": 4})
    (home / "images").symlink_to(home / "photos")
    for folder in ("photos/new", "samples"):
        shutil.copytree(home / "photos/val/cat", home / folder)
    save_models(home)
    shutil.rmtree(home / "tokenizer")  # readers train their own
    for folder in ("texts", "texts-held-out"):
        save_texts(home / folder)
    (home / "more.jsonl").write_text('{"text": "The old town."}\n')
    dialogue = [{"role": "user", "content": "Which river?"}, {"role": "assistant", "content": "The old one."}]
    for file in ("chats.jsonl", "chats-held-out.jsonl"):
        (home / file).write_text(f"{json.dumps({'messages': dialogue})}\n" * 60)
    (home / "prompts.txt").write_text("The old river\nThe town\n")
    (home / "evaluation_metadata.jsonl").write_text(f"{json.dumps({'prompt': 'a red three'})}\n")
    (home / "story.txt").write_text((ROOT / "docs/operator.md").read_text())
    for folder in ("videos", "videos-held-out"):
        save_clips(home / folder, 4)
    for folder in ("pictures", "pictures-held-out"):
        sana.save_pictures(home / folder)
    save_task_data(home / "DATA")
    for path in (ROOT / "configs").rglob("*.yaml"):
        small = home / path.relative_to(ROOT)
        small.parent.mkdir(parents=True, exist_ok=True)
        if path.parent.name == "trainer":
            shutil.copy(path, small)
            continue
        if path.parent.name == "eval":
            overlay = yaml.safe_load(path.read_text())
            overlay["trainer"]["callbacks+"][0]["init_args"] |= {"limit": 1, "data_dir": "DATA", "tasks": ["piqa"]}
            small.write_text(yaml.safe_dump(overlay))
            continue
        content = shrunk(path, Path())
        if path.stem == "folder":  # the reader's own folders
            content["data"]["init_args"] |= {
                name: yaml.safe_load(path.read_text())["data"]["init_args"][name] for name in ("train", "val")
            }
        small.write_text(yaml.safe_dump(content))
    return home


def in_small(command: str) -> str:
    for long, short in {**LOCAL, **SMALLER}.items():
        command = command.replace(long, short)
    return " ".join([command, *(options for part, options in ENDINGS.items() if part in command)])


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_block_of_code_is_overlooked(page: Path) -> None:
    fences = re.findall(r"^[ >]*```", page.read_text(), re.MULTILINE)
    assert len(fences) == 2 * len(blocks(page)), (
        "a fence is indented, or has no language, or another attribute than a title"
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name)
def test_a_page_works_from_top_to_bottom(
    page: Path, home: Path, server: ForkServer, cache_home: Path, tmp_path: Path
) -> None:
    for path in home.iterdir():
        (tmp_path / path.name).symlink_to(path)
    shown = {"XDG_CACHE_HOME": str(cache_home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(tmp_path)}
    for block in blocks(page):
        if block.title:
            (tmp_path / block.title).write_text(block.code)
        if block.language == "python":
            ast.parse(block.code)
            if not block.title or "/" in block.title:
                ranks = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
                several = ranks if "torchrun" in block.code else {}
                status, said = server.program(block.code, folder=tmp_path, **shown, **several)
                assert status == 0, f"{block.code}\n{said[-3000:]}"
        elif block.language == "json":
            json.loads(block.code)
        elif block.language == "yaml":
            list(yaml.safe_load_all(block.code))
        elif block.language == "sh":
            for command in block.commands():
                run(command, page, server, tmp_path, shown)
        else:
            assert block.language == "text", f"a block of {block.language}"
    for path in WRITTEN.get(name(page), ()):
        assert list(tmp_path.glob(path)), f"{path} was not written"


def run(command: str, page: Path, server: ForkServer, folder: Path, environment: dict[str, str]) -> None:
    """Run a command of a page at small size, or only check it if it cannot run here."""
    if target := re.match(r"make (\w+)", command):
        assert re.search(rf"^{target[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no {target[0]}"
        return
    if any(re.match(pattern, command) for pattern in OTHERS):
        return
    if command.startswith("sbatch"):
        named = re.findall(r"[\w./-]+\.(?:sbatch|yaml)", command)
        assert named
        assert all((ROOT / path).exists() for path in named), command
        return
    program, *words = shlex.split(in_small(command))
    if program in ("python", "torchrun"):
        start = [sys.executable, *(("-m", "torch.distributed.run") if program == "torchrun" else ()), *words]
        plain = {**os.environ, **environment}
        done = subprocess.run(start, cwd=folder, env=plain, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        return
    modules = {"lightning": "mhla_tasks", "mhla-lm-eval": "mhla_tasks.language.evaluation.script"}
    if words[0] == "import":
        parser, _ = registry.parser_of("import")
        parser.parse_args(words[1:])
        return
    if any(part in command or part == name(page) for part in PARSED):
        words.append("--print_config")
    status, said = server.run(*words, module=modules[program], folder=folder, **environment)
    assert status == 0, f"{command}\n{said[-4000:]}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_everything_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    for path, anchor in re.findall(r"\]\((?!http|#)([^)#\s]+)(?:#([^)\s]+))?\)", text):
        assert (page.parent / path).exists(), f"{path} does not exist"
        if anchor and page.parent == ROOT:  # the site's own are checked while it is built
            heads = re.findall(r"^#+ (.*)", (page.parent / path).read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads], (
                f"{path}#{anchor}"
            )
    theirs = FENCE.sub("", text) if "migration" in page.name else text
    for path in re.findall(
        r"\b(?:configs|benchmarks|tests|docker|lightning_mhla|tasks/mhla_tasks|kernels)/[\w/.-]*\w\.\w+", theirs
    ):
        assert "NAME" in path or (ROOT / path).exists(), f"{path} does not exist"
    for target in re.findall(r"`make (\w+)", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"make {target} does not exist"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 700


def test_every_message_of_the_troubleshooting_page_is_one_of_ours() -> None:
    """The words of a message, without values in capitals, occur in this order in a string of the product's code."""
    texts = []
    for path in [file for floor in ("kernels", "lightning_mhla", "tasks") for file in (ROOT / floor).rglob("*.py")]:
        tree = ast.parse(path.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
    messages = re.findall(r"^\*\*`(.*?)`\*\*:", (ROOT / "docs/guides/troubleshooting.md").read_text(), re.MULTILINE)
    assert len(messages) > 40
    for message in messages:
        parts = [part.strip(" '=") for part in re.split(r"\b[A-Z]+(?:_[A-Z]+)*\b(?=[^a-z]|$)", message)]
        parts = [part for part in parts if len(part) > 3]
        assert sum(map(len, parts)) >= 10, f"too few fixed words: {message}"
        pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
        assert any(pattern.search(text) for text in texts), message


def test_every_key_of_the_migration_page_exists(server: ForkServer, tmp_path: Path) -> None:
    text = (ROOT / "docs/guides/migration.md").read_text()
    keys = {
        key
        for cell in re.findall(r"^\|[^|]*\|([^|]*)\|", text, re.MULTILINE)
        for key in re.findall(r"--((?:model|data)\.[\w.]+)", cell)
    }
    assert len(keys) > 40
    helps = {
        "model": ("classification.ImageClassifier", "diffusion.ClassToImage", "language.LanguageModel", "video.VideoDiffusion"),
        "data": ("classification.ImageNetShards", "diffusion.ImageShards", "language.TokenShards", "video.VideoShards"),
    }  # fmt: skip
    known: set[str] = set()
    for part, classes in helps.items():
        for each in classes:
            asked = ("fit", f"--{part}.help", f"mhla_tasks.{each}")
            status, said = server.run(*asked, module="mhla_tasks", folder=tmp_path)
            assert status == 0, said[-2000:]
            known |= {f"{part}.{key}" for key in re.findall(rf"--{part}\.([\w.]+)", said)}
    assert keys <= known, keys - known


@pytest.mark.parametrize(
    "package", ["classification", "diffusion", "language", "text_to_image", "video", "lightning_mhla.callbacks"]
)
def test_every_public_class_of_a_domain_is_on_an_api_page(package: str) -> None:
    pages = "\n".join(path.read_text() for path in (ROOT / "docs/api").glob("*.md"))
    listed = {path.rpartition(".")[2] for path in re.findall(r"^::: ([\w.]+)$", pages, flags=re.M)}
    module = importlib.import_module(package if "." in package else f"mhla_tasks.{package}")
    classes = {name for name in module.__all__ if inspect.isclass(getattr(module, name))}
    assert classes
    assert classes <= listed, classes - listed


def test_the_site_builds(tmp_path: Path) -> None:
    """Strictly: a broken link, an unknown name or a page that no menu shows is an error; without network."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    offline = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **offline}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    pages = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*.html")}
    for page in (ROOT / "docs").rglob("*.md"):
        assert str(page.relative_to(ROOT / "docs").with_suffix(".html")) in pages
    commands_page = (tmp_path / "site/commands.html").read_text()
    assert all(f">{tool}<" in commands_page for tools in registry.TOOLS.values() for tool in tools)
    assert ":class:" not in (tmp_path / "site/api/attention.html").read_text()
    assert re.search(r"<td><code><span[^>]*>--prefix</span> PREFIX</code></td>", commands_page), (
        "tables wrap on a phone"
    )
    assert (tmp_path / "site/search/search_index.js").exists(), "a page that is opened from disk cannot read JSON"
    for page in pages:
        text = (tmp_path / "site" / page).read_text()
        loads = re.findall(r'<(?:script|img|link rel="stylesheet")[^>]*?(?:src|href)="([^"]+)"', text)
        assert not [load for load in loads if load.startswith(("http", "//"))], f"{page} loads from the network"
        assert any(load.endswith("iframe-worker.js") for load in loads) or page == "404.html", "search from disk"
        assert not re.search(r"<p><img", text), f"a figure of {page} has no caption"
        captions = re.findall(r"<figcaption>(.*?)</figcaption>", text)
        assert all(len(caption) > 60 and caption.endswith(".") for caption in captions), (
            "a caption says what to conclude"
        )
        assert len(captions) == text.count("<figure>")
