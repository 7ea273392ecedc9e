"""Fixtures of the language domain: a small exported model with its tokenizer, and task data in the formats of the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mhla_tasks.language.export import export
from mhla_tasks.language.tokenizer import train_tokenizer
from small import SENTENCES, small_model


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return train_tokenizer(SENTENCES * 4, 320)


@pytest.fixture(scope="session")
def exported(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = small_model()
    model.use_tokenizer(tokenizer)
    folder = tmp_path_factory.mktemp("exported")
    export(model, folder)
    return folder


@pytest.fixture(scope="session")
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a few rows of two subjects of MMLU and two subsets of LongBench, in the formats of the hub."""
    root = tmp_path_factory.mktemp("data")
    subjects = {"abstract_algebra": "group", "anatomy": "bone"}
    rows = {
        name: {
            split: [
                {
                    "question": f"Which {word} comes {place} in the {split} list?",
                    "subject": name,
                    "choices": [f"the {colour} {word}" for colour in ("red", "green", "blue", "white")],
                    "answer": (place * 7 + len(split)) % 4,
                }
                for place in range(count)
            ]
            for split, count in {"test": 6, "validation": 2, "dev": 5}.items()
        }
        for name, word in subjects.items()
    }
    _data_set(root / "cais/mmlu", rows)
    context = " ".join(SENTENCES)
    _data_set(
        root / "Xnhyacinth/LongBench",
        {
            name: {
                "test": [
                    {
                        "question": f"who wrote letter {place}?",
                        "input": f"who wrote letter {place}?",
                        "context": context * (60 if name == "trec" and place > 1 else 1),
                        "answers": ["Maria", "the river"],
                        "length": 60,
                        "dataset": name,
                        "language": "en",
                        "all_classes": ["Maria", "the river", "a bridge"],
                        "_id": str(place),
                    }
                    for place in range(4)
                ]
            }
            for name in ("2wikimqa", "trec")
        },
    )
    return root


def _data_set(folder: Path, subsets: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    lines = ["---", "configs:"]
    for name, splits in subsets.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        for split, rows in splits.items():
            path = folder / name / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            lines += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
