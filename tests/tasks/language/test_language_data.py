"""Text as samples: nothing lost, nothing twice, whatever the number of processes and wherever a run stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Callback, Trainer
from mhla_tasks.language import HubText, PythonSource, TokenShards, stdlib
from mhla_tasks.language.corpus import read_documents
from mhla_tasks.language.dialogues import Document
from mhla_tasks.language.documents import EncodedDocument, encode_document
from mhla_tasks.language.hub import local_files
from mhla_tasks.language.prepare import RunEncoder, write_token_shards
from mhla_tasks.language.sources import ArrayRuns, TokenWindows
from mhla_tasks.language.stdlib import stdlib_files
from mhla_tasks.language.stream import PackedRows, RowPosition
from mhla_tasks.language.token_shards import ShardRuns
from mhla_tasks.language.tokenizer import load_tokenizer, pack_tokenizer, token_bytes, train_tokenizer, unpack_tokenizer
from small import SENTENCES, small_model

from lightning_mhla.data import BrokenSampleError, ShardReader, write_shards
from lightning_mhla.data.tables import load_table
from lightning_mhla.data.write import array_bytes
from lightning_mhla.training.optim import OptimizerConfig

TEXTS = [f"{sentence} Number {number}: {'x' * (number % 7)}é" for number, sentence in enumerate(SENTENCES * 8)]


def test_bytes_of_tokens_add_up_to_the_text(tokenizer: Any) -> None:
    table = token_bytes(tokenizer)
    for text in TEXTS:
        assert table[tokenizer(text)["input_ids"]].sum() == len(text.encode())
    assert table[tokenizer.eos_token_id] == 0
    spaced = unpack_tokenizer(pack_tokenizer(tokenizer))
    spaced.add_tokens(["        "])  # as GPT-NeoX has them, outside the byte alphabet
    text = "river        bridge"
    assert token_bytes(spaced)[spaced(text)["input_ids"]].sum() == len(text)


def test_tokenizer_as_text_and_back(tokenizer: Any, tmp_path: Path) -> None:
    again = unpack_tokenizer(pack_tokenizer(tokenizer))
    assert again(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]
    assert (again.eos_token_id, again.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    with pytest.raises(FileNotFoundError, match="is not a folder with a tokenizer"):
        load_tokenizer(tmp_path)


def test_windows_hold_every_token_once_as_a_target() -> None:
    tokens, starts = np.arange(1000) % 97, np.array([0, 40, 500])
    windows = TokenWindows(ArrayRuns(tokens, starts, "text"), 64, np.ones(97, dtype=np.int64), separate_documents=True)
    samples = [windows[i] for i in range(len(windows))]
    targets = torch.cat([sample["tokens"][1:] for sample in samples])
    assert targets.tolist() == tokens[1 : 1 + len(targets)].tolist()
    assert len(windows) == 999 // 64
    assert torch.cat([sample["starts"] for sample in samples]).nonzero()[:, 0].tolist() == [0, 40, 500]
    small = TokenWindows(ArrayRuns(tokens, starts, "text"), 64, np.ones(50, dtype=np.int64), separate_documents=False)
    with pytest.raises(BrokenSampleError, match="text: token 96 is not in the tokenizer's vocabulary of 50"):
        small[1]
    negative = TokenWindows(
        ArrayRuns(tokens - 1, starts, "text"), 64, np.ones(97, dtype=np.int64), separate_documents=False
    )
    with pytest.raises(BrokenSampleError, match="text: token -1 is not in the tokenizer's vocabulary of 97"):
        negative[0]


def test_standard_library_is_split_by_file_and_cached(tmp_path: Path) -> None:
    data = PythonSource(vocab_size=300, cache_dir=str(tmp_path), context=128)
    files = stdlib_files()
    assert len(files) > 100
    train, held_out = data.windows("train"), data.windows("validate")
    assert len(train) > 10 * len(held_out) > 0
    text = data.tokenizer.decode(held_out[0]["tokens"][1:])
    assert sum(text[:60] in path.read_text(errors="replace") for path in files) >= 1
    assert (tmp_path / next(tmp_path.iterdir()).name / "tokens.npz").exists()
    with pytest.raises(ValueError, match="vocab_size=20 must be 258"):
        PythonSource(vocab_size=20).windows("train")


@pytest.mark.parametrize("name", ["tokens.npz", "tokenizer.json"])
def test_a_cache_that_is_cut_off_is_made_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = stdlib_files()[:30]
    monkeypatch.setattr(stdlib, "stdlib_files", lambda: files)
    first = stdlib.load_stdlib(300, tmp_path)
    [file] = tmp_path.rglob(name)
    file.write_bytes(file.read_bytes()[:100])
    stdlib.load_stdlib.cache_clear()
    again = stdlib.load_stdlib(300, tmp_path)
    assert "is prepared again, because it cannot be read" in caplog.text
    for stage, tokens in first.tokens.items():
        assert tokens.tolist() == again.tokens[stage].tolist()


def test_a_changed_file_of_the_same_length_is_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "module.py"
    monkeypatch.setattr(stdlib, "stdlib_files", lambda: [*stdlib_files()[:30], source])
    written = []
    for word in ("river", "stone"):
        source.write_text(f"# {word}\n")
        stdlib.load_stdlib.cache_clear()
        text = stdlib.load_stdlib(300, tmp_path / "cache")
        tokens = np.concatenate([text.tokens["train"], text.tokens["validate"]])
        written.append(f"# {word}\n" in text.tokenizer.decode(tokens))
    assert written == [True, True]


def test_tokens_of_a_vocabulary_with_gaps(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<end>": 0, "<unk>": 1, "river": 70_000}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<end>")
    (tmp_path / "a.txt").write_text("river river")
    runs = ShardRuns(ShardReader(write(tmp_path / "out", [str(tmp_path / "a.txt")], tokenizer)))
    assert runs.read(0, 0, 3)[0].tolist() == [0, 70_000, 70_000]
    model = small_model()
    model.network.config.vocab_size = 70_000
    with pytest.raises(ValueError, match=r"needs vocab_size=70001, .* vocab_size=70000; set --model\.vocab_size=70001"):
        model.use_tokenizer(tokenizer)


def test_special_tokens_that_no_text_contains_need_no_embedding(tokenizer: Any) -> None:
    """Such as Gemma's token for images; others that lie above the model's vocabulary are named before the first step."""
    model, size = small_model(), len(tokenizer)
    model.network.config.vocab_size = size
    for added, is_needed in (("<image>", False), ("<turn>", True), ("    ", True)):
        larger = unpack_tokenizer(pack_tokenizer(tokenizer))
        larger.add_tokens([added], special_tokens=added[0] == "<")
        larger.chat_template = "{% for m in messages %}<turn>{{ m.content }}{% endfor %}"
        if is_needed:
            with pytest.raises(
                ValueError, match=f"the tokenizer needs vocab_size={size + 1}, the model has vocab_size={size}"
            ):
                model.use_tokenizer(larger)
        else:
            model.use_tokenizer(larger)
            assert model.tokenizer is larger


def test_a_vocabulary_without_room_for_all_bytes() -> None:
    with pytest.raises(ValueError, match="vocab_size=257 must be at least 258"):
        train_tokenizer(SENTENCES, 257)
    with pytest.raises(ValueError, match="vocab_size=259 must be at least 260"):
        train_tokenizer(SENTENCES, 259, chat=True)


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """Write the texts to text files, a jsonl file and a parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS[:10]):
        (tmp_path / "texts" / f"{number:02d}.txt").write_text(text)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXTS[10:25]))
    pq.write_table(pa.table({"text": TEXTS[25:]}), tmp_path / "rows.parquet")
    return [str(tmp_path / name) for name in ("texts", "rows.jsonl", "rows.parquet")]


