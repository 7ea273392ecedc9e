"""Shape of Wan's transformer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TransformerConfig:
    """Shape of a ``WanTransformer3DModel``, with diffusers' names; the defaults are Wan2.1-T2V-1.3B's.

    Args:
        patch_size: frames, rows and columns of the latent that are one token.
        num_attention_heads: heads of each attention.
        attention_head_dim: width of a head, even; a third of it, rounded down to even, for each of rows and columns.
        in_channels: channels of the latent; 16 for Wan's VAE.
        out_channels: number of channels of the output.
        text_dim: width of the caption's embeddings; 4096 for UMT5-XXL.
        freq_dim: width of the timestep's embedding.
        ffn_dim: inner width of the MLP.
        num_layers: number of blocks.
        rope_max_seq_len: positions that rotary embedding knows along an axis.
    """

    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_attention_heads: int = 12
    attention_head_dim: int = 128
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256
    ffn_dim: int = 8960
    num_layers: int = 30
    rope_max_seq_len: int = 1024
