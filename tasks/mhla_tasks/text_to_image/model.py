"""Options that define the architecture of SANA's transformer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SanaTransformerConfig:
    """Options of diffusers' ``SanaTransformer2DModel``; the defaults are those of SANA-0.6B at 512 pixels.

    Args:
        in_channels: number of input channels; 32 for latents of SANA's autoencoder, 3 for pixels.
        out_channels: number of output channels.
        num_attention_heads: number of heads in self-attention.
        attention_head_dim: width of a head in self-attention.
        num_layers: number of transformer blocks.
        num_cross_attention_heads: number of heads in cross-attention.
        cross_attention_head_dim: width of a head in cross-attention.
        cross_attention_dim: width of a token. In self-attention and in cross-attention, it must equal the number of heads times
            the width of a head.
        caption_channels: width of the embedded caption tokens; 2304 for Gemma-2-2B.
        mlp_ratio: inner width of the MLP divided by the width of a token.
        sample_size: side of the latent, in latent pixels; the model also accepts other sizes.
        patch_size: side of the square of latent pixels that becomes one token.
        interpolation_scale: scale of sine-cosine position embeddings; null for no position embeddings, as in SANA at 512 and
            1,024 pixels.
        qk_norm: normalization of queries and keys: rms_norm_across_heads (as in SANA-1.5), or null for none.

    Raises:
        ValueError: if the numbers and widths of the heads do not give the token width.
    """

    in_channels: int = 32
    out_channels: int = 32
    num_attention_heads: int = 36
    attention_head_dim: int = 32
    num_layers: int = 28
    num_cross_attention_heads: int = 16
    cross_attention_head_dim: int = 72
    cross_attention_dim: int = 1152
    caption_channels: int = 2304
    mlp_ratio: float = 2.5
    sample_size: int = 16
    patch_size: int = 1
    interpolation_scale: int | None = None
    qk_norm: str | None = None

    def __post_init__(self) -> None:
        width = self.num_attention_heads * self.attention_head_dim
        cross = self.num_cross_attention_heads * self.cross_attention_head_dim
        if not width == cross == self.cross_attention_dim:
            raise ValueError(
                f"transformer: {self.num_attention_heads} heads of {self.attention_head_dim}, "
                f"{self.num_cross_attention_heads} of {self.cross_attention_head_dim} in cross-attention and "
                f"cross_attention_dim={self.cross_attention_dim} give different token widths; make them equal"
            )
