"""Command-line tools for trained models: export, import, consolidation, generation, chat and timm's scripts."""

from __future__ import annotations

import re
import runpy
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from mhla_tasks.commandline.console import harmless
from mhla_tasks.commandline.registry import Run, help_text, passes_on
from mhla_tasks.commandline.user_modules import add_allow


def _say(text: str) -> None:
    from rich.console import Console

    Console(soft_wrap=True).print(text, markup=False)


def export(parser: ArgumentParser) -> Run:
    """Export the trained model of a checkpoint to a folder that other libraries load.

        lightning export runs/mnist/version_0/checkpoints/last.ckpt exported

    How to load the folder depends on the task of the model. A classifier is loaded with ``VisionTransformer.from_pretrained``,
    and a class-to-image model (network, scheduler and VAE) with ``DiTPipeline.from_pretrained``. A text-to-image or video model
    is loaded with ``lightning_mhla.load_swapped`` or, if no layer was replaced, with diffusers' ``from_pretrained``. A language
    model is loaded with ``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)``. The option
    ``--model.pretrained=FOLDER`` of ``lightning fit`` starts training from the exported weights.

    The weights are the moving average if the checkpoint has one. LoRA adapters are merged into the weights that they adapt. The
    model card, ``README.md``, states data, configuration, metrics, versions, how to load the model, and the license.
    """
    parser.add_argument("checkpoint", type=Path, help="checkpoint file, or folder of a run")
    parser.add_argument("folder", type=Path, help="folder to write the model to")
    parser.add_argument("--live", action="store_true", help="export the trained weights, not their moving average")
    add_allow(parser)
    parser.add_argument(
        "--license", metavar="IDENTIFIER", help="license of the model for its card: apache-2.0, mit, ..."
    )
    language = parser.add_argument_group("language models")
    language.add_argument("--tokenizer", help="folder or hub name of a tokenizer that replaces that of the checkpoint")
    language.add_argument(
        "--context", type=int, help="context length in tokens to extend the model to before the export"
    )
    video = parser.add_argument_group("video models")
    video.add_argument("--adapters", type=Path, help="folder to write LoRA adapters to instead of merging them")

    def run(args: Namespace) -> None:
        from mhla_tasks.tools.export import write_export

        domain_options = {name: getattr(args, name) for name in ("tokenizer", "context", "adapters")}
        options = {name: value for name, value in domain_options.items() if value is not None}
        write_export(args.checkpoint, args.folder, args.live, options, args.license)
        written = sorted(path.name for path in args.folder.iterdir())
        _say(f"{harmless(str(args.folder))}: {', '.join(map(harmless, written))}")

    return run


def import_published(parser: ArgumentParser) -> Run:
    """Convert the Wan2.1-MHLA weights published by the paper's authors to a folder that this package loads.

        lightning import Wan_1300M_mhla.pth wan-mhla --block_grid 3 5 10

    The command writes ``config.json`` and the weights as safetensors. ``lightning_mhla.load_swapped`` and the option
    ``--model.pretrained`` read this format.
    """
    parser.add_argument("source", help="file of weights with the authors' parameter names")
    parser.add_argument("folder", type=Path, help="folder to write the model to")
    parser.add_argument(
        "--block_grid",
        type=int,
        nargs=3,
        default=(3, 5, 10),
        metavar=("FRAMES", "ROWS", "COLUMNS"),
        help="number of blocks along each axis (default: 3 5 10, as published)",
    )

    def run(args: Namespace) -> None:
        from lightning_mhla.system.files import rebuilt_folder
        from mhla_tasks.video.pretrained import load_published

        model = load_published(args.source, tuple(args.block_grid))
        with rebuilt_folder(args.folder) as aside:
            model.save_pretrained(aside)
        count = sum(parameter.numel() for parameter in model.parameters())
        _say(f"{count:,} parameters written to {harmless(str(args.folder))}")

    return run


