"""Export of a trained video transformer to a folder, and of its LoRA adapters."""

from mhla_tasks.captioned.export import OPTIONS, loading, write

__all__ = ["OPTIONS", "loading", "write"]
