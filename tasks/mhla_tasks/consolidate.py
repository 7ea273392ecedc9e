"""Make one file of a sharded checkpoint, as training in one process writes it.

    python -m mhla_tasks.consolidate runs/NAME/checkpoints/recovery/step=00001000.ckpt whole.ckpt

Training resumes from either; generation, export and evaluation read folders too, with memory for all of them. The folder may
come from any number of processes, or be that of a run: then its furthest whole checkpoint is taken.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from lightning_mhla.checkpoints.io import WholeCheckpointIO, resolve_checkpoint
from lightning_mhla.system.commands import command_parser, short_errors


def consolidate(source: Path, target: Path) -> Path:
    """Write a checkpoint to one file.

    Args:
        source: folder of a sharded checkpoint, or of a run.
        target: file.

    Returns:
        The checkpoint that was read.

    Raises:
        FileNotFoundError: when there is no checkpoint.
        ValueError: when it is damaged, or ``target`` is there already.
    """
    if target.exists():
        raise ValueError(f"{target} exists already; choose another name")
    found = resolve_checkpoint(source)
    reading = WholeCheckpointIO()
    reading.save_checkpoint(reading.load_checkpoint(found), target)
    return found


def main() -> None:
    """Command line."""
    parser = command_parser("mhla_tasks.consolidate", __doc__)
    parser.add_argument("source", type=Path, help="folder of a sharded checkpoint, or of a run")
    parser.add_argument("target", type=Path, help="file to write")
    args = parser.parse_args()
    with short_errors():
        found = consolidate(args.source, args.target)
    Console(soft_wrap=True).print(f"{args.target}: {args.target.stat().st_size / 2**20:.1f} MiB, from {found}")


if __name__ == "__main__":
    main()
