"""Export of a trained text-to-image transformer to a folder, with the option to export its LoRA adapters separately."""

from mhla_tasks.captioned.export import OPTIONS, loading, write

__all__ = ["OPTIONS", "loading", "write"]