def write(target: Path, sources: list[str], tokenizer: Any, **options: Any) -> list[Path]:
    return write_token_shards(target, sources, tokenizer, run_characters=300, runs_per_shard=3, **options)


def test_shards_hold_every_document_in_order(sources: list[str], tokenizer: Any, tmp_path: Path) -> None:
    assert list(read_documents(sources, "text")) == TEXTS
    runs = ShardRuns(ShardReader(write(tmp_path / "out", sources, tokenizer)))
    read = [runs.read(run, 0, length) for run, length in enumerate(runs.lengths)]
    tokens, first = (np.concatenate(parts) for parts in zip(*read, strict=True))
    documents = np.split(tokens, first.nonzero()[0][1:])
    assert [document.tolist() for document in documents] == [
        encode_document(tokenizer(text)["input_ids"], tokenizer).tolist() for text in TEXTS
    ]
    part = runs.read(1, 5, 20)
    assert part[0].tolist() == read[1][0][5:25].tolist()
    assert part[1].tolist() == read[1][1][5:25].tolist()


class Remote:
    """Stand-in for a cache of remote shards, which records the shards that are read."""

    def __init__(self, paths: list[Path]) -> None:
        self.urls, self.opened = dict.fromkeys(paths, "https://"), set[str]()

    def table(self, path: Path) -> Any:
        return load_table(path)

    @contextmanager
    def open(self, path: Path) -> Iterator[int]:
        self.opened.add(path.name)
        with path.open("rb") as stream:
            yield stream.fileno()