def linearize(parser: ArgumentParser) -> Run:
    """Replace the attention of a pretrained model with linear attention, train it, and report the result.

        lightning linearize models/smollm2 smollm2-linear --train texts/ --val heldout/ --budget 2h
        lightning linearize sentence-transformers/all-MiniLM-L6-v2 minilm-linear --train train.jsonl --val val.jsonl
        lightning linearize facebook/dinov2-small dino-linear --train photos/train --val photos/val

    The source is a causal language model, a text encoder or an image encoder of transformers, or an image encoder of timm. It
    is a folder, a name on the Hugging Face Hub (for timm: timm:ARCHITECTURE, timm:OWNER/NAME or timm/NAME), a GGUF file, or an
    ONNX file of DINOv2. There are two training runs. The first matches each new layer to the original one. The second trains
    the replaced layers, or the parameters that --trained selects, to reproduce the predictions of the original model. Layers
    whose replacement would increase the loss most keep softmax attention. The best state of the second run is exported.

    Text data are text files, tables (.jsonl, .csv, ...) and folders of them. Image data are folders with subfolders of images,
    or shards. The numbers of steps are computed from the budget by timing a few steps. After an interruption, the same command
    resumes. Runs, curves and report.html are written to the working folder, and the model to the target folder.
    """
    parser.add_argument("source", help="folder of transformers or timm, .gguf or .onnx file, or name on the hub")
    parser.add_argument("target", type=Path, help="folder for the linearized model")
    parser.add_argument("--train", nargs="+", required=True, help="files or folders of training data")
    parser.add_argument("--val", nargs="+", required=True, help="files or folders of held-out data")
    parser.add_argument(
        "--budget",
        type=_seconds,
        default=1800.0,
        help="time of the training steps, such as 30m or 2h; validation and measurements take longer (default: 30m)",
    )
    parser.add_argument("--steps", type=int, nargs=2, metavar="N", help="steps of the two runs, in place of --budget")
    parser.add_argument("--keep", type=float, default=0.25, help="share of layers that keep softmax (default: 0.25)")
    parser.add_argument("--kind", default="mhla_window", help="kind of the new attention (default: mhla_window)")
    parser.add_argument(
        "--length",
        type=int,
        help="tokens of a sample, or pixels of a side (default: 1024, 512, or the model's limit; 224 pixels, or timm's size)",
    )
    parser.add_argument("--batch_size", type=int, help="samples in a batch (default: 4 for text generation, else 16)")
    parser.add_argument(
        "--block_size", type=int, help="tokens of a block (default: 128, 32), or blocks along a side (4)"
    )
    parser.add_argument(
        "--trained",
        choices=("all", "attention", "new", "lora"),
        default="attention",
        help="parameters that the second run trains (default: attention, the replaced layers with their projections)",
    )
    parser.add_argument(
        "--match_lr", type=float, help="learning rate of the first run (default: 0.03 for text generation, else 0.01)"
    )
    parser.add_argument(
        "--tune_lr", type=float, help="learning rate of the second run (default: 1e-4, 5e-5; 1e-5 for images)"
    )
    parser.add_argument("--val_batches", type=int, default=16, help="held-out batches of a validation (default: 16)")
    parser.add_argument("--precision", default="32-true", help="precision of the Trainer (default: 32-true)")
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu, ... (default: auto)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers (default: 0)")
    parser.add_argument("--work", type=Path, help="working folder (default: TARGET-work)")

    def run(args: Namespace) -> None:
        from mhla_tasks.tools.linearize.command import linearize as run_pipeline

        run_pipeline(args)

    return run


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if match is None or not float(match[1]):
        raise ArgumentTypeError(f"{text!r} is not a time such as 90s, 30m or 2h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def consolidate(parser: ArgumentParser) -> Run:
    """Convert a sharded checkpoint to a single file, in the format that training in one process writes.

        lightning consolidate runs/NAME/checkpoints/recovery/step=00001000.ckpt whole.ckpt

    The source is the folder of a sharded checkpoint, written by any number of processes, or the folder of a run, whose latest
    complete checkpoint is converted. Training resumes from a sharded checkpoint or from a single file. Generation, export and
    evaluation also accept both, but require memory for the complete model.
    """
    parser.add_argument("source", type=Path, help="folder of a sharded checkpoint, or of a run")
    parser.add_argument("target", type=Path, help="file to write")

    def run(args: Namespace) -> None:
        from lightning_mhla.checkpoints.io import consolidate

        checkpoint = consolidate(args.source, args.target)
        size = args.target.stat().st_size / 2**20
        _say(f"{harmless(str(args.target))}: {size:.1f} MiB, from {harmless(str(checkpoint))}")

    return run


def generate(parser: ArgumentParser) -> Run:
    """Continue a prompt with a language model, token by token.

        lightning generate runs/stdlib/version_0/checkpoints/last.ckpt "def main():"

    The model is a training checkpoint, the folder of a run (its latest checkpoint), an exported folder or a name on the Hugging
    Face Hub. Without a prompt, the command reads prompts from the terminal one after the other.
    """
    parser.add_argument("model", help="checkpoint, folder of a run, exported folder, or name on the hub")
    parser.add_argument("prompt", nargs="?", help="text to continue")
    parser.add_argument(
        "--max_new_tokens", type=int, help="maximum number of tokens to generate (default: 256, or the model's limit)"
    )
    parser.add_argument(
        "--control_tokens",
        action="store_true",
        help="encode the text of a control token in the prompt, such as <|im_start|>, as this token, for prompts from a chat "
        "template (default: as text)",
    )
    _add_sampling(parser)

    def run(args: Namespace) -> None:
        from mhla_tasks.language.generate import continue_prompts

        sampling = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "control_tokens")}
        continue_prompts(args.model, args.prompt, args.max_new_tokens, sampling, args.seed, args.device)

    return run


