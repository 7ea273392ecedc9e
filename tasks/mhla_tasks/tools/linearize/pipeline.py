"""Steps of ``lightning linearize``. A repeated command skips the steps that are already complete."""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_mhla.checkpoints.choice import best_checkpoint
from lightning_mhla.checkpoints.runs import in_use
from lightning_mhla.data.origins import ShardSet
from lightning_mhla.system.files import write_json, write_whole
from lightning_mhla.system.numbers import metric_text
from mhla_tasks.tools.linearize import measure, speed, stages
from mhla_tasks.tools.linearize.report import softmax_layers, window_note, write_report
from mhla_tasks.tools.linearize.source import open_source
from mhla_tasks.tools.processes import KILLED, describe_status, run_command

CHOICES, PLAN, RESULTS = "choices.json", "plan.json", "results.json"
"""Files in the working folder: the options of the command, the numbers of steps, and the results of the completed steps."""

MIN_STEPS = 4
"""Minimum number of steps of a training run if the number is computed from the budget."""

POSITION_BATCHES = 8
"""Number of batches of held-out text on which perplexity by position is measured."""

COST_SHARE = 8
"""Divisor of the number of validation batches when the cost of each layer is measured.

Fewer batches are used because the measurement evaluates the model once for each layer.
"""


class Pipeline:
    """Linearization of a pretrained model: two training runs, an export and a report.

    All intermediate results are stored in a working folder. A later pipeline with the same options resumes from them. A
    pipeline with different options begins again, provided that nothing has been trained yet.

    Args:
        name: path or name of the pretrained model, see :func:`open_source`.
        target: folder for the exported model.
        work: working folder.
        settings: options that determine the training.
        budget: training time in seconds, from which the numbers of steps are computed; ignored if ``steps`` is given.
        steps: optimizer steps of the first and the second run; None to compute them from ``budget``.
        lock: file descriptor of the lock on ``work``. The commands that perform the steps inherit it, because they may outlive
            this process. None for no lock.

    Raises:
        FileNotFoundError: if there is no such pretrained model.
        ValueError: if a model was trained with different options in the working folder, or the model cannot be linearized.
    """

    def __init__(
        self,
        name: str,
        target: Path,
        work: Path,
        settings: stages.Settings,
        budget: float,
        steps: tuple[int, int] | None = None,
        lock: int | None = None,
    ) -> None:
        self.lock = lock
        self.target, self.work, self.settings, self.budget, self.steps = target, work, settings, budget, steps
        choices = {"source": name, "settings": asdict(settings), "budget": None if steps else budget, "steps": steps}
        self.choices: dict[str, Any] = json.loads(json.dumps(choices))
        begun_with = self._read(CHOICES)
        begun = begun_with == self.choices
        if begun_with and not begun:
            self._discard_preparation(begun_with)
        self.source = open_source(name, work / "original", reuse=begun)  # first, so that a wrong model leaves no folder
        work.mkdir(parents=True, exist_ok=True)
        write_json(work / CHOICES, self.choices, indent=1)
        self.plan = self._read(PLAN)
        self.results = self._read(RESULTS)

    def run(self) -> None:
        """Perform all steps that are not complete yet, and print a message for each of them.

        Raises:
            SystemExit: if a command that performs a step fails, with the exit status of the command.
        """
        if self.source.images is not None and (differences := self.source.images.differences):
            _say(f"warning: held-out images are resized with {differences}")
        self._prepare_data()
        self._make_plan()
        self._measure_before()
        self._fit("matching", self._matching())
        self._choose_layers()
        self._fit("tuning", self._tuning())
        self._check_gain()
        self._export()
        self._measure_after()
        write_report(self.target, self.work, self.source, self.settings, self.results)
        _say(f"model: {self.target}\nreport: {self.work / 'report.html'}")

    def _discard_preparation(self, begun_with: dict[str, Any]) -> None:
        """Delete what an earlier command with different options has prepared in the working folder.

        Args:
            begun_with: options of the earlier command.

        Raises:
            ValueError: if the earlier command has begun to train, or the shards were not prepared by it.
        """
        difference = f"{self.work} was begun with {self._describe_changes(begun_with)}"
        matching = self.work / "matching"
        if "matching" in self._read(RESULTS) or any(matching.rglob("*.ckpt")) or in_use(matching):
            raise ValueError(
                f"{difference}. Continue with the same options, choose a different folder with --work, or delete {self.work} "
                "to begin again"
            )
        _say(f"{difference}; nothing was trained, so the preparation begins again")
        for prefix in ("train", "val"):
            ShardSet(self.work / "shards", prefix).delete()
        # The choices are deleted last, so that a command that is killed here is not taken for a complete preparation.
        for name in (RESULTS, PLAN, CHOICES):
            (self.work / name).unlink(missing_ok=True)

    def _describe_changes(self, begun_with: dict[str, Any]) -> str:
        """Describe the options that differ from those of an earlier command, such as ``--length=512, not 128``."""
        former, present = (
            {**choices, **choices.get("settings", {}), "settings": None} for choices in (begun_with, self.choices)
        )
        return "; ".join(
            f"{name if name == 'source' else f'--{name}'}={written(former.get(name))}, not {written(value)}"
            for name, value in present.items()
            if value != former.get(name)
        )

    @property
    def _data(self) -> dict[str, Any]:
        return stages.data_options(self.source, self.settings, self.work / "shards")

    def _matching(self) -> dict[str, Any]:
        return stages.matching(self.source, self.settings, self._data, self.plan["steps"][0])

    def _tuning(self) -> dict[str, Any]:
        matched = str(self.work / "matching" / "checkpoints" / "last.ckpt")
        kinds = self.results.get("layers", {}).get("layer_kinds")
        return stages.tuning(self.source, self.settings, self._data, self.plan["steps"][1], matched, kinds)

    def _prepare_data(self) -> None:
        if self.source.domain != "language" or self.results.get("prepared"):
            return
        for prefix, sources in (("train", self.settings.train), ("val", self.settings.val)):
            words = ["prepare", "text", str(self.work / "shards"), *sources, "--tokenizer", self.source.path]
            self._lightning([*words, "--prefix", prefix, "--run_characters", "400000"], f"tokens of the {prefix} data")
        self._keep(prepared=True)

    def _make_plan(self) -> None:
        """Set the number of steps of each training run: the number that the user chose, or one that fits the budget."""
        if self.plan:
            return
        seconds = None
        if self.steps is None:
            _say("timing a few training steps")
            original = self.source.path
            # The number of steps is arbitrary here: it does not change the time of a step.
            first = stages.matching(self.source, self.settings, self._data, 1000)
            second = stages.tuning(self.source, self.settings, self._data, 1000, original, None)
            seconds = [measure.step_seconds(first), measure.step_seconds(second)]
            shares = [stages.MATCH_SHARE, 1 - stages.MATCH_SHARE]
            steps = [
                max(MIN_STEPS, int(self.budget * share / time)) for share, time in zip(shares, seconds, strict=True)
            ]
        else:
            steps = list(self.steps)
        self.plan = {"steps": steps, "seconds_per_step": seconds}
        write_json(self.work / PLAN, self.plan, indent=1)
        _say(f"plan: {steps[0]} steps match the layers, {steps[1]} train the model")

    def _measure_before(self) -> None:
        if "swapped" in self.results:
            return
        _say("quality before training")
        configuration = self._matching()
        original, swapped = measure.quality(configuration, original=True), measure.quality(configuration)
        if self.settings.kind == "mhla_window" and self.source.domain != "image":
            self._keep(window=self._samples_in_window())
        self._keep(original=original, swapped=swapped)
        monitor, _ = stages.MONITORS[self.source.domain]
        _say(
            f"{monitor}: {metric_text(monitor, original[monitor])} original, {metric_text(monitor, swapped[monitor])} swapped"
        )
        if warning := window_note(self.results):
            _say(f"warning: {warning}")

    def _samples_in_window(self) -> dict[str, float]:
        is_text = self.source.domain == "text"  # the samples of a language model all have the same length
        lengths = measure.passage_lengths(self._matching()) if is_text else [self.settings.length]
        return measure.samples_in_window(lengths, measure.WINDOW_BLOCKS[self.source.domain], self.settings.block_size)

    def _fit(self, name: str, configuration: dict[str, Any]) -> None:
        if name in self.results:
            return
        path, folder = self.work / f"{name}.yaml", self.work / name
        text = yaml.safe_dump(configuration, sort_keys=False)
        if not (path.exists() and path.read_text() == text):
            write_whole(path, text)
        words = ["fit", "--config", str(path), "--run_dir", str(folder)]
        self._lightning(words, f"{name}: {configuration['trainer']['max_steps']} steps")
        record = json.loads((folder / "run.json").read_text())
        result = {"curves": record["metrics"], "seconds": record["seconds"], "steps": record["steps"]}
        last = {metric: dict(points) for metric, points in record["metrics"].items() if points}
        # Of the second run, the best checkpoint is exported, so its metrics count; of the first run, the last ones.
        step = (
            max(max(points) for points in last.values()) if name == "matching" else (record["best"] or {}).get("step")
        )
        result["metrics"] = {metric: points.get(step, points[max(points)]) for metric, points in last.items()}
        self._keep(**{name: result})

    def _check_gain(self) -> None:
        """Print a warning if the second training run made the model worse, according to its monitored validation metric."""
        monitor, mode = stages.MONITORS[self.source.domain]
        matched, tuned = (self.results[name]["metrics"].get(monitor) for name in ("matching", "tuning"))
        if matched is None or tuned is None or (tuned >= matched if mode == "max" else tuned <= matched):
            return
        _say(
            f"warning: the second run made the model worse: {monitor} {metric_text(monitor, matched)} after matching, "
            f"{metric_text(monitor, tuned)} at its best afterwards; use a lower --tune_lr and another --work"
        )

    def _choose_layers(self) -> None:
        if "layers" in self.results or not self.settings.keep:
            return
        from mhla_tasks.tools import layer_costs

        _say("cost of each layer")
        with measure.quiet():
            costs = layer_costs.measure(
                self.work / "matching",
                self.settings.keep,
                max(1, self.settings.val_batches // COST_SHARE),
                self.settings.accelerator,
            )
        self._keep(layers=costs)
        _say(softmax_layers(costs["kept"], self.source.depth))

    def _export(self) -> None:
        target = str(self.target.resolve())
        if self.results.get("exported") == target and (self.target / "config.json").is_file():
            return
        run = self.work / "tuning"
        try:
            checkpoint = best_checkpoint(run)
        except FileNotFoundError as error:  # for example, a run that never validated
            _say(f"the last checkpoint is exported: {error}")
            checkpoint = run / "checkpoints" / "last.ckpt"
        self._lightning(["export", str(checkpoint), str(self.target)], "export")
        self._keep(exported=target)

    def _measure_after(self) -> None:
        if "speed" in self.results:
            return
        _say("speed by length")
        networks = measure.load_networks(self.source, self.target)
        if self.source.domain == "language":
            bounds = measure.positions(self.settings.length)
            tokens = measure.held_out_tokens(self._matching(), POSITION_BATCHES)
            perplexity = {name: measure.by_position(network, tokens, bounds) for name, network in networks.items()}
            self._keep(positions={"bounds": bounds, **perplexity})
        longest = speed.longest_sample(self.source, networks["original"])
        if self.source.domain == "language":
            generation = speed.generation_by_length(networks, longest)
            self._keep(generation={str(length): by_name for length, by_name in generation.items()})
        seconds = speed.seconds_by_length(self.source, networks, longest, self.settings.length)
        self._keep(
            speed={str(length): by_name for length, by_name in seconds.items()},
            break_even=speed.break_even(seconds),
        )

    def _lightning(self, words: list[str], what: str) -> None:
        """Run a ``lightning`` command in a child process.

        Args:
            words: arguments of the command, without the name of the program.
            what: description of the step, which is printed first.

        Raises:
            SystemExit: if the command fails, with the exit status of the command.
        """
        _say(what)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # measurements in this process must not hold memory that the command needs
        inherited = () if self.lock is None else (self.lock,)
        if status := run_command([sys.executable, "-m", "mhla_tasks", *words], inherited=inherited):
            _say(f"{describe_status(status)}; the same command continues here ({self.work})")
            if status == KILLED:
                _say("to need less memory, use a smaller --batch_size or --length with a different --work")
            sys.exit(status)

    def _keep(self, **results: Any) -> None:
        self.results |= results
        write_json(self.work / RESULTS, self.results, indent=1)

    def _read(self, name: str) -> dict[str, Any]:
        path = self.work / name
        return json.loads(path.read_text()) if path.is_file() else {}


def written(value: Any) -> str:
    """Format the value of an option as on a command line; None becomes ``none``."""
    return "none" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
