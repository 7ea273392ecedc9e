"""Export of a trained text-to-image transformer to a folder, and of its LoRA adapters."""

from mhla_tasks.captioned.export import OPTIONS, loading, write

__all__ = ["OPTIONS", "loading", "write"]