def test_streamed_shards_are_not_downloaded_before_they_are_read(
    sources: list[str], tokenizer: Any, tmp_path: Path
) -> None:
    paths = write(tmp_path / "out", sources, tokenizer)
    remote: Any = Remote(paths)
    local, streamed = ShardRuns(ShardReader(paths)), ShardRuns(ShardReader(paths, streamed=remote))
    assert remote.opened == {paths[0].name} != {path.name for path in paths}
    assert streamed.lengths == local.lengths
    for run, length in enumerate(local.lengths):
        for part, expected in zip(streamed.read(run, 0, length), local.read(run, 0, length), strict=True):
            assert part.tolist() == expected.tolist()


def test_a_streamed_shard_of_a_different_dtype_is_an_error(tmp_path: Path) -> None:
    def members(number: int) -> dict[str, Any]:
        tokens = np.arange(40, dtype=(np.uint16, np.uint32)[number])
        return {"tokens.npy": array_bytes(tokens), "starts.npy": array_bytes(np.zeros(1, np.int64))}

    paths = write_shards(range(2), members, tmp_path, "train", 1)
    remote: Any = Remote(paths)
    runs = ShardRuns(ShardReader(paths, streamed=remote))
    assert runs.read(0, 0, 40)[0].tolist() == list(range(40))
    with pytest.raises(BrokenSampleError, match=r"\.tokens\.npy is not uint16, as in the first shard"):
        runs.read(1, 0, 40)


