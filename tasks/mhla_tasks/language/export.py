"""Models from checkpoints of training and from exported folders, and the export itself.

    python -m mhla_tasks.language.export runs/stdlib/version_0/checkpoints/last.ckpt exported

writes a folder that ``AutoModelForCausalLM.from_pretrained("exported", trust_remote_code=True)`` loads wherever
lightning-mhla is installed: weights in safetensors, configuration, tokenizer, and a module of one line that names the
model's class. The weights are the moving average where the checkpoint has one.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from lightning_mhla.training.export import export_module, export_parser
from lightning_mhla.training.loading import load_module
from mhla_tasks.language.model import MHLAForCausalLM
from mhla_tasks.language.module import LanguageModel
from mhla_tasks.language.tokenizer import load_tokenizer


def load_checkpoint(path: str | Path, live: bool = False) -> LanguageModel:
    """The language model of a checkpoint that training wrote, without running any code from it.

    Args:
        path: file.
        live: the weights as they were trained, where the checkpoint also has their moving average.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when it holds no language model, or cannot be read safely.
    """
    return load_module(LanguageModel, path, live)


def load_model(path: str | Path, tokenizer: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a checkpoint of training, an exported folder, or a name on the hub.

    Args:
        path: where the model is.
        tokenizer: folder of the tokenizer or a model on the hub, in place of the model's own.

    Raises:
        FileNotFoundError: when there is no such model or no tokenizer with it.
        ValueError: when it is no causal language model.
    """
    own: Any = None
    if Path(path).is_dir() and (Path(path) / "config.json").exists():
        model = AutoModelForCausalLM.from_pretrained(str(path), trust_remote_code=False)
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


def export(model: LanguageModel, folder: Path) -> None:
    """Write model and tokenizer as transformers keeps them.

    Raises:
        ValueError: when the model has no tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError("the checkpoint keeps no tokenizer, and a model without one cannot be scored; name it")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.part-") as name:
        aside = Path(name)
        model.network.save_pretrained(aside)
        model.tokenizer.save_pretrained(aside)
        for path in sorted(aside.iterdir(), key=lambda path: path.name == "config.json"):  # what makes it a model last
            path.replace(folder / path.name)


def write(model: LanguageModel, args: argparse.Namespace) -> None:
    """Model and tokenizer, after the changes that the command line asks for."""
    if args.tokenizer:
        model.use_tokenizer(load_tokenizer(args.tokenizer))
    if args.context:
        if not isinstance(model.network, MHLAForCausalLM):
            raise ValueError(
                f"--context extends mixing coefficients, which a {type(model.network).__name__} has none of"
            )
        model.network.extend(args.context)
    export(model, args.folder)


def main() -> None:
    """Command line."""
    parser = export_parser("mhla_tasks.language.export", __doc__)
    parser.add_argument("--tokenizer", help="folder or name on the hub, in place of the checkpoint's own")
    parser.add_argument("--context", type=int, help="extend the model to so many tokens first")
    export_module(LanguageModel, parser, write)


if __name__ == "__main__":
    main()
