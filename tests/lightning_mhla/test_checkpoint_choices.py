"""Choice of the checkpoint that a command uses, and the books of best checkpoints: names, removals, moved folders, foreign paths."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mhla.callbacks.best import BestCheckpoints, Request, complete, monitored_metrics, relocate, relocate_all
from lightning_mhla.checkpoints.choice import best_checkpoint, choose_checkpoint, lies_in, name_of_start


def save(path: Path, step: int = 1, **callbacks: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": {}, "global_step": step, "callbacks": callbacks}, path)
    return path


def state_of(run: Path, step: int, **recovery: Any) -> Path:
    return save(run / f"checkpoints/recovery/step={step:08d}.ckpt", step, Recovery=recovery)


# The choice


@pytest.mark.parametrize("training", [True, False])
def test_without_a_run_the_named_file_is_taken(training: bool) -> None:
    assert choose_checkpoint(None, None, training) is None
    for name in ("some.ckpt", "last"):
        assert choose_checkpoint(None, name, training) == name
    with pytest.raises(ValueError, match="--ckpt_path=best needs a run"):
        choose_checkpoint(None, "best", training)


def test_a_run_without_checkpoints_starts_from_nothing_or_from_the_named_file(tmp_path: Path) -> None:
    assert choose_checkpoint(tmp_path, None, training=True) is None
    assert choose_checkpoint(tmp_path, "last", training=True) is None
    assert choose_checkpoint(tmp_path, str(tmp_path), training=True) is None
    assert choose_checkpoint(tmp_path, "some.ckpt", training=True) == "some.ckpt"
    assert choose_checkpoint(tmp_path, None, training=False) == str(tmp_path), "whoever reads it says what is missing"
    assert choose_checkpoint(tmp_path, "some.ckpt", training=False) == "some.ckpt"


@pytest.mark.parametrize("training", [True, False])
def test_the_latest_of_a_run_has_several_names(tmp_path: Path, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    state_of(run, 4)
    monkeypatch.chdir(tmp_path)
    for name in (None, "last", str(run), "run", "run/../run"):
        assert choose_checkpoint(run, name, training) == str(run), name
    assert choose_checkpoint(Path("run"), str(run), training) == "run"


def test_an_evaluation_takes_any_file_beside_its_run(tmp_path: Path) -> None:
    state_of(tmp_path / "run", 4, started_from="elsewhere.ckpt")
    for name in (str(save(tmp_path / "elsewhere.ckpt")), "missing.ckpt"):
        assert choose_checkpoint(tmp_path / "run", name, training=False) == name


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("repeated", [True, False])
def test_a_start_from_a_file_is_repeated_continued_or_rejected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, inside: bool, repeated: bool, finished: bool
) -> None:
    run = tmp_path / "run"
    asked = save(run / "checkpoints/early.ckpt" if inside else tmp_path / "elsewhere.ckpt")
    name = "checkpoints/early.ckpt" if inside else str(asked)
    state_of(run, 4, started_from=name if repeated else "checkpoints/other.ckpt", finished=finished)
    caplog.set_level(logging.INFO, "lightning_mhla")
    said = f"{run} started from {asked} already, and continues from its latest checkpoint"
    if repeated and not (inside and finished):
        assert choose_checkpoint(run, str(asked), training=True) == str(run)
        assert caplog.messages == [said]
        return
    if inside:
        assert choose_checkpoint(run, str(asked), training=True) == str(asked), (
            "a run rolls back, also once it is finished"
        )
    else:
        with pytest.raises(ValueError, match="has checkpoints of its own, which did not start from there"):
            choose_checkpoint(run, str(asked), training=True)
    assert said not in caplog.messages


def test_a_file_that_is_missing_is_left_to_whoever_reads_it(tmp_path: Path) -> None:
    state_of(tmp_path, 4, started_from=None)
    for name in (tmp_path / "checkpoints/missing.ckpt", tmp_path.parent / "missing.ckpt"):
        assert choose_checkpoint(tmp_path, str(name), training=True) == str(name)


@pytest.mark.parametrize("callbacks", [{}, {"Recovery": None}, {"Recovery": [1]}, {"Other": {}}, None, 3])
def test_a_run_whose_books_are_missing_is_not_replaced(tmp_path: Path, callbacks: Any) -> None:
    run, path = tmp_path / "run", tmp_path / "run/checkpoints/recovery/step=00000004.ckpt"
    path.parent.mkdir(parents=True)
    torch.save({"state_dict": {}, "global_step": 4} | ({} if callbacks is None else {"callbacks": callbacks}), path)
    with pytest.raises(ValueError, match="has checkpoints of its own"):
        choose_checkpoint(run, str(save(tmp_path / "elsewhere.ckpt")), training=True)


def test_a_damaged_state_does_not_hide_the_one_before(tmp_path: Path) -> None:
    run, start = tmp_path / "run", save(tmp_path / "start.ckpt")
    state_of(run, 4, started_from=str(start))
    state_of(run, 6, started_from=str(start)).write_bytes(b"nothing")
    assert choose_checkpoint(run, str(start), training=True) == str(run)


def test_names_of_starts_follow_a_run_that_is_moved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert name_of_start(run / "checkpoints/a.ckpt", run) == "checkpoints/a.ckpt"
    assert name_of_start(run / "../run/a.ckpt", run) == "a.ckpt"
    assert name_of_start(tmp_path / "a.ckpt", run) == str(tmp_path / "a.ckpt")
    assert lies_in(run / "a", run)
    assert not lies_in(tmp_path / "running", run)
    run.mkdir()
    (run / "link").symlink_to(tmp_path)
    assert not lies_in(run / "link/a", run)


# The best of a run


def monitored(path: Path, folder: Path, **more: Any) -> dict[str, Any]:
    return {"monitor": "val/loss", "best_model_path": str(path), "dirpath": str(folder), **more}


def test_the_best_is_found_where_the_run_lies_now(tmp_path: Path) -> None:
    run, before = tmp_path / "run", tmp_path / "before/checkpoints"
    best = save(run / "checkpoints/sub/best.ckpt")
    save(
        run / "checkpoints/recovery/step=00000004.ckpt",
        4,
        other=[1],
        ModelCheckpoint=monitored(before / "sub/best.ckpt", before),
    )
    assert best_checkpoint(run) == best
    assert choose_checkpoint(run, "best", training=False) == str(best)
    best.unlink()
    with pytest.raises(FileNotFoundError, match=r"its best checkpoint, sub/best\.ckpt, no longer exists"):
        best_checkpoint(run)


def test_a_folder_that_the_user_chose_is_kept(tmp_path: Path) -> None:
    run, best = tmp_path / "run", save(tmp_path / "chosen/best.ckpt")
    save(run / "checkpoints/best.ckpt")
    save(run / "checkpoints/last.ckpt", 4, ModelCheckpoint=monitored(best, tmp_path / "chosen"))
    assert best_checkpoint(run) == best


def test_only_a_monitor_makes_a_best(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints/a.ckpt"
    books = {
        "a": monitored(path, path.parent, monitor=None),
        "b": monitored(path, path.parent, best_model_path=""),
        "c": "best",
    }
    save(path, 4, **books)
    with pytest.raises(FileNotFoundError, match="has no best checkpoint: no ModelCheckpoint with a monitor"):
        best_checkpoint(tmp_path)


def test_the_latest_state_with_books_decides(tmp_path: Path) -> None:
    """A later state that is damaged is passed over; an earlier one is not asked."""
    folder = tmp_path / "checkpoints"
    one, two = save(folder / "one.ckpt"), save(folder / "two.ckpt", 2)
    save(folder / "recovery/step=00000004.ckpt", 4, ModelCheckpoint=monitored(one, folder))
    save(folder / "recovery/step=00000005.ckpt", 5, ModelCheckpoint=monitored(two, folder))
    save(folder / "recovery/step=00000006.ckpt", 6).write_bytes(b"nothing")
    assert best_checkpoint(tmp_path) == two
    save(folder / "recovery/step=00000007.ckpt", 7, Recovery={})
    with pytest.raises(FileNotFoundError, match="has no best checkpoint"):
        best_checkpoint(tmp_path)


# Best checkpoints while training


class Saving:
    """The parts of a trainer that best checkpoints use; what they ask for is kept."""

    def __init__(self, *callbacks: Any, first: bool = True, step: int = 4) -> None:
        self.checkpoint_callbacks = list(callbacks)
        self.is_global_zero, self.global_step = first, step
        self.saved: list[Any] = []
        self.removed: list[str] = []
        self.told: list[Any] = []
        self.loggers = [SimpleNamespace(after_save_checkpoint=lambda callback: self.told.append(callback.monitor))]
        self.strategy = SimpleNamespace(remove_checkpoint=self.removed.append, broadcast=lambda value: value)

    def save_checkpoint(self, *arguments: Any) -> None:
        self.saved.append(arguments)


def checkpointing(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, **{"monitor": "val/loss", "save_top_k": 2, **options})  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "run/checkpoints"
    place.mkdir(parents=True)
    return place


def test_requests_become_names_of_one_state(folder: Path) -> None:
    state, callback = save(folder / "recovery/step=00000004.ckpt", 4), checkpointing(folder)
    best, trainer = BestCheckpoints(), Saving(callback, object())
    assert best.validated_step == -1
    best.adopt(trainer)  # type: ignore[arg-type]
    assert not best.wanted
    for name in ("a.ckpt", "sub/b.ckpt"):
        callback._save_checkpoint(trainer, str(folder / name))  # type: ignore[arg-type]
    callback._remove_checkpoint(trainer, str(folder / "old.ckpt"))  # type: ignore[arg-type]
    assert best.wanted
    assert callback.file_exists(str(folder / "a.ckpt"), trainer), "the next one gets a name of its own"  # type: ignore[arg-type]
    assert best.plan(folder) == {"names": ["a.ckpt", "sub/b.ckpt"], "removals": ["old.ckpt"]}
    best.finish(trainer, state)  # type: ignore[arg-type]
    assert [os.path.samefile(state, folder / name) for name in ("a.ckpt", "sub/b.ckpt")] == [True, True]
    assert trainer.removed == [str(folder / "old.ckpt")]
    assert trainer.told == ["val/loss", "val/loss"]
    assert not trainer.saved
    assert not best.wanted
    assert best.plan(folder) == {"names": [], "removals": []}
    best.finish(trainer, state)  # type: ignore[arg-type]
    assert trainer.removed == [str(folder / "old.ckpt")], "once"
    best.release()
    assert "_save_checkpoint" not in vars(callback)


def test_adopting_again_forgets_earlier_requests(folder: Path) -> None:
    first, second = checkpointing(folder), checkpointing(folder)
    best = BestCheckpoints()
    best.adopt(Saving(first))  # type: ignore[arg-type]
    first._save_checkpoint(Saving(), str(folder / "a.ckpt"))  # type: ignore[arg-type]
    first._remove_checkpoint(Saving(), str(folder / "b.ckpt"))  # type: ignore[arg-type]
    best.adopt(Saving(second))  # type: ignore[arg-type]
    assert "_save_checkpoint" not in vars(first)
    assert "_save_checkpoint" in vars(second)
    assert best.plan(folder) == {"names": [], "removals": []}
    assert not best.wanted


@pytest.mark.parametrize("first", [True, False])
def test_what_cannot_be_a_second_name_is_written_apart(folder: Path, first: bool) -> None:
    """Weights alone, and places elsewhere; by all processes. Only the first one names and tells."""
    state, trainer = save(folder / "state.ckpt"), Saving(first=first)
    light = checkpointing(folder, save_weights_only=True, monitor="light")
    whole = checkpointing(folder, monitor="whole")
    best = BestCheckpoints()
    best._requests = [
        Request(light, str(folder / "a.ckpt")),
        Request(whole, "s3://bucket/b.ckpt"),
        Request(whole, str(folder / "c.ckpt")),
    ]
    assert best.plan(folder) == {"names": ["c.ckpt"], "removals": []}
    best.finish(trainer, state)  # type: ignore[arg-type]
    assert trainer.saved == [(str(folder / "a.ckpt"), True), ("s3://bucket/b.ckpt", False)]
    assert (folder / "c.ckpt").exists() is first
    assert trainer.told == (["light", "whole", "whole"] if first else [])


def test_without_a_state_each_request_is_written(folder: Path) -> None:
    trainer, best = Saving(), BestCheckpoints()
    best._requests = [Request(checkpointing(folder), str(folder / "a.ckpt"))]
    best.finish(trainer, None)  # type: ignore[arg-type]
    assert trainer.saved == [(str(folder / "a.ckpt"), False)]
    assert not (folder / "a.ckpt").exists()


def test_the_plan_leaves_out_what_lies_elsewhere(folder: Path, tmp_path: Path) -> None:
    (folder / "link").symlink_to(tmp_path)
    best, callback = BestCheckpoints(), checkpointing(folder)
    places = [f"{folder}/a.ckpt", f"{tmp_path}/b.ckpt", f"{folder}/link/c.ckpt", "s3://x/d.ckpt", f"{folder}/../e.ckpt"]
    best._requests = [Request(callback, place) for place in places]
    best._removals = places
    assert best.plan(folder) == {"names": ["a.ckpt"], "removals": ["a.ckpt"]}


@pytest.mark.parametrize(
    ("options", "named"), [({"save_last": True}, True), ({"save_last": False}, False), ({"save_last": None}, False)]
)
def test_the_latest_state_has_a_name_in_a_folder_of_its_own(
    folder: Path, tmp_path: Path, options: dict[str, Any], named: bool
) -> None:
    here, apart = checkpointing(folder, **options), checkpointing(tmp_path / "apart", **options)
    best = BestCheckpoints()
    best.adopt(Saving(here, apart))  # type: ignore[arg-type]
    best.name_last(folder / "last.ckpt")
    assert here.last_model_path == str(folder / "last.ckpt")
    assert apart.last_model_path == str((tmp_path / "apart" if named else folder) / "last.ckpt")
    assert [request.path for request in best._requests] == ([str(tmp_path / "apart/last.ckpt")] if named else [])


@pytest.mark.parametrize("monitor", ["val/loss", "train/loss", None])
@pytest.mark.parametrize("complete_epoch", [True, False])
@pytest.mark.parametrize("validated", [4, 3])
def test_a_value_of_earlier_weights_makes_no_best(
    folder: Path, monkeypatch: pytest.MonkeyPatch, monitor: str | None, complete_epoch: bool, validated: int
) -> None:
    """Training that ends inside an epoch has no validation of its last weights."""
    judged: list[int] = []
    monkeypatch.setattr(ModelCheckpoint, "on_train_epoch_end", lambda *_: judged.append(1))
    callback = checkpointing(folder, monitor=monitor, save_top_k=1)
    trainer = Saving(callback, step=4)
    loop = SimpleNamespace(_num_ready_batches_reached=lambda: complete_epoch)
    trainer.fit_loop = SimpleNamespace(epoch_loop=loop)  # type: ignore[attr-defined]
    best = BestCheckpoints()
    best.adopt(trainer)  # type: ignore[arg-type]
    best.validated_step = validated
    callback.on_train_epoch_end(trainer, None)  # type: ignore[arg-type]
    outdated = monitor == "val/loss" and not complete_epoch and validated != 4
    assert bool(judged) is not outdated


# After a crash, and after a move


def test_a_plan_is_completed_once(folder: Path) -> None:
    state = save(folder / "recovery/step=00000004.ckpt", 4)
    mine = save(folder / "a.ckpt", 7)
    for name in ("old.ckpt", "both.ckpt", "sub/old.ckpt", "notes.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("old")
    (folder / "folder.ckpt").mkdir()
    removals = ["old.ckpt", "both.ckpt", "sub/old.ckpt", "notes.txt", "folder.ckpt", "gone.ckpt"]
    complete({"names": ["a.ckpt", "new.ckpt", "both.ckpt"], "removals": removals}, state, folder)
    assert torch.load(mine, weights_only=True)["global_step"] == 7, "a file that is there already stays"
    assert os.path.samefile(folder / "new.ckpt", state)
    assert (folder / "both.ckpt").read_text() == "old"
    kept = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != "recovery"}
    assert kept == {"a.ckpt", "new.ckpt", "both.ckpt", "notes.txt", "folder.ckpt", "sub", f"recovery/{state.name}"}


def books_of(folder: str, scores: dict[str, float], mode: str = "min", top: int = 2) -> dict[str, Any]:
    better, worse = (min, max) if mode == "min" else (max, min)
    best, kth = better(scores, key=scores.__getitem__), worse(scores, key=scores.__getitem__)
    return {
        "dirpath": folder, "best_k_models": {f"{folder}/{name}": torch.tensor(score) for name, score in scores.items()},
        "best_model_path": f"{folder}/{best}", "best_model_score": torch.tensor(scores[best]),
        "kth_best_model_path": f"{folder}/{kth}" if len(scores) == top else "", "last_model_path": f"{folder}/last.ckpt",
        "kth_value": torch.tensor(scores[kth]), "monitor": "val/loss",
    }  # fmt: skip


def names(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Paths of a state relative to the folder in which they must lie."""
    paths = {key: state[key] for key in ("best_model_path", "kth_best_model_path", "last_model_path")}
    for path in (*paths.values(), *state["best_k_models"]):
        assert not path or path.startswith(f"{folder}/"), path
    relative = {key: os.path.relpath(path, folder) if path else "" for key, path in paths.items()}
    return relative | {
        "all": {os.path.relpath(path, folder): float(score) for path, score in state["best_k_models"].items()}
    }


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_moved_run_keeps_its_books(folder: Path, mode: str) -> None:
    callback = checkpointing(folder, mode=mode)
    state = books_of("/old/run/checkpoints", {"a.ckpt": 1.0, "b/b.ckpt": 2.0}, mode)
    found = relocate(state, callback)
    best, kth = ("a.ckpt", "b/b.ckpt") if mode == "min" else ("b/b.ckpt", "a.ckpt")
    assert names(found, folder) == {
        "best_model_path": best, "kth_best_model_path": kth, "last_model_path": "last.ckpt",
        "all": {"a.ckpt": 1, "b/b.ckpt": 2},
    }  # fmt: skip
    assert found["dirpath"] == callback.dirpath
    assert float(found["best_model_score"]) == float(state["best_model_score"])
    assert found["monitor"] == "val/loss"
    assert state["dirpath"] == "/old/run/checkpoints", "a copy is changed"


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(
    ("top", "gone", "best", "kth"),
    [
        (3, ["a.ckpt"], ("b.ckpt", "c.ckpt"), ("", "")),
        (3, ["c.ckpt"], ("a.ckpt", "b.ckpt"), ("", "")),
        (2, ["a.ckpt"], ("b.ckpt", "c.ckpt"), ("c.ckpt", "b.ckpt")),
        (2, ["c.ckpt"], ("a.ckpt", "b.ckpt"), ("b.ckpt", "a.ckpt")),
        (3, ["a.ckpt", "b.ckpt", "c.ckpt"], ("", ""), ("", "")),
    ],
)
def test_files_that_are_gone_leave_the_books(
    folder: Path, mode: str, top: int, gone: list[str], best: tuple[str, str], kth: tuple[str, str]
) -> None:
    callback = checkpointing(folder, mode=mode, save_top_k=top)
    scores = {"a.ckpt": 1.0, "b.ckpt": 2.0, "c.ckpt": 3.0}
    found = relocate(books_of(str(folder), scores, mode, 3), callback, [str(folder / name) for name in gone])
    side = int(mode == "max")
    first = {"min": best[0], "max": best[1]}[mode]
    left = {name: score for name, score in scores.items() if name not in gone}
    if left:
        first = (min if mode == "min" else max)(left, key=left.__getitem__)
    last = (max if mode == "min" else min)(left, key=left.__getitem__) if len(left) == top else ""
    assert (first, last) == (best[side], kth[side])
    assert names(found, folder) == {
        "best_model_path": first, "kth_best_model_path": last, "last_model_path": "last.ckpt", "all": left,
    }  # fmt: skip
    score = found["best_model_score"]
    assert (None if score is None else float(score)) == left.get(first)


