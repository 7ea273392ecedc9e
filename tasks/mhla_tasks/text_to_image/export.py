"""The trained text-to-image transformer as a folder, and its LoRA adapters."""

from mhla_tasks.captioned.export import OPTIONS, loading, write

__all__ = ["OPTIONS", "loading", "write"]
