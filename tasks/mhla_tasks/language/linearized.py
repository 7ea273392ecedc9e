"""Linearization of language models: softmax attention is replaced, then two training stages restore the quality of the model.

The first ``distillation.layer_steps`` steps train each new layer to reproduce the output of the layer that it replaces
(attention transfer). Then the model is trained on text, in full or with low-rank adapters, after LoLCATs (arXiv 2410.10254,
section 3).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from typing_extensions import override

from lightning_mhla import AttentionConfig, swap_attention
from lightning_mhla.checkpoints.io import read_header, resolve_checkpoint
from lightning_mhla.swap import is_swapped, load_swapped
from lightning_mhla.swap.adapters import LoraOptions, TrainedPart, choose_trained
from lightning_mhla.swap.networks import describe, load_source, read_configuration
from lightning_mhla.system.hyperparameters import keep_plain
from lightning_mhla.system.lightning_private import saved_hyperparameters
from lightning_mhla.system.options import as_dataclass
from lightning_mhla.system.untrusted import reason
from lightning_mhla.training.linearize import DistilledLinearization, ScoringHost, TransferOptions
from lightning_mhla.training.options import TrainingOptions
from mhla_tasks.language.causal import SPECIAL_TOKENS, CausalLanguageModel, inputs_and_targets
from mhla_tasks.language.loss import logits_cross_entropy
from mhla_tasks.language.networks import build_network
from mhla_tasks.language.prompts import GenerationOptions, sampling_options
from mhla_tasks.language.vocabularies import check_vocabulary

WINDOW = AttentionConfig(
    kind="mhla_window",
    block_size=128,
    mixing="exponential",
    feature_map="learned",
    options={"sinks": 4, "far_init": -4.0, "feature_positions": 1},
)
"""Default replacement of softmax attention. Sinks keep softmax attention to the first tokens, which trained models rely on.
Untrained features approximate the attention to distant tokens poorly, so these tokens start with a low weight."""


class LinearizedModel(CausalLanguageModel):
    """Transformers causal language model with replaced attention, trained to restore the original quality.

    Args:
        pretrained: model to start from: an exported folder, a name on the Hugging Face Hub, or a checkpoint of this class, or
            of LanguageModel if its option network was set. The folder of a run stands for its latest checkpoint. null requires
            --ckpt_path. The weights are not read if --ckpt_path supplies them.
        attention: options of the new attention. Rotary embeddings and the norms of queries and keys remain those of the
            original model.
        layer_kinds: pattern of attention kinds that repeats over all layers; the number of layers must be a multiple of its
            length. "keep" leaves the attention of a layer unchanged, and "replace" uses attention.kind. null replaces the
            attention of all layers.
        train: parameters to train after the first distillation.layer_steps steps: "all"; "attention" for the new attention
            layers with their projections; "new" for only the parameters that the replacement added; or "lora" for these
            parameters and LoRA adapters of the projections.
        lora: rank, alpha and dropout of the LoRA adapters.
        distillation: options of the two training stages, layer matching and distillation; see TransferOptions.
        context: number of tokens in a training sample.
        generation: options for continuing prompts with the predict command. With the defaults of temperature, top_k, top_p and
            beams, tokens are sampled with the settings of the original model.
        network: configuration of the model, which is read from pretrained; do not set it.
        training: options of the optimizer, the moving average of the weights, activation checkpointing and compilation.

    Raises:
        FileNotFoundError: if there is no model at ``pretrained``.
        ValueError: if neither ``pretrained`` nor a checkpoint supplies the model, if the model is not a causal language model
            of transformers, or if its attention cannot be replaced as requested.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        attention: AttentionConfig = WINDOW,
        layer_kinds: list[str] | None = None,
        train: TrainedPart = "all",
        lora: LoraOptions = LoraOptions(),
        distillation: TransferOptions = TransferOptions(),
        context: int = 2048,
        generation: GenerationOptions = GenerationOptions(),
        network: dict[str, Any] | None = None,
        training: TrainingOptions = TrainingOptions(),
    ) -> None:
        super().__init__(training)
        if network is None:
            if pretrained is None:
                raise ValueError("name the model to linearize: --model.pretrained=FOLDER_OR_NAME")
            network = source_network(pretrained)
        self.save_hyperparameters(ignore=["pretrained"])
        # Checkpoints must load where `pretrained` no longer exists, so they hold the configuration that was read from it.
        for saved in saved_hyperparameters(self):
            saved["network"] = network
        keep_plain(self)
        self._pretrained = pretrained
        self.distillation = as_dataclass(TransferOptions, distillation)
        self.linearization = DistilledLinearization(
            self.distillation, ScoringHost("train/text_loss", _run_layers, _scores)
        )
        model = build_network(network, dict(network["init_args"])["vocab_size"])
        swap_attention(model, as_dataclass(AttentionConfig, attention), layer_kinds=layer_kinds)
        self.take(model, context, as_dataclass(GenerationOptions, generation))
        choose_trained(model, train, as_dataclass(LoraOptions, lora))

    @override
    def sampling_settings(self) -> dict[str, Any]:
        """Return the sampling settings to save with the network, by their names in transformers.

        They are those of the option ``generation``. The result is empty if all of them have their default values. The network
        then keeps the settings of the original model.
        """
        return {} if self.generation.sampling() == GenerationOptions().sampling() else super().sampling_settings()

    @override
    def continuation_options(self) -> dict[str, Any]:
        if self.sampling_settings():
            return super().continuation_options()
        options = sampling_options(self.network.generation_config, {})
        return replace(self.generation, **options).for_generate()

    @override
    def use_tokenizer(self, tokenizer: Any) -> None:
        """Set the tokenizer, but keep the special tokens that the configuration of the original model already defines.

        Args:
            tokenizer: a transformers tokenizer.
        """
        network = dict(self.hparams["network"])
        named = (network.get("init_args") or {}, network.get("generation_config") or {})
        settings = (self.network.config, self.network.generation_config)
        defined_tokens = [
            (setting, name, getattr(setting, name))
            for setting, names in zip(settings, named, strict=True)
            for name in SPECIAL_TOKENS
            if names.get(name) is not None
        ]
        super().use_tokenizer(tokenizer)
        for setting, name, token in defined_tokens:
            setattr(setting, name, token)

    @override
    def start_from(self, pretrained: str) -> None:
        check_vocabulary(self.tokenizer, pretrained)
        load_source(self.network, pretrained, AutoModelForCausalLM)

    def on_fit_start(self) -> None:
        """Prepare the training stages that the option ``distillation`` requests.

        If ``distillation.layer_steps`` is positive, check that each replacement layer can be trained to match the original
        layer. If ``distillation.teacher`` names a model, load it as the teacher.

        Raises:
            ValueError: if a layer cannot be trained to match the original layer, or the teacher cannot be used.
            FileNotFoundError: if the teacher does not exist.
        """
        self.linearization.start(self, read_source)

    @override
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Compute the loss of a batch for the current training stage, as a scalar.

        In the first stage, the loss compares the output of each new layer with that of the layer that it replaces. In the
        second stage, the loss is the cross-entropy of the next token in nats. If there is a teacher model, the loss is instead
        a sum of this cross-entropy and the divergence from the teacher's predictions, with the weights in ``distillation``.

        Args:
            batch: dict with the entries that :func:`inputs_and_targets` reads, such as ``tokens``.
            batch_idx: ignored.
        """
        inputs, targets = inputs_and_targets(batch)
        if self.linearization.matches_layers(self):
            return self.linearization.layer_loss(self, inputs)
        if self.linearization.teacher is None:
            return super().training_step(batch, batch_idx)
        scores = _scores(self.network, inputs)
        plain = logits_cross_entropy(scores.flatten(0, 1), targets.flatten())
        if "target_mask" not in batch:
            return self.linearization.distilled_loss(self, plain, scores, inputs)
        plain, count = self._balanced(plain, targets)
        loss = self.linearization.distilled_loss(self, plain, scores, inputs)
        return self._weighted_in_step(loss, count / self.context)


def _run_layers(network: Any, inputs: Tensor) -> None:
    network.base_model(inputs, use_cache=False)


def _scores(network: Any, inputs: Tensor) -> Tensor:
    scores: Tensor = network(inputs, use_cache=False).logits
    return scores


def read_source(path: str) -> PreTrainedModel:
    """Load a causal language model that is based on the transformers library, with weights in float32.

    Args:
        path: path of a checkpoint, of a run's folder (for its latest checkpoint) or of an exported folder, or name of a model
            on the Hugging Face Hub.

    Raises:
        FileNotFoundError: if there is no such model.
        ValueError: if the model is not a causal transformers language model or is quantized, or if the names or shapes of its
            weights do not match its configuration.
    """
    if is_swapped(path):
        swapped: PreTrainedModel = load_swapped(path, torch.float32)
        return swapped
    network = source_network(path)
    model = build_network(network, network["init_args"]["vocab_size"])
    load_source(model, path, AutoModelForCausalLM)
    return model


def source_network(pretrained: str) -> dict[str, Any]:
    """Read the configuration of a transformers model as a dict, from which :func:`build_network` can build the model.

    Args:
        pretrained: path of a checkpoint, of a run's folder (for its latest checkpoint) or of an exported folder, or name of a
            model on the Hugging Face Hub.

    Returns:
        A dict with these entries:

        * ``class_path``: name of the configuration class, such as ``transformers.LlamaConfig``.
        * ``init_args``: options of the configuration.
        * ``extra`` (optional): entries of ``config.json`` that the class does not know.
        * ``generation_config`` (optional): generation settings.

    Raises:
        FileNotFoundError: if there is no such model.
        ValueError: if the checkpoint holds a model that is not from transformers, or the model is quantized.
    """
    path = Path(pretrained)
    if path.exists() and not (path / "config.json").is_file():
        memory = read_header(resolve_checkpoint(path)).get("hyper_parameters") or {}
        stored_network = memory.get("network")
        if stored_network is None:
            raise ValueError(
                f"{pretrained} does not hold a transformers model; to replace softmax layers of an MHLA language model, set "
                "--model.attention.kind and --model.pretrained of LanguageModel"
            )
        options = {"vocab_size": memory.get("vocab_size"), **(stored_network.get("init_args") or {})}
        return {**stored_network, "init_args": options}
    config = read_configuration(pretrained)
    network = describe(config, pretrained)
    network["init_args"] = {"vocab_size": config.vocab_size, **network["init_args"]}
    if generation := read_generation(pretrained):
        network["generation_config"] = generation
    return network


def read_generation(pretrained: str) -> dict[str, Any]:
    """Read the generation settings of a model, such as end tokens and sampling options.

    Published settings often have ``temperature`` without ``do_sample``. transformers does not save such settings, so
    ``do_sample`` is set for them.

    Args:
        pretrained: path of an exported folder, or name of a model on the Hugging Face Hub.

    Returns:
        The settings by name; empty if the model has none.

    Raises:
        ValueError: if settings contradict each other, or ``generation_config.json`` is not valid JSON.
    """
    file = Path(pretrained) / "generation_config.json"
    try:
        settings = GenerationConfig.from_pretrained(pretrained)
        try:
            settings.validate(strict=True)
        except ValueError:
            settings.do_sample = True
            settings.validate(strict=True)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and not file.exists():
            return {}
        raise ValueError(f"{file}: {reason(error)}; correct it, or remove the file") from error
    plain = settings.to_diff_dict()
    return {name: value for name, value in plain.items() if name != "transformers_version" and not name.startswith("_")}