def test_a_file_in_the_middle_that_is_gone_changes_nothing_else(folder: Path) -> None:
    state = books_of(str(folder), {"a.ckpt": 1.0, "b.ckpt": 2.0, "c.ckpt": 3.0}, top=3)
    found = relocate(state, checkpointing(folder, save_top_k=3), [str(folder / "b.ckpt")])
    assert names(found, folder)["all"] == {"a.ckpt": 1, "c.ckpt": 3}
    assert names(found, folder)["kth_best_model_path"] == "c.ckpt"
    assert names(found, folder)["best_model_path"] == "a.ckpt"


def test_paths_of_other_places_are_no_books(folder: Path, tmp_path: Path) -> None:
    """Neither beside the folder nor of another kind; a bucket has its own, without ``..``."""
    state = books_of(str(folder), {"a.ckpt": 1.0, "../thesis.ckpt": 2.0, "notes.txt": 3.0}, top=3)
    state["best_k_models"][f"{tmp_path}/other.ckpt"] = torch.tensor(4.0)
    state["best_k_models"]["s3://bucket/e.ckpt"] = torch.tensor(5.0)
    assert list(relocate(state, checkpointing(folder))["best_k_models"]) == [f"{folder}/a.ckpt"]
    callback = checkpointing(folder)
    callback.dirpath = "s3://bucket/run"
    inside = ["s3://bucket/run/a.ckpt", "s3://bucket/run/b.ckpt"]
    outside = ["s3://bucket/run/../thesis.ckpt", "s3://bucket/other.ckpt", str(folder / "a.ckpt")]
    bucket = {
        "dirpath": "s3://bucket/run", "best_k_models": dict.fromkeys([*inside, *outside], torch.tensor(1.0)),
        "best_model_path": inside[0], "kth_best_model_path": inside[1], "last_model_path": "", "best_model_score": torch.tensor(1.0),
    }  # fmt: skip
    found = relocate(bucket, callback)
    assert list(found["best_k_models"]) == inside
    assert (found["best_model_path"], found["kth_best_model_path"], found["last_model_path"]) == (*inside, "")


