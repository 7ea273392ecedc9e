"""Callback that evaluates the model with lm-evaluation-harness during training."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning import LightningModule, Trainer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedModel

from lightning_mhla.callbacks.averaging import evaluation_weights
from lightning_mhla.callbacks.periodic import PeriodicEvaluation
from lightning_mhla.checkpoints.weights import shards_weights
from lightning_mhla.data.sampling import kept_random_state
from lightning_mhla.system.files import write_json
from lightning_mhla.system.folders import run_folder
from lightning_mhla.system.numbers import rounded
from mhla_tasks.commandline.console import harmless

log = logging.getLogger(__name__)

AUTOCAST = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}
"""Dtype of the model's matrix products by precision of the trainer; float32 weights with any other precision stay float32."""


class LMEval(PeriodicEvaluation):
    """Callback that scores the model on tasks of lm-evaluation-harness and logs each metric as ``lm_eval/TASK/METRIC``.

    The evaluation runs on all processes, in the precision of training, and shows lm-eval's progress bars. If training keeps a
    moving average of the weights, the averaged weights are evaluated. The scores are also written to
    ``lm_eval/stepNNNNNNN.json`` in the log folder, where NNNNNNN is the training step. Prompts that are too long are cut;
    ``lm_eval/TASK/prompts_cut`` is the fraction of such prompts.

    Args:
        tasks: names of tasks, groups or tags: mmlu, longbench, wikitext, lambada_openai, piqa, ...
        every_n_steps: number of optimizer steps between two evaluations; null for no evaluations during training.
        at_end: whether to evaluate the final weights.
        num_fewshot: number of examples in a prompt; null for the default of each task.
        limit: maximum number of documents of each task, for quick trials; null for all.
        batch_size: batch size of each process.
        max_length: maximum number of tokens in prompt and answer together; null for the model's context.
        cut: part to remove from prompts that are too long: middle or left.
        data_dir: folder with local copies of the tasks' data; null for the Hugging Face Hub.
        include_path: folder with additional tasks; null for none.

    Raises:
        ValueError: if ``tasks`` is empty.
    """

    def __init__(
        self,
        tasks: list[str],
        every_n_steps: int | None = None,
        at_end: bool = True,
        num_fewshot: int | None = None,
        limit: int | None = None,
        batch_size: int = 8,
        max_length: int | None = None,
        cut: Literal["middle", "left"] = "middle",
        data_dir: str | None = None,
        include_path: str | None = None,
    ) -> None:
        if not tasks:
            raise ValueError("tasks is empty; name at least one, mmlu for example")
        super().__init__(every_n_steps, at_end)
        self.tasks = tasks
        self.num_fewshot, self.limit, self.batch_size = num_fewshot, limit, batch_size
        self.max_length, self.cut = max_length, cut
        self.data_dir, self.include_path = data_dir, include_path
        self.scores: dict[str, float] = {}
        self._manager: Any = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check at the start of training that all tasks and their data exist.

        Raises:
            ValueError: if a task is unknown, or the training strategy shards the weights.
            FileNotFoundError: if the data of a task is missing.
        """
        if shards_weights(trainer):
            raise ValueError(
                f"LMEval needs complete weights on every process, and {type(trainer.strategy).__name__} shards them; use ddp, "
                "or score the checkpoint with mhla-lm-eval"
            )
        self._load_tasks()

    @torch.no_grad()
    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Score the model on all processes, with the averaged weights if there are any. The first process logs the scores."""
        from lm_eval import simple_evaluate

        from mhla_tasks.language.evaluation.lm import MHLALM
        from mhla_tasks.language.evaluation.tasks import local_data

        self._load_tasks()
        with kept_random_state(), evaluation_weights(trainer, pl_module), local_data(self.data_dir):
            model = MHLALM(
                cast(PreTrainedModel, pl_module.network),
                pl_module.tokenizer,
                max_length=self.max_length,
                cut=self.cut,
                batch_size=self.batch_size,
                mixed_precision_dtype=AUTOCAST.get(str(trainer.precision)),
            )
            results = simple_evaluate(
                model,
                tasks=list(self.tasks),
                task_manager=self._manager,
                num_fewshot=self.num_fewshot,
                limit=self.limit,
                # Standard errors are not logged, and bootstrapping them takes time.
                bootstrap_iters=0,
                log_samples=False,
            )
        shares, folder = model.cut_shares(), run_folder(trainer)
        if results is not None:
            self._log(trainer, folder, dict(results), shares)

    def _load_tasks(self) -> None:
        from lm_eval.tasks import TaskManager

        from mhla_tasks.language.evaluation.tasks import check_tasks, local_data

        if self._manager is None:
            manager = TaskManager(include_path=self.include_path)
            check_tasks(self.tasks, manager.all_tasks)
            with kept_random_state(), local_data(self.data_dir):
                manager.load(list(self.tasks))
            self._manager = manager

    def _log(self, trainer: Trainer, folder: Path, results: dict[str, Any], shares: Mapping[str, float]) -> None:
        self.scores = flat_scores({**results["results"], **results.get("groups", {})})
        self.scores |= {f"{task}/prompts_cut": share for task, share in shares.items()}
        self.log_values(trainer, "lm_eval", self.scores)
        record = {"step": trainer.global_step, "scores": self.scores, "versions": results.get("versions", {})}
        record["num_fewshot"] = results.get("n-shot", {})
        path = folder / "lm_eval" / f"step{trainer.global_step:07d}.json"
        write_json(path, record, indent=2, default=str)
        table = Table("task", "metric", "value", title=f"lm-evaluation-harness, step {trainer.global_step}")
        for name, value in self.scores.items():
            table.add_row(*(escape(harmless(part)) for part in name.split("/", 1)), rounded(value))
        Console().print(table)


def flat_scores(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Flatten lm-eval's results to one value for each task and metric, without standard errors.

    Args:
        results: dict from task name to the metric values of the task, whose keys are ``METRIC,FILTER``.

    Returns:
        Values under the keys ``TASK/METRIC``, or ``TASK/METRIC_FILTER`` if a filter was applied.
    """
    flat = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            metric, _, kind = key.partition(",")
            if isinstance(value, int | float) and not metric.endswith("_stderr") and kind:
                flat[f"{task}/{metric}" + ("" if kind == "none" else f"_{kind}")] = float(value)
    return flat
