"""Training, validation and prompt continuation for causal language models of this package and of the transformers library."""

# Longer than other modules because it holds one LightningModule, for plain text and for sequences with labeled answers.

from __future__ import annotations

import logging
from typing import Any, Literal, cast

import torch
from lightning import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_mhla.attention.inputs import UNHANDLED
from lightning_mhla.attention.sequence import SequenceShare
from lightning_mhla.swap.networks import repeated_layers
from lightning_mhla.training.module import TrainingModule
from mhla_tasks.language.callbacks import TextSamples
from mhla_tasks.language.chat_template import reply_end_tokens
from mhla_tasks.language.lengths import generate_tokens, warn_of_untrained_far_attention
from mhla_tasks.language.loss import IGNORED
from mhla_tasks.language.model import MHLAForCausalLM
from mhla_tasks.language.networks import examine, network_loss, training_flops
from mhla_tasks.language.prompts import ContinuationFile, GenerationOptions
from mhla_tasks.language.sums import MOST, TextSums
from mhla_tasks.language.tokenizer import (
    PackedFiles,
    fingerprint,
    left_padded,
    needed_vocab_size,
    pack_tokenizer,
    pad_token,
    unpack_tokenizer,
)

log = logging.getLogger(__name__)

Stage = Literal["val", "test"]

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Names under which a tokenizer and the configuration of a model hold the indices of special tokens."""


class CausalLanguageModel(TrainingModule):
    """Base class of Lightning modules that train, evaluate and sample from a causal language model.

    A subclass builds the network and passes it to :meth:`take` at the end of its constructor. The constructor of this class
    takes the same arguments as that of :class:`TrainingModule`.

    Attributes:
        network: causal language model, either an MHLA model of this package or a model from transformers.
        tokenizer: tokenizer of the network; None until the data or a checkpoint supplies one.
    """

    network: PreTrainedModel
    shares_sequences = True

    train_batch = ("tokens",)
    evaluation_batch = ("tokens", "bytes")
    predict_batch = ("prompt", "index")

    def take(self, network: PreTrainedModel, context: int, generation: GenerationOptions) -> None:
        """Store the network to train, and create empty validation and test metrics.

        Args:
            network: causal language model, either an MHLA model of this package or a model from transformers.
            context: number of tokens in a training sample.
            generation: options for continuing prompts.

        Raises:
            ValueError: if a network from transformers is not causal or does not support ``context`` tokens.
        """
        self.network, self.context, self.generation = network, context, generation
        self.network.generation_config.update(**self.sampling_settings())
        if isinstance(network, MHLAForCausalLM):
            network.backbone.checkpointing = self.training_options.checkpointing
        else:
            self.plain_head = examine(network, context)
            if self.training_options.checkpointing:
                network.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        self.tokenizer: Any = None
        self._tokenizer_files: PackedFiles = {}
        self.sums = nn.ModuleDict({"val": TextSums(), "test": TextSums()})
        self._batch_weights: list[Tensor] = []  # of the batches whose gradients are accumulated

    def sampling_settings(self) -> dict[str, Any]:
        """Return the sampling settings to save with the network, by their names in transformers.

        They are the generation options given to :meth:`take`, so that the commands ``generate`` and ``chat`` and an exported
        model sample in the same way as ``predict``. ``max_new_tokens`` and ``control_tokens`` are left out, because they do
        not affect the choice of tokens.
        """
        unset = dict.fromkeys(("temperature", "top_k", "top_p"))  # those of an earlier configuration
        return {**unset, **self.generation.sampling()}

    @property
    @override
    def usage(self) -> dict[str, str]:
        generate = {"Continue a text": 'lightning generate {folder} "PROMPT"'}
        chat = {"Talk to it": "lightning chat {folder}"}
        is_chat_model = self.tokenizer is not None and self.tokenizer.chat_template
        return {**chat, **generate} if is_chat_model else {**generate, **chat}

    @override
    def layers(self) -> list[nn.Module]:
        return repeated_layers(self.network)

    @override
    def prediction_callbacks(self) -> list[Callback]:
        return [ContinuationFile()]

    def setup(self, stage: str) -> None:
        """Check that the network, the data and the Trainer's options are compatible, and adopt the tokenizer of the data.

        The tokenizer is not adopted for ``predict``, because there it comes from the checkpoint.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.

        Raises:
            ValueError: if the vocabulary of the data is larger than that of the model, the data has questions in more than 256
                groups with separate accuracies, or packed documents, sequence parallelism or generation are required but not
                supported.
        """
        super().setup(stage)
        if stage == "fit":
            warn_of_untrained_far_attention(self.network, self.context)
        data = self.trainer.datamodule  # type: ignore[attr-defined]  # set when the data is attached
        requirements = {
            "cu_seqlens": getattr(data, "separate_documents", False),
            "share": self.sequence_group is not None,
            "state": stage == "predict"
            or any(isinstance(callback, TextSamples) for callback in self.trainer.callbacks),  # type: ignore[attr-defined]
        }
        self._require(*(name for name, required in requirements.items() if required))
        groups = getattr(data, "groups", ())
        if len(groups) > MOST:
            raise ValueError(
                f"the data has {len(groups)} groups of questions, but at most {MOST} can be counted; use fewer"
            )
        data_vocab_size = getattr(data, "vocab_size", 0)
        if groups and data_vocab_size > self.network.config.vocab_size:
            raise ValueError(
                f"the data has vocab_size={data_vocab_size}, the model {self.network.config.vocab_size}; give both the same "
                "(--model.vocab_size, --data.vocab_size)"
            )
        if groups and self.sequence_group is not None:
            raise ValueError("sequences with questions are not spread over processes; set sequence_parallel_size: 1")
        if stage == "fit":
            self._warn_of_unused_tokens()
        if stage != "predict":  # for predict the checkpoint holds the tokenizer, and the training data may be missing
            self._use_tokenizer_of_data()

    def _require(self, *names: str) -> None:
        """Raise ValueError if the network does not support one of the named features.

        Args:
            names: one or more of ``cu_seqlens`` (packed documents), ``share`` (sequence parallelism) and ``state``
                (generation).
        """
        if isinstance(self.network, MHLAForCausalLM):
            for layer in self.network.backbone.layers:
                layer.attn.require(*names)
        elif unsupported := sorted({"cu_seqlens", "share"}.intersection(names)):
            raise ValueError(f"network {type(self.network).__name__} {UNHANDLED[unsupported[0]]}")

    def on_predict_start(self) -> None:
        """Use the tokenizer of the data module if the checkpoint did not supply one.

        Raises:
            ValueError: if sequence parallelism is enabled, which ``predict`` does not support.
        """
        if self.sequence_group is not None:
            raise ValueError("prompts are not spread over processes; leave sequence_parallel_size out for predict")
        if self.tokenizer is None:
            self._use_tokenizer_of_data()

    def _use_tokenizer_of_data(self) -> None:
        tokenizer = getattr(self.trainer.datamodule, "tokenizer", None)  # type: ignore[attr-defined]
        if tokenizer is not None:
            self.use_tokenizer(tokenizer)

    def _warn_of_unused_tokens(self) -> None:
        tokenizer, size = getattr(self.trainer.datamodule, "tokenizer", None), self.network.config.vocab_size  # type: ignore[attr-defined]
        if tokenizer is not None and (needed := needed_vocab_size(tokenizer)) < size // 2:
            log.warning(
                "the tokenizer needs vocab_size=%d, the model has vocab_size=%d: most of its embedding is never used; set "
                "--model.vocab_size=%d", needed, size, needed,
            )  # fmt: skip

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Set the tokenizer of the model, and copy the indices of its special tokens to the model's configuration.

        Generated texts end at the tokenizer's end token, and at the token that ends a reply in its chat template.

        Checkpoints that are saved later include the tokenizer.

        Args:
            tokenizer: tokenizer from the transformers library.

        Raises:
            ValueError: if the vocabulary of the tokenizer is larger than that of the model.
        """
        config, needed = self.network.config, needed_vocab_size(tokenizer)
        if needed > config.vocab_size:
            raise ValueError(
                f"the tokenizer needs vocab_size={needed}, the model has vocab_size={config.vocab_size}; set "
                f"--model.vocab_size={needed} or use the model's own tokenizer"
            )
        self.tokenizer, self._tokenizer_files = tokenizer, pack_tokenizer(tokenizer)
        for name in SPECIAL_TOKENS:
            token = getattr(tokenizer, name)
            for settings in (config, self.network.generation_config):
                present = getattr(settings, name, None)
                if not (isinstance(present, list) and token in present):  # keep a list of several end tokens
                    setattr(settings, name, token)
        if ends := reply_end_tokens(tokenizer):  # a text generated by a chat model ends where its reply does
            generation = self.network.generation_config
            listed = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
            generation.eos_token_id = sorted({*listed, *ends} - {None})

    def forward(self, input_ids: Tensor) -> Tensor:
        """Compute next-token logits, ``[B, N, vocab_size]``, for token indices, ``[B, N]`` int64."""
        return self.network(input_ids).logits

    def on_train_epoch_start(self) -> None:
        """Discard the loss weights of batches in the previous epoch whose gradients did not lead to an optimizer step."""
        self._batch_weights = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Compute and log the mean cross-entropy of predicting the next token, in nats.

        Args:
            batch: dict with the entries that :func:`inputs_and_targets` reads.
            batch_idx: ignored.

        Returns:
            Scalar loss for the backward pass. Under sequence parallelism or with ``target_mask``, processes may have different
            numbers of targets, so the loss is multiplied by this process's number of targets and divided by the mean number
            per process. With ``target_mask`` and gradient accumulation, it is also multiplied by a weight proportional to the
            number of targets of all processes.
        """
        share = self._share(batch)
        loss = self._losses(batch, "mean", share)
        if "target_mask" in batch:
            loss, count = self._balanced(loss, self._targets(batch, share))
            # `loss` is weighted such that its average over the processes is the mean over all targets.
            mean = loss.detach().clone()
            if self.trainer.world_size > 1:
                torch.distributed.all_reduce(mean)
            self.log_loss(mean / self.trainer.world_size, len(batch["tokens"]))
            return self._weighted_in_step(loss, count / self.context)  # near 1, which suits float16
        if share is not None:
            loss = loss * share.weight  # gradients are averaged over processes, whose numbers of tokens may differ
        self.log_loss(loss if share is None else share.mean(loss), len(batch["tokens"]))
        return loss

    def _weighted_in_step(self, loss: Tensor, weight: Tensor) -> Tensor:
        """Multiply the loss by a weight if gradients are accumulated; otherwise return the loss unchanged.

        :meth:`on_before_optimizer_step` later divides the accumulated gradients by the mean weight.

        Args:
            loss: loss of one of the batches whose gradients are accumulated, a scalar.
            weight: weight of the batch, a scalar.
        """
        if self.trainer.accumulate_grad_batches == 1:
            return loss
        self._batch_weights.append(weight)
        return loss * weight

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Divide accumulated gradients by the mean weight of their batches, so that all targets of a step count equally.

        The loss of each batch was multiplied by the weight of the batch, which is proportional to its number of targets.
        Lightning has already divided the gradients by ``accumulate_grad_batches``.
        """
        weights, self._batch_weights = self._batch_weights, []
        if weights and (total := torch.stack(weights).sum()):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(self.trainer.accumulate_grad_batches / total)

    def _balanced(self, loss: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Weight the loss by the number of targets of this process, because processes may have different numbers of targets.

        Args:
            loss: mean over the targets of this process, a scalar.
            targets: targets of this process, ``[B, N]`` int64; -100 is ignored.

        Returns:
            A tuple of two values:

            * The weighted loss, a scalar. Its average over the processes is the mean over the targets of all processes.
            * The number of targets of all processes, a float32 scalar.
        """
        local = (targets != IGNORED).sum().float()
        if self.trainer.world_size == 1:
            return loss, local
        total = local.clone()
        torch.distributed.all_reduce(total)
        return loss * local * self.trainer.world_size / total.clamp(min=1), total

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add the losses of a batch to the validation metrics; if it has the entry ``labels``, also count correct predictions.

        Args:
            batch: dict with the entries that :func:`inputs_and_targets` reads, and ``valid``, ``[B]`` bool, which is False for
                rows that only fill up the batch. With ``labels``, it also has ``group``, the index of each row's group of
                questions, ``[B]`` int64; otherwise ``bytes``, the number of bytes of text in each row, ``[B]`` int64.
            batch_idx: ignored.
        """
        self._evaluate(batch, "val")

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add the losses of a batch to the test metrics; if it has the entry ``labels``, also count correct predictions.

        Args:
            batch: dict with the same entries as for :meth:`validation_step`.
            batch_idx: ignored.
        """
        self._evaluate(batch, "test")

    def on_validation_epoch_end(self) -> None:
        """Log the validation loss, perplexity and, where they apply, bits per byte and accuracies, and reset the sums."""
        self._log_sums("val")

    def on_test_epoch_end(self) -> None:
        """Log the test loss, perplexity and, where they apply, bits per byte and accuracies, and reset the sums."""
        self._log_sums("test")

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> list[tuple[int, str, str]]:
        """Generate a continuation of each prompt in a batch.

        Args:
            batch: dict with ``prompt``, a list of B texts; ``index``, their B indices in the prompt file; and ``valid``,
                ``[B]`` bool, which is False for rows that only fill up the batch.
            batch_idx: ignored.

        Returns:
            A list of tuples of the prompt's index in the prompt file, the prompt, and its continuation. Rows that only fill up
            the batch are omitted.
        """
        rows = [row for row, valid in enumerate(batch["valid"].tolist()) if valid]
        prompts = [batch["prompt"][row] for row in rows]
        texts = self.continue_prompts(prompts) if prompts else []
        return list(zip((int(batch["index"][row]) for row in rows), prompts, texts, strict=True))

    def continue_prompts(self, prompts: list[str]) -> list[str]:
        """Generate a continuation of each prompt, with the generation options of this module.

        Args:
            prompts: texts to continue.

        Returns:
            The continuations without their prompts, in the same order.

        Raises:
            ValueError: if the model has no tokenizer, or a prompt is empty or too long.
        """
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer; name the data it was trained on (--data), or train it again")
        ids, mask = (x.to(self.device) for x in left_padded(self.tokenizer, prompts, self.generation.control_tokens))
        options = {"pad_token_id": pad_token(self.tokenizer), **self.continuation_options()}
        tokens = generate_tokens(self.network, ids, mask, **options)
        return self.tokenizer.batch_decode(tokens[:, ids.shape[1] :], skip_special_tokens=True)

    def continuation_options(self) -> dict[str, Any]:
        """Return the keyword arguments that ``predict`` passes to transformers' ``generate`` to continue prompts."""
        return self.generation.for_generate()

    @property
    def flops_per_token(self) -> float:
        """Number of floating-point operations in the forward and backward passes for one token.

        The backward pass counts as two forward passes (arXiv 2204.02311, appendix B). For transformers models, only
        multiplications by weight matrices are counted.
        """
        if not isinstance(self.network, MHLAForCausalLM):
            return training_flops(self.network)
        layers = self.network.backbone.layers
        matrices = sum(p.numel() for layer in layers for p in layer.mlp.parameters() if p.dim() == 2)
        matrices += self.network.head.weight.numel()
        attention = sum(layer.attn.flops(self.context) for layer in layers) / self.context
        return 3 * (2.0 * matrices + attention)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the tokenizer's files to the checkpoint, under the key ``tokenizer``."""
        if self._tokenizer_files:
            checkpoint["tokenizer"] = self._tokenizer_files

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the tokenizer and the training state from a checkpoint.

        Raises:
            ValueError: if the tokenizer of the data differs from the one in the checkpoint.
        """
        super().on_load_checkpoint(checkpoint)
        if "tokenizer" not in checkpoint:
            return
        saved_tokenizer = unpack_tokenizer(checkpoint["tokenizer"])
        if self.tokenizer is not None and fingerprint(self.tokenizer) != fingerprint(saved_tokenizer):
            raise ValueError(
                "the checkpoint was trained with a different tokenizer than the data's, so its tokens mean different text; "
                "use the data (and for PythonSource the Python version) that it was trained on"
            )
        self.use_tokenizer(saved_tokenizer)

    def _evaluate(self, batch: dict[str, Any], stage: Stage) -> None:
        if "labels" in batch:
            self._question(batch, stage)
            return
        share, valid = self._share(batch), batch["valid"]
        losses = self._losses(batch, "none", share).view(len(valid), -1)[valid]
        tokens = (self._targets(batch, share)[valid] != IGNORED).sum()
        first = share is None or share.start == 0  # one of the processes that share a sequence counts its bytes
        sums = {"nats": losses.double().sum(), "tokens": tokens, "bytes": batch["bytes"][valid].sum() * first}
        self._sums(stage).add(**sums, samples=valid.sum() * first)

    def _question(self, batch: dict[str, Any], stage: Stage) -> None:
        """Add the losses and the correct predictions of a batch with labels to the metrics of a stage.

        Args:
            batch: dict with the entries that :meth:`validation_step` describes, including ``labels``.
            stage: ``"val"`` or ``"test"``.
        """
        predicted = (batch["labels"] != IGNORED) & batch["valid"][:, None]
        targets = batch["labels"][predicted]
        scores = self.network(batch["tokens"]).logits[predicted].float()
        groups = batch["group"][:, None].expand(predicted.shape)[predicted]
        nats = F.cross_entropy(scores, targets, reduction="sum")
        self._sums(stage).add(nats=nats, tokens=len(targets), bytes=0, samples=batch["valid"].sum())
        self._sums(stage).answers.update(scores.argmax(-1) == targets, groups)

    def _share(self, batch: dict[str, Any]) -> SequenceShare | None:
        """Return the part of each sequence that this process computes; None if sequence parallelism is off.

        The tensors of ``batch`` are overwritten with those of the first process, so that all processes hold parts of the same
        sequences.
        """
        group = self.sequence_group
        if group is None:
            return None
        assert isinstance(self.network, MHLAForCausalLM)  # setup() rejects others
        # N + 1 tokens make N inputs. agree() copies the first process's batch, so that all hold parts of the same sequences.
        share = self.network.backbone.share(group, batch["tokens"].shape[1] - 1)
        share.agree(*(value for value in batch.values() if isinstance(value, Tensor)))
        return share

    def _targets(self, batch: dict[str, Any], share: SequenceShare | None) -> Tensor:
        """Return the target tokens for which this process computes losses, ``[B, N]`` int64; -100 is ignored.

        Args:
            batch: batch with the entries that :func:`inputs_and_targets` reads.
            share: part of each sequence that this process computes; None for complete sequences.
        """
        _, targets = inputs_and_targets(batch)
        return targets if share is None else share.of(targets)

    def _losses(self, batch: dict[str, Any], reduction: Literal["mean", "none"], share: SequenceShare | None) -> Tensor:
        inputs, targets = inputs_and_targets(batch)
        bounds = batch.get("cu_seqlens")
        if share is not None:
            if bounds is not None:
                raise ValueError(
                    "documents that are packed (separate_documents: true) cannot be spread over processes; set "
                    "--data.separate_documents=false, or sequence_parallel_size: 1"
                )
            inputs, targets = share.of(inputs), share.of(targets)
        if bounds is not None:
            inputs, targets = inputs.reshape(1, -1), targets.reshape(1, -1)
        if not isinstance(self.network, MHLAForCausalLM):
            return network_loss(self.network, inputs, targets, reduction == "mean", self.plain_head)
        options: dict[str, Any] = {"shift_labels": targets, "cu_seqlens": bounds, "loss_reduction": reduction}
        return self.network(inputs, share=share, **options).loss

    def _sums(self, stage: Stage) -> TextSums:
        return cast(TextSums, self.sums[stage])

    def _log_sums(self, stage: Stage) -> None:
        sums = self._sums(stage)
        is_trial = self.trainer.sanity_checking or self.trainer.fast_dev_run  # type: ignore[attr-defined]
        if is_trial and not sums.compute()["tokens"]:  # the few batches of a trial may have no token that counts
            sums.reset()
            return
        groups = getattr(self.trainer.datamodule, "groups", ())  # type: ignore[attr-defined]
        for name, value in sums.take(stage, groups).items():
            self.log(f"{stage}/{name}", value, prog_bar=name in ("bits_per_byte", "accuracy"), sync_dist=True)


def inputs_and_targets(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Split a batch into input tokens and the target of each token.

    Args:
        batch: dict with the entry ``tokens``. If it also has ``labels``, both are ``[B, N]`` int64, and the labels are the
            targets. Otherwise ``tokens`` is ``[B, N + 1]`` int64, and the target of each token is the token that follows it.
            Without ``labels``, the optional entry ``target_mask``, ``[B, N]`` bool, is False for targets that the loss does not
            count.

    Returns:
        Input tokens and targets, each ``[B, N]`` int64. Targets that the loss does not count are -100.
    """
    if "labels" in batch:
        return batch["tokens"], batch["labels"]
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    if "target_mask" in batch:
        targets = targets.masked_fill(~batch["target_mask"], IGNORED)
    return inputs, targets