def test_all_books_of_a_checkpoint_are_relocated(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "a.ckpt").touch()
    one, two = checkpointing(folder), checkpointing(folder, monitor="val/accuracy", mode="max", every_n_epochs=2)
    three = checkpointing(folder, monitor="val/error")
    odd = SimpleNamespace(state_key="odd")
    books = books_of("/old/run/checkpoints", {"a.ckpt": 1.0, "b.ckpt": 2.0})
    states: dict[str, Any] = {one.state_key: books, two.state_key: {"other": 1}, "odd": {"best_k_models": {}}}
    given = Saving(odd, one, two, three)
    with caplog.at_level(logging.INFO, "lightning_mhla"):
        relocate_all(given, states)  # type: ignore[arg-type]
    assert names(states[one.state_key], folder)["all"] == {"a.ckpt": 1}
    assert states[two.state_key] == {"other": 1}
    assert states["odd"] == {"best_k_models": {}}
    assert three.state_key not in states
    gone = f"these files no longer exist and are removed from the best checkpoints: {folder / 'b.ckpt'}"
    assert caplog.messages == [gone]
    caplog.clear()
    states[one.state_key] = books_of("/old/run/checkpoints", {"a.ckpt": 1.0})
    with caplog.at_level(logging.INFO, "lightning_mhla"):
        relocate_all(given, states)  # type: ignore[arg-type]
    assert not caplog.messages
    states[one.state_key] = books
    given.is_global_zero = False
    with caplog.at_level(logging.INFO, "lightning_mhla"):
        relocate_all(given, states)  # type: ignore[arg-type]
    assert not caplog.messages, "the first process says it"
    assert names(states[one.state_key], folder)["all"] == {"a.ckpt": 1}


def test_monitored_metrics_are_kept_whatever_sets_them() -> None:
    """Lightning's metrics are tensors; a callback may put a plain number beside them. Others are left out."""
    monitors = [ModelCheckpoint(monitor=name) for name in ("a", "b", "absent")] + [ModelCheckpoint()]
    values = {"a": torch.tensor(0.5, requires_grad=True), "b": 2.0, "c": torch.tensor(1.0)}
    kept = monitored_metrics(SimpleNamespace(checkpoint_callbacks=monitors, callback_metrics=values))
    assert kept == {"a": torch.tensor(0.5), "b": torch.tensor(2.0)}
    assert not kept["a"].requires_grad
