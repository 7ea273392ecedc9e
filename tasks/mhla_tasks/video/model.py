"""Options that define the architecture of Wan's transformer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WanTransformerConfig:
    """Options of diffusers' ``WanTransformer3DModel``; the defaults are those of Wan2.1-T2V-1.3B.

    Args:
        patch_size: number of frames, rows and columns of the latent that become one token.
        num_attention_heads: number of heads in self-attention and in cross-attention.
        attention_head_dim: width of a head, an even number. For rotary positions, rows and columns each use a third of it,
            rounded down to an even number, and frames use the rest.
        in_channels: number of channels of the latent; 16 for Wan's VAE.
        out_channels: number of output channels.
        text_dim: width of the embedded caption tokens; 4096 for UMT5-XXL.
        freq_dim: width of the timestep's sinusoidal embedding.
        ffn_dim: inner width of the MLP.
        num_layers: number of transformer blocks.
        rope_max_seq_len: maximum number of rotary positions along an axis.
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