def test_shards_go_on_after_a_stop(
    sources: list[str], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write(tmp_path / "whole", sources, tokenizer)
    encode, calls = RunEncoder.members, []

    def dies(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return encode(*args)

    monkeypatch.setattr(RunEncoder, "members", dies)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", sources, tokenizer)
    assert [path.name for path in sorted((tmp_path / "out").glob("*.tar"))] == [whole[0].name]
    again = write(tmp_path / "out", sources, tokenizer)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in whole]
    with pytest.raises(ValueError, match=r"made from different files or options \(skip was 0 and is 3\)"):
        write(tmp_path / "out", sources, tokenizer, skip=3)
    other = train_tokenizer(TEXTS[::-1], 310)
    with pytest.raises(ValueError, match="shards of a different tokenizer"):
        write(tmp_path / "out", sources, other, prefix="val")
    for template in ("first {{ messages }}", "second {{ messages }}"):
        tokenizer.chat_template = template
        write(tmp_path / "out", sources, tokenizer, prefix=template[:5])
        assert load_tokenizer(tmp_path / "out/tokenizer").chat_template == template
    tokenizer.chat_template = None
    write(tmp_path / "out", sources, tokenizer, prefix="third")
    assert load_tokenizer(tmp_path / "out/tokenizer").chat_template == template, "without one, the saved one remains"


def test_files_that_are_not_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.pyc").write_bytes(b"\xa7\r\r\n\x00\xff")
    assert list(read_documents([str(tmp_path)], "text")) == ["one"]
    assert "b.pyc" in caplog.text
    with pytest.raises(ValueError, match=r"b\.pyc is not text in UTF-8"):
        list(read_documents([str(tmp_path / "b.pyc")], "text"))


def test_rows_without_text(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", None, "two")))
    assert list(read_documents([str(path)], "text")) == ["one", "two"]
    path.write_text(json.dumps({"text": 3}) + "\n")
    with pytest.raises(ValueError, match="'3' is int, not text"):
        list(read_documents([str(path)], "text"))


def test_token_shards_refuse_what_is_broken(sources: list[str], tokenizer: Any, tmp_path: Path) -> None:
    target = tmp_path / "out"
    paths = write(target, sources, tokenizer)
    data = TokenShards(str(target), str(target), context=16)
    assert data.tokenizer(TEXTS[0])["input_ids"] == tokenizer(TEXTS[0])["input_ids"]
    assert len(data.windows("train")) > 10

    content = paths[0].read_bytes()
    paths[0].write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"train-00000\.tar: (cut short|not a complete tar)"):
        data.windows("train")
    place = content.index(b"NUMPY", content.index(b"tokens.npy"))
    paths[0].write_bytes(content[:place] + b"NUMPI" + content[place + 5 :])
    with pytest.raises(BrokenSampleError, match=r"train-00000.*\.tokens\.npy is not a NumPy array"):
        data.windows("train")
    paths[0].write_bytes(content)
    for path in (target / "tokenizer").iterdir():
        path.unlink()
    (target / "tokenizer").rmdir()
    with pytest.raises(FileNotFoundError, match="tokenizer of the shards is unknown; name it with"):
        _ = TokenShards(str(target), str(target)).tokenizer


def rows_of(positions: list[RowPosition], rows: range, count: int, tokenizer: Any) -> list[dict[str, torch.Tensor]]:
    def documents() -> Iterator[str]:
        while True:
            yield from TEXTS

    def encode(text: Document) -> EncodedDocument:
        return EncodedDocument(encode_document(tokenizer(text)["input_ids"], tokenizer), 0)

    packed = iter(PackedRows(documents, encode, positions, rows, 32, token_bytes(tokenizer), separate_documents=True))
    return [next(packed) for _ in range(count)]


def test_a_stream_is_the_same_on_any_number_of_processes_and_after_a_stop(tokenizer: Any) -> None:
    start = [RowPosition(row, 0) for row in range(4)]
    whole = rows_of(start, range(4), 12, tokenizer)
    halves = [rows_of(start, rows, 12, tokenizer) for rows in (range(2), range(2, 4))]
    for batch, first, second in zip(whole, *halves, strict=True):
        for key in batch:
            assert torch.equal(batch[key], torch.cat([first[key], second[key]])), key
    for stop in (1, 5, 8):
        stood = [RowPosition(*row) for row in whole[stop - 1]["position"].tolist()]
        for batch, again in zip(whole[stop:], rows_of(stood, range(4), 12 - stop, tokenizer), strict=True):
            assert torch.equal(batch["tokens"], again["tokens"])
            assert torch.equal(batch["starts"], again["starts"])
    targets = torch.cat([batch["tokens"][0, 1:] for batch in whole])
    row = np.concatenate([encode_document(tokenizer(text)["input_ids"], tokenizer) for text in (TEXTS * 9)[::4]])
    assert targets.tolist() == row[1 : 1 + len(targets)].tolist()


class Tokens(Callback):
    """Callback that records the tokens of every training batch."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch["tokens"].flatten().tolist())


@pytest.mark.parametrize("workers", [0, 1])
def test_streamed_runs_go_on_with_the_very_next_token(
    workers: int, sources: list[str], tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")

    def make(**changed: int) -> HubText:
        order = {"shuffle_buffer": 6, "val_documents": 3, "seed": 1, **changed}
        return HubText(
            str(tmp_path / "tokenizer"), path="json", data_files=sources[1], batch_size=2, context=24, steps_per_epoch=4,
            num_workers=workers, **order,
        )  # fmt: skip

    def fit(
        steps: int, checkpoint: Path | None = None, data: HubText | None = None, **options: Any
    ) -> tuple[list[list[int]], dict[str, torch.Tensor], Trainer]:
        seen = Tokens()
        trainer = Trainer(
            max_steps=steps, accelerator="cpu", callbacks=[seen], default_root_dir=tmp_path, logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
            **options,
        )  # fmt: skip
        model = small_model(context=24, optimizer=OptimizerConfig(schedule="constant"))
        trainer.fit(model, data or make(), ckpt_path=checkpoint, weights_only=True)
        return seen.seen, model.state_dict(), trainer

    wanted, weights, _ = fit(10)
    for stop in (3, 4, 6):
        before, _, trainer = fit(stop)
        trainer.save_checkpoint(tmp_path / f"{stop}.ckpt")
        after, resumed, _ = fit(10, tmp_path / f"{stop}.ckpt")
        assert before + after == wanted
        for name, tensor in weights.items():
            assert torch.equal(tensor, resumed[name]), name
    used = make()
    assert fit(10, tmp_path / "4.ckpt", used)[0] == wanted[4:]
    assert fit(3, data=used)[0] == wanted[:3], "a second run of the same object begins at the first token"
    assert fit(10, reload_dataloaders_every_n_epochs=1)[0] == wanted
    assert fit(10, tmp_path / "3.ckpt", reload_dataloaders_every_n_epochs=1)[0] == wanted[3:]
    for option, value in (("seed", 1), ("shuffle_buffer", 6), ("val_documents", 3)):
        with pytest.raises(ValueError, match=f"was trained with {option}={value}, this run has {option}=7"):
            fit(10, tmp_path / "4.ckpt", make(**{option: 7}))


def test_a_stream_goes_back_with_the_number_of_trained_batches(
    sources: list[str], tokenizer: Any, tmp_path: Path
) -> None:
    """A learning rate finder trains and then restores the state before."""
    from types import SimpleNamespace

    tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = HubText(
        str(tmp_path / "tokenizer"), path="json", data_files=sources[1], batch_size=2, context=24, steps_per_epoch=4,
        val_documents=3, num_workers=0,
    )  # fmt: skip
    total = SimpleNamespace(processed=0)
    epoch_loop = SimpleNamespace(batch_progress=SimpleNamespace(total=total))
    trainer: Any = SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=epoch_loop), num_training_batches=4, distributed_sampler_kwargs=None
    )
    data.trainer = trainer
    loader = data.train_dataloader()

    def epoch() -> list[list[int]]:
        seen = []
        for batch in loader:
            total.processed += 1
            seen.append(batch["tokens"].flatten().tolist())
        return seen

    epochs = [epoch(), epoch()]
    assert epochs[0] != epochs[1]
    total.processed = 0
    assert [epoch(), epoch()] == epochs


def test_a_pattern_matches_files_and_not_folders(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    paths = [tmp_path / "a.txt", tmp_path / "inner/b.txt"]
    for path in paths:
        path.write_text("text")
    data_set = {"path": "text", "data_files": f"{tmp_path}/**"}
    assert local_files(data_set) == [(str(path), "lines") for path in paths]


def test_streams_refuse(sources: list[str], tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    where = str(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match=r"no column 'content', only \['id', 'text'\]"):
        HubText(where, path="json", data_files=sources[1], column="content").windows("validate")
    with pytest.raises(FileNotFoundError, match="could not be loaded"):
        HubText(where, path="json", data_files=str(tmp_path / "none.jsonl")).windows("validate")
    for option, value in {"steps_per_epoch": 0, "shuffle_buffer": -1, "val_documents": -1}.items():
        with pytest.raises(ValueError, match=f"{option}={value} must be at least"):
            HubText(where, path="json", data_files=sources[1], **{option: value})


def test_a_stream_says_where_documents_begin(tokenizer: Any) -> None:
    """Also of those that begin on the last token of a window, which is the first of the next."""
    batches = rows_of([RowPosition(row, 0) for row in range(4)], range(4), 40, tokenizer)
    for row in range(4):
        documents = [encode_document(tokenizer(text)["input_ids"], tokenizer) for text in (TEXTS * 99)[row::4]]
        begins = np.cumsum([0, *map(len, documents)])
        found = torch.cat([batch["starts"][row] for batch in batches]).nonzero()[:, 0].tolist()
        assert found == [int(place) for place in begins if place < 40 * 32]
        assert any(place % 32 == 0 for place in found[1:]) or row, "no document begins where a window does"


def test_bytes_of_a_streamed_row_are_those_of_its_targets(tokenizer: Any) -> None:
    table = token_bytes(tokenizer)
    for batch in rows_of([RowPosition(row, 0) for row in range(4)], range(4), 12, tokenizer):
        assert batch["bytes"].tolist() == [int(table[row[1:]].sum()) for row in batch["tokens"].numpy()]


def test_one_sign_stands_between_documents_where_there_is_only_one() -> None:
    from types import SimpleNamespace

    same: Any = SimpleNamespace(bos_token_id=7, eos_token_id=7)
    only_end: Any = SimpleNamespace(bos_token_id=None, eos_token_id=7)
    assert encode_document([1, 2], same).tolist() == encode_document([1, 2], only_end).tolist() == [7, 1, 2]


def test_documents_lie_between_their_special_tokens() -> None:
    from types import SimpleNamespace

    both: Any = SimpleNamespace(bos_token_id=5, eos_token_id=7)
    no_end: Any = SimpleNamespace(bos_token_id=5, eos_token_id=None)
    assert encode_document([1, 2], both).tolist() == [5, 1, 2, 7]
    assert encode_document([1, 2], no_end).tolist() == [5, 1, 2]
    with pytest.raises(ValueError, match="neither a bos nor an eos token"):
        encode_document([1], SimpleNamespace(bos_token_id=None, eos_token_id=None))  # type: ignore[arg-type]


def test_documents_held_out_are_not_trained_on_and_epochs_differ(
    sources: list[str], tokenizer: Any, tmp_path: Path
) -> None:
    from itertools import islice

    tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = HubText(
        str(tmp_path / "tokenizer"), path="json", data_files=sources[1], val_documents=3, shuffle_buffer=20, seed=1
    )
    texts = list(islice(data._documents(), 24))
    assert sorted(texts[:12]) == sorted(texts[12:]) == sorted(TEXTS[13:25])
    assert texts[:12] != texts[12:], "each epoch has another order"


def test_bytes_of_sentencepiece_tokens() -> None:
    """With byte fallback, a space is one sign of three bytes, and stands for one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "</s>", "<0x41>", "▁river", "é", "▁▁"]
    model = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="<unk>", eos_token="</s>")
    assert token_bytes(fast).tolist() == [0, 0, 1, 6, 2, 2]


