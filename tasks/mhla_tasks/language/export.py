"""Loading of language models from checkpoints and exported folders, and export to the format of transformers.

An exported folder holds weights in safetensors, configuration, tokenizer, and a short module that imports the model's class.
``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`` loads it where lightning-mhla is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from lightning_mhla.checkpoints.io import read_header, resolve_checkpoint
from lightning_mhla.swap import is_swapped, load_swapped
from lightning_mhla.swap.adapters import merge_adapters
from lightning_mhla.training.loading import accepts, load_module
from mhla_tasks.language.causal import CausalLanguageModel
from mhla_tasks.language.encoder import LinearizedTextEncoder
from mhla_tasks.language.linearized import LinearizedModel
from mhla_tasks.language.model import MHLAForCausalLM
from mhla_tasks.language.module import LanguageModel
from mhla_tasks.language.tokenizer import load_tokenizer, save_tokenizer
from mhla_tasks.language.vocabularies import pretrained_tokenizer, vocabulary_conflict

OPTIONS = ("tokenizer", "context")
"""Names of the options of :func:`write`."""

REPLACED = (
    "chat_template.jinja", "chat_template.json", "additional_chat_templates", "tokenizer.json", "tokenizer_config.json",
    "added_tokens.json", "special_tokens_map.json", "modeling_mhla.py", "modeling_swapped.py",
)  # fmt: skip
"""Files and folders that an export replaces, because transformers would read those of an earlier export as parts of it."""

LOADING = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)"""
"""Python code that loads an export, where FOLDER is its path."""


def loading(model: CausalLanguageModel | LinearizedTextEncoder) -> str:
    """Return Python code that loads an exported model, for its model card; the code contains FOLDER in place of the path."""
    return LOADING.replace("ForCausalLM", "") if isinstance(model, LinearizedTextEncoder) else LOADING


def load_checkpoint(path: str | Path, live: bool = False) -> CausalLanguageModel:
    """Load the language model of a training checkpoint, without running any code from it.

    Args:
        path: path of a checkpoint, or of a run's folder, whose latest checkpoint is loaded.
        live: whether to load the trained weights instead of their moving average, if the checkpoint has both.

    Raises:
        FileNotFoundError: if the path does not exist, or is a folder without a checkpoint.
        ValueError: if the checkpoint does not hold a language model, or cannot be read safely.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} does not exist; give a checkpoint of training, or an exported folder")
    memory = read_header(resolve_checkpoint(Path(path))).get("hyper_parameters") or {}
    kind: type[CausalLanguageModel] = LinearizedModel if accepts(LinearizedModel, memory) else LanguageModel
    return load_module(kind, path, live)


def load_model(path: str | Path, tokenizer: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer.

    Args:
        path: path of a training checkpoint, of a run's folder (for its latest checkpoint) or of an exported folder, or name of
            a model on the Hugging Face Hub.
        tokenizer: folder of a tokenizer, or name of a model on the Hugging Face Hub; None for the model's own tokenizer.

    Returns:
        The model, in evaluation mode, and the tokenizer.

    Raises:
        FileNotFoundError: if there is no such model, or it has no tokenizer.
        ValueError: if the model is not a causal language model, or was trained with a different tokenizer.
    """
    model_tokenizer: Any = None
    if Path(path).is_dir() and (Path(path) / "config.json").exists():
        load = load_swapped if is_swapped(path) else AutoModelForCausalLM.from_pretrained
        model = load(str(path))
    elif Path(path).exists() or Path(path).suffix == ".ckpt":
        module = load_checkpoint(path)
        model, model_tokenizer = module.network, module.tokenizer
    else:
        try:
            model = AutoModelForCausalLM.from_pretrained(str(path), trust_remote_code=False)
        except OSError as error:
            raise FileNotFoundError(f"{path} is not a checkpoint, an exported folder or a model on the hub") from error
    if tokenizer is not None:
        original = pretrained_tokenizer(str(path)) if model_tokenizer is None else model_tokenizer
        model_tokenizer = _load_replacement(tokenizer, original)
    elif model_tokenizer is None:
        model_tokenizer = load_tokenizer(path)
    return model.eval(), model_tokenizer


def _load_replacement(name: str, original: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """Load a tokenizer that replaces the one that a model was trained with, such as one with a chat template.

    Args:
        name: folder of the tokenizer, or name of a model on the Hugging Face Hub.
        original: tokenizer of the model; None if it is unknown.

    Raises:
        ValueError: if a token of the model stands for different text in the new tokenizer.
    """
    tokenizer = load_tokenizer(name)
    if original is not None and (conflict := vocabulary_conflict(original, tokenizer)):
        raise ValueError(
            f"{name} is not a tokenizer for this model, which was trained with a different one: {conflict}; leave the option "
            "out to use the model's own"
        )
    return tokenizer


def export(model: CausalLanguageModel, folder: Path) -> None:
    """Export a model and its tokenizer to a folder in the format of transformers.

    LoRA adapters are first merged into the weights of ``model``.

    Args:
        model: trained model.
        folder: path of the folder to write to.

    Raises:
        ValueError: if the model has no tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError("the checkpoint has no tokenizer, and a model without one cannot be scored; set --tokenizer")
    merge_adapters(model.network)
    model.network.save_pretrained(folder)
    save_tokenizer(model.tokenizer, folder)


def write(
    model: CausalLanguageModel | LinearizedTextEncoder,
    folder: Path,
    tokenizer: str | None = None,
    context: int | None = None,
) -> None:
    """Export a model, optionally with a different tokenizer or extended to a longer context.

    Args:
        model: trained model.
        folder: path of the folder to write to.
        tokenizer: folder of a tokenizer, or name of a model on the Hugging Face Hub; None for the model's own tokenizer.
        context: number of tokens that the model is extended to; None leaves it unchanged.

    Raises:
        ValueError: if ``context`` is given for a transformers model or a text encoder, which cannot be extended, if there is no
            tokenizer, or if the model was trained with a tokenizer that differs from ``tokenizer``.
    """
    if isinstance(model, LinearizedTextEncoder):
        _write_encoder(model, folder, tokenizer, context)
        return
    if tokenizer:
        model.use_tokenizer(_load_replacement(tokenizer, model.tokenizer))
    if context:
        if not isinstance(model.network, MHLAForCausalLM):
            raise ValueError(
                f"--context extends mixing coefficients, which a {type(model.network).__name__} does not have"
            )
        model.network.extend(context)
    export(model, folder)


def _write_encoder(encoder: LinearizedTextEncoder, folder: Path, tokenizer: str | None, context: int | None) -> None:
    if context:
        raise ValueError("--context extends mixing coefficients of language models, not those of encoders")
    merge_adapters(encoder.network)
    encoder.network.save_pretrained(folder)
    text_tokenizer = _load_replacement(tokenizer, encoder.tokenizer) if tokenizer else encoder.tokenizer
    if text_tokenizer is None:
        raise ValueError("the checkpoint has no tokenizer; set --tokenizer")
    save_tokenizer(text_tokenizer, folder)
