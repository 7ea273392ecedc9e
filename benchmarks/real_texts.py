"""Texts for linearizing pretrained models: documentation of Python, Debian and Git from Debian packages.

    lightning bench real_texts --out texts

The packages are fetched by ``apt-get download`` and unpacked into a temporary folder; nothing is installed. ``--tree`` names a
folder with packages that are already unpacked. Six files are written, each with one JSON object ``{"text": ...}`` in a line:
``documents-train.jsonl`` and ``documents-val.jsonl`` with complete documents, for language models, and for text encoders
``passages-*.jsonl`` with paragraphs of the same documents, and ``sections-*.jsonl`` with the documents cut into pieces. Every
eighth document is held out, in the order of a hash of its path, so no paragraph of a held-out document is trained on.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_mhla.system.files import write_whole

PACKAGES = (
    "python3.11-doc",
    "debian-reference-en",
    "debian-reference-common",
    "developers-reference",
    "debian-policy",
    "debian-faq",
    "git-doc",
)
"""Debian 12 packages that contain the documentation."""

HELD_OUT = 8
"""One of ``HELD_OUT`` documents is held out."""

SHORTEST_DOCUMENT, SHORTEST_PASSAGE, SECTION = 1500, 100, 2500
"""Minimum number of characters of a document and of a passage, and number of characters of a section, over 512 tokens."""

MARKUP = re.compile(r"^(\.\.|>>>|\$|[-=+|*~#])|\t| {3}")
"""Pattern of paragraphs that are tables, code or directives, which are left out of the passages."""


def unpack(tree: Path, packages: Sequence[str]) -> None:
    """Download Debian packages, and unpack them into a folder without installing them.

    Args:
        tree: existing folder.
        packages: names of the packages.

    Raises:
        FileNotFoundError: if the machine has no ``apt-get`` or ``dpkg``.
        subprocess.CalledProcessError: if a package cannot be downloaded or unpacked.
    """
    subprocess.run(["apt-get", "download", *packages], cwd=tree, check=True)
    for package in sorted(tree.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(tree)], check=True)


def documents(tree: Path) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each document in the folder ``tree``, in the order of the paths."""
    files = sorted(path for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    for file in files:
        name = file.relative_to(tree).as_posix()
        if not name.endswith((".txt", ".txt.gz")) or "whatsnew/changelog" in name or "/RelNotes/" in name:
            continue
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        text = raw.decode(errors="replace").strip()
        if len(text) >= SHORTEST_DOCUMENT:
            yield name, text


def passages(text: str) -> list[str]:
    """Return the prose paragraphs of a document as one line each, without reStructuredText markup.

    Short paragraphs are left out.
    """
    paragraphs = [part for part in text.split("\n\n") if not MARKUP.search(part.strip("\n"))]
    plain = [re.sub(r":[\w:]+:`[~!]?([^`<]*?)( <[^>]*>)?`", r"\1", part).replace("``", "") for part in paragraphs]
    return [short for part in plain if len(short := re.sub(r"\s+", " ", part).strip()) >= SHORTEST_PASSAGE]


def sections(text: str) -> list[str]:
    """Cut a document into sections of 2,500 characters, and leave out the remaining characters.

    Each run of white space is replaced by one space first.
    """
    plain = " ".join(text.split())
    return [plain[start : start + SECTION] for start in range(0, len(plain) - SECTION + 1, SECTION)]


def main() -> None:
    """Write documents, passages and sections to a folder, divided into training and held-out texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--tree", type=Path, help="folder with unpacked packages (default: download and unpack them)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = options.tree or Path(folder)
        if options.tree is None:
            unpack(tree, PACKAGES)
        ordered = sorted(documents(tree), key=lambda document: hashlib.sha256(document[0].encode()).digest())
    if not ordered:
        raise SystemExit(f"no documentation in {tree}")
    options.out.mkdir(parents=True, exist_ok=True)
    held_out = [text for number, (_, text) in enumerate(ordered) if number % HELD_OUT == 0]
    train = [text for number, (_, text) in enumerate(ordered) if number % HELD_OUT]
    held_out_passages: set[str] = set()
    for stage, texts in (("val", held_out), ("train", train)):
        # passages of held-out documents are left out of the training data; boilerplate would repeat
        short = list(dict.fromkeys(part for text in texts for part in passages(text) if part not in held_out_passages))
        long = [section for text in texts for section in sections(text)]
        held_out_passages.update(short)
        for content in (short, long):
            random.Random(0).shuffle(content)
        for kind, content in (("documents", texts), ("passages", short), ("sections", long)):
            lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in content)
            write_whole(options.out / f"{kind}-{stage}.jsonl", lines)
            print(f"{kind}-{stage}: {len(content):,} texts, {sum(map(len, content)):,} characters")