def test_a_part_of_the_documents(sources: list[str], tokenizer: Any, tmp_path: Path) -> None:
    runs = ShardRuns(ShardReader(write(tmp_path / "out", sources, tokenizer, skip=2, limit=5)))
    found = np.concatenate([runs.read(run, 0, length)[0] for run, length in enumerate(runs.lengths)])
    wanted = [encode_document(tokenizer(text)["input_ids"], tokenizer) for text in TEXTS[2:7]]
    assert found.tolist() == np.concatenate(wanted).tolist()


@pytest.mark.parametrize(("length", "wanted"), [(65, 1), (128, 1), (129, 2)])
def test_windows_are_whole_at_the_end_of_the_text(length: int, wanted: int) -> None:
    runs = ArrayRuns(np.zeros(length, dtype=np.int64), np.arange(min(length, 1)), "text")
    windows = TokenWindows(runs, 64, np.ones(1, dtype=np.int64), separate_documents=False)
    assert [len(windows[index]["tokens"]) for index in range(len(windows))] == [65] * wanted


@pytest.mark.parametrize("place", ["array", "nothing", "train", "validate", "stream"])
def test_text_that_is_shorter_than_one_sample(place: str, tokenizer: Any, tmp_path: Path) -> None:
    text = "one short line"
    (tmp_path / "short.txt").write_text(text)
    write(tmp_path / "out", [str(tmp_path / "short.txt")], tokenizer)
    length = len(tokenizer(text)["input_ids"]) + 1
    shards, folder = str(tmp_path / "out"), str(tmp_path / "out" / "tokenizer")
    texts = {"data_files": str(tmp_path / "short.txt"), "val_documents": 1}
    calls: dict[str, Any] = {
        "array": lambda context: TokenWindows(
            ArrayRuns(np.zeros(length), np.zeros(1, int), "text"), context, np.ones(1), False
        ),
        "nothing": lambda context: TokenWindows(
            ArrayRuns(np.zeros(0), np.zeros(0, int), "text"), context, np.ones(1), False
        ),
        "train": lambda context: TokenShards(shards, shards, context=context).windows("train"),
        "validate": lambda context: TokenShards(shards, shards, context=context).windows("validate"),
        "stream": lambda context: HubText(path="text", tokenizer=folder, context=context, **texts).windows("validate"),
    }
    where = {"array": "text", "nothing": "text", "stream": "the first documents"}.get(place, r".*train-00000\.tar")
    tokens = 0 if place == "nothing" else length
    with pytest.raises(
        ValueError, match=rf"{where}.*longest has {tokens} tokens, .* = {length + 1}; .*--data\.context"
    ):
        calls[place](length)
    if place != "nothing":
        assert len(calls[place](length - 1)) == 1


@pytest.mark.parametrize(
    "starts",
    [[0.0, 4.0], [[0, 4]], [4, 0], [-1, 4], [0, 90], [True, False]],
    ids=["floats", "two axes", "falling", "negative", "beyond the tokens", "Booleans"],
)
def test_document_starts_that_are_no_ascending_positions(starts: list[Any], tmp_path: Path) -> None:
    def members(_: int) -> dict[str, Any]:
        return {
            "tokens.npy": array_bytes(torch.arange(40, dtype=torch.uint8)),
            "starts.npy": array_bytes(torch.tensor(starts)),
        }

    write_shards(range(1), members, tmp_path, "train", 1)
    runs = ShardRuns(ShardReader(sorted(tmp_path.glob("*.tar"))))
    with pytest.raises(BrokenSampleError, match=r"\.starts\.npy does not hold ascending positions of its 40 tokens"):
        runs.read(0, 0, 10)
