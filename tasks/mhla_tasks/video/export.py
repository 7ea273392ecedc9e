"""The trained video transformer as a folder, and its LoRA adapters."""

from mhla_tasks.captioned.export import OPTIONS, loading, write

__all__ = ["OPTIONS", "loading", "write"]