def _add_sampling(parser: ArgumentParser) -> None:
    """Add the options of commands that sample text: how tokens are chosen, the seed, the device, and ``--allow``."""
    parser.add_argument(
        "--temperature",
        type=float,
        help="sampling temperature; 0 for the most likely token (default: the value saved with the model, or 0.8)",
    )
    parser.add_argument(
        "--top_k",
        type=int,
        help="sample from the k most likely tokens; 0 for all (default: the value saved with the model, or 50)",
    )
    parser.add_argument(
        "--top_p",
        type=float,
        help="sample from the most likely tokens with this total probability (default: the value saved with the model, or 1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    add_allow(parser)


def chat(parser: ArgumentParser) -> Run:
    """Chat with a language model, whose replies appear while they are generated.

        lightning chat exported --system "Answer in one sentence."

    The model is a training checkpoint, the folder of a run (its latest checkpoint), an exported folder or a name on the Hugging
    Face Hub. Messages are formatted with the chat template of the model's tokenizer; a model without a template continues the
    text of the message. The model keeps its state between messages, so it reads each message only once. The size of the state
    is printed after each reply, and is constant for mhla and the other kinds of linear attention. Messages may also come from a
    file or a pipe, one per line. Only replies go to standard output.
    """
    parser.add_argument("model", help="checkpoint, folder of a run, exported folder, or name on the hub")
    parser.add_argument("--system", metavar="TEXT", help="system message, if the chat template supports one")
    parser.add_argument("--max_new_tokens", type=int, help="maximum number of tokens of a reply (default: 512)")
    _add_sampling(parser)

    def run(args: Namespace) -> None:
        from mhla_tasks.language.chat import chat as talk

        sampling = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
        overrides = {name: value for name, value in sampling.items() if value is not None}
        talk(args.model, args.system, args.max_new_tokens, overrides, args.seed, args.device)

    return run


@passes_on
def timm_script(arguments: Sequence[str]) -> int | None:
    """Run a script of timm (train.py, validate.py, ...) with the models of this package.

        lightning timm validate.py images --model mhla_vlt_t --checkpoint model.pth

    The command accepts the options of the script. In addition to timm's models, ``--model`` accepts the models that
    ``lightning_mhla.timm`` registers: mhla_vlt_t, mhla_deit_t and others. The exit status is that of the script, or 2 if no
    script is named.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write("usage: lightning timm SCRIPT [options of the script]\n\n")
        sys.stdout.write(f"{help_text(timm_script)}\n")
        return 0 if arguments else 2
    if not Path(arguments[0]).is_file():
        raise FileNotFoundError(
            f"{arguments[0]}: there is no such script; timm's scripts are in its repository, not in its package"
        )
    _ = import_module("timm").create_model  # executes timm, whose import the command line defers
    import_module("lightning_mhla.timm")
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")
    return None
