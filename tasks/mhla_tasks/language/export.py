"""Language models from checkpoints of training and from exported folders, and the export itself.

An exported folder holds weights in safetensors, configuration, tokenizer, and a module of one line that names the model's
class: ``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`` loads it wherever lightning-mhla is installed.
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
from mhla_tasks.language.linearized import LinearizedModel
from mhla_tasks.language.model import MHLAForCausalLM
from mhla_tasks.language.module import LanguageModel
from mhla_tasks.language.tokenizer import load_tokenizer, save_tokenizer

OPTIONS = ("tokenizer", "context")

REPLACED = (
    "chat_template.jinja", "chat_template.json", "additional_chat_templates", "tokenizer.json", "tokenizer_config.json",
    "added_tokens.json", "special_tokens_map.json", "modeling_mhla.py", "modeling_swapped.py",
)  # fmt: skip
"""Files and folders of an earlier export, which transformers would read as parts of this one."""

LOADING = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("FOLDER")"""
"""Python that loads an export, FOLDER being its path."""


def loading(model: CausalLanguageModel) -> str:
    """Python that loads the export of ``model``: the same for a linearised one."""
    return LOADING


def load_checkpoint(path: str | Path, live: bool = False) -> CausalLanguageModel:
    """The language model of a checkpoint that training wrote, without running any code from it.

    Args:
        path: file.
        live: the weights as they were trained, where the checkpoint also has their moving average.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when it holds no language model, or cannot be read safely.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} does not exist; give a checkpoint of training, or an exported folder")
    memory = read_header(resolve_checkpoint(Path(path))).get("hyper_parameters") or {}
    kind: type[CausalLanguageModel] = LinearizedModel if accepts(LinearizedModel, memory) else LanguageModel
    return load_module(kind, path, live)


def load_model(path: str | Path, tokenizer: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a checkpoint of training, an exported folder, or a name on the hub.

    Args:
        path: path of the model.
        tokenizer: folder of the tokenizer or a model on the hub, in place of the model's own.

    Raises:
        FileNotFoundError: when there is no such model or no tokenizer with it.
        ValueError: when it is no causal language model.
    """
    own: Any = None
    if Path(path).is_dir() and (Path(path) / "config.json").exists():
        load = load_swapped if is_swapped(path) else AutoModelForCausalLM.from_pretrained
        model = load(str(path))
    elif Path(path).exists() or Path(path).suffix == ".ckpt":
        module = load_checkpoint(path)
        model, own = module.network, module.tokenizer
    else:
        try:
            model = AutoModelForCausalLM.from_pretrained(str(path), trust_remote_code=False)
        except OSError as error:
            raise FileNotFoundError(f"{path} is no checkpoint, no exported folder and no model on the hub") from error
    if tokenizer is not None or own is None:
        own = load_tokenizer(tokenizer or path)
    return model.eval(), own


def export(model: CausalLanguageModel, folder: Path) -> None:
    """Write model and tokenizer as transformers keeps them.

    Raises:
        ValueError: when the model has no tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError("the checkpoint keeps no tokenizer, and a model without one cannot be scored; name it")
    merge_adapters(model.network)
    model.network.save_pretrained(folder)
    save_tokenizer(model.tokenizer, folder)


def write(model: CausalLanguageModel, folder: Path, tokenizer: str | None = None, context: int | None = None) -> None:
    """Write model and tokenizer.

    Args:
        model: the trained model.
        folder: folder to write to.
        tokenizer: folder or name on the hub, in place of the model's own.
        context: tokens that the model is extended to first.

    Raises:
        ValueError: for a context where there are no mixing coefficients, and as for :func:`export`.
    """
    if tokenizer:
        model.use_tokenizer(load_tokenizer(tokenizer))
    if context:
        if not isinstance(model.network, MHLAForCausalLM):
            raise ValueError(
                f"--context extends mixing coefficients, which a {type(model.network).__name__} has none of"
            )
        model.network.extend(context)
    export(model, folder)
