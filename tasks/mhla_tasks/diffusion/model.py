"""Diffusion transformers that predict noise or velocity: DiT (arXiv 2212.09748) and DiG (arXiv 2405.18428)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.embeddings import TimestepEmbedding, Timesteps, get_2d_sincos_pos_embed_from_grid
from timm.layers import PatchEmbed
from torch import Tensor, nn

from lightning_mhla import AttentionConfig, Backbone
from lightning_mhla.attention import attention_per_layer
from lightning_mhla.model.sizes import Shape, both_sides, model_shape
from lightning_mhla.system.options import as_dataclass
from mhla_tasks.diffusion.dig import SIZES as DIG_SIZES
from mhla_tasks.diffusion.dig import DiGConfig, TurningBackbone

Size = Literal["S", "B", "L", "XL"]

SIZES: dict[str, Shape] = {"S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16), "XL": (1152, 28, 16)}
"""Width, depth and number of heads of each size (DiT, table 1)."""

FREQUENCIES = 256
"""Width of the sinusoidal embedding of a timestep, as in DiT's code."""


class DiT(ModelMixin, ConfigMixin):
    """Diffusion transformer that predicts noise or velocity from a noisy image or latent, a timestep and a class.

    ``save_pretrained(folder)`` writes safetensors and ``config.json``; ``DiT.from_pretrained(folder)`` loads them.

    Args:
        sample_size: side of the square sample, or its height and width, in pixels or latent pixels.
        channels: number of channels of the sample.
        num_classes: number of classes. Labels are 0 to ``num_classes - 1``; ``num_classes`` marks a sample without a class.
        attention: options of the attention in all layers.
        layer_kinds: pattern of attention kinds that repeats over all layers; the number of layers must be a multiple of its
            length; None to use ``attention.kind`` in all layers.
        size: S, B, L or XL, which sets dim, depth and heads; None to use the arguments with these names.
        dim: width of the tokens, if ``size`` is None.
        depth: number of blocks, if ``size`` is None.
        heads: number of attention heads, if ``size`` is None.
        dig: options of a DiG (arXiv 2405.18428), a variant that scans the image in alternating directions; None for a DiT. For
            a DiG, ``size`` selects one of DiG's sizes, and ``mlp_ratio`` must be left out.
        patch_size: side of the square patch that becomes one token, in pixels of the sample.
        out_channels: number of output channels; None for ``channels``. A network that also predicts the variance has twice as
            many output channels as input channels.
        mlp_ratio: inner width of the MLP divided by the width of the tokens.
        frequency_shift: shift in the frequencies ``10000 ** (-i / (128 - shift))`` of the timestep embedding. DiT was trained
            with 0; diffusers' DiT uses 1.
        mlp_norm_eps: epsilon of the norm before the MLP. DiT was trained with 1e-6; diffusers' DiT uses 1e-5.
        checkpointing: whether to recompute the activations of each block in the backward pass, to save memory.

    Raises:
        ValueError: if ``patch_size`` does not divide the sides of the sample, the width is not a multiple of 4, ``mlp_ratio``
            is set for a DiG, ``size`` is combined with ``dim``, ``depth`` or ``heads``, or one of these three is missing
            without ``size``.
    """

    position: Tensor

    @register_to_config
    def __init__(
        self,
        sample_size: int | list[int],
        channels: int,
        num_classes: int,
        attention: AttentionConfig,
        *,
        layer_kinds: list[str] | None = None,
        size: Size | None = None,
        dim: int | None = None,
        depth: int | None = None,
        heads: int | None = None,
        dig: DiGConfig | None = None,
        patch_size: int = 2,
        out_channels: int | None = None,
        mlp_ratio: float = 4.0,
        frequency_shift: float = 0.0,
        mlp_norm_eps: float = 1e-6,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        attention = as_dataclass(AttentionConfig, attention)
        dig = None if dig is None else as_dataclass(DiGConfig, dig)
        self.register_to_config(
            attention=asdict(attention), dig=dig and asdict(dig)
        )  # JSON values; the decorator has stored objects
        width, layers, number = model_shape(SIZES if dig is None else DIG_SIZES, size, dim, depth, heads)
        sides = both_sides("sample_size", sample_size)
        if any(side % patch_size for side in sides):
            raise ValueError(f"patch_size={patch_size} does not divide the sample's side of {sample_size} pixels")
        if width % 4:
            raise ValueError(f"dim={width} must be a multiple of 4: a sine and a cosine for each of two axes")
        self.grid = (sides[0] // patch_size, sides[1] // patch_size)
        self.sides, self.channels, self.num_classes = sides, channels, num_classes
        self.patch_size, self.out_channels = patch_size, out_channels or channels
        self.patches = PatchEmbed(sides, patch_size, channels, width, strict_img_size=True)
        self.frequencies = Timesteps(FREQUENCIES, flip_sin_to_cos=True, downscale_freq_shift=frequency_shift)
        self.time = TimestepEmbedding(FREQUENCIES, width)
        self.label = nn.Embedding(num_classes + 1, width)
        kinds = attention_per_layer(attention, layer_kinds, layers)
        common: dict[str, Any] = {
            "condition_dim": width,
            "mlp_norm_eps": mlp_norm_eps,
            "checkpointing": checkpointing,
        }
        self.backbone: Backbone | TurningBackbone
        if dig is None:
            self.backbone = Backbone(
                width, layers, number, self.grid, kinds, mlp_ratio=mlp_ratio, mlp="gelu_tanh", **common
            )
        elif mlp_ratio != 4.0:
            raise ValueError("mlp_ratio does not apply to a DiG; set dig.mlp_width instead")
        else:
            self.backbone = TurningBackbone(width, number, self.grid, kinds, dig, **common)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.head = nn.Linear(width, patch_size**2 * self.out_channels)
        rows, columns = (torch.arange(length, dtype=torch.float32) for length in self.grid)
        places = torch.stack(torch.meshgrid(columns, rows, indexing="xy"))[:, None]  # columns first, as in DiT's code
        position = get_2d_sincos_pos_embed_from_grid(width, places, output_type="pt")
        self.register_buffer("position", position.float()[None], persistent=False)
        self._initialize()

    def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Predict noise or velocity from noisy samples.

        Args:
            x: noisy samples ``[B, channels, height, width]``.
            times: timesteps ``[B]`` from 0 to 1000; fractions are allowed.
            labels: class labels ``[B]``, integers; ``num_classes`` for no class.

        Returns:
            Prediction ``[B, out_channels, height, width]``.

        Raises:
            ValueError: if the number of channels, the height or the width of the samples differs from that of the model.
        """
        expected = (self.channels, *self.sides)
        if x.shape[1:] != expected:
            raise ValueError(f"the samples have channels and sides {tuple(x.shape[1:])}, the model expects {expected}")
        frequencies = self.frequencies(times).to(self.patches.proj.weight.dtype)
        condition = self.time(frequencies) + self.label(labels)
        tokens = self.backbone(self.patches(x.to(frequencies.dtype)) + self.position.to(frequencies.dtype), condition)
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=-1)
        patches = self.head(tokens * (1 + scale) + shift)
        return _join_patches(patches, self.grid, self.patch_size)

    def _initialize(self) -> None:
        """Initialize the weights as the original DiT code does.

        Linear layers and the patch embedding get Xavier initialization. The embeddings of class and timestep are drawn from a
        normal distribution with standard deviation 0.02. The output layer, its modulation and all biases start at zero. In a
        DiG, the projections of the attention layers are initialized as in the original DiG code.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and not name.endswith("modulation.1"):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.patches.proj.weight.view(self.patches.proj.out_channels, -1))
        nn.init.zeros_(self.patches.proj.bias)
        for weight in (self.label.weight, self.time.linear_1.weight, self.time.linear_2.weight):
            nn.init.normal_(weight, std=0.02)
        # With zeros here, the untrained network predicts 0.
        for layer in (self.modulation[1], self.head):
            assert isinstance(layer, nn.Linear)
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        if isinstance(self.backbone, TurningBackbone):
            self.backbone.initialize()


def _join_patches(patches: Tensor, grid: tuple[int, int], size: int) -> Tensor:
    """Join patches ``[B, rows * columns, size * size * C]`` into images ``[B, C, rows * size, columns * size]``.

    Args:
        patches: patches of the images, in raster order.
        grid: rows and columns of patches.
        size: side of a patch.
    """
    height, width = grid
    # [B, h, w, p, q, C]: position of the patch, position of the pixel in it, channels
    parts = patches.view(-1, height, width, size, size, patches.shape[-1] // size**2)
    return torch.einsum("bhwpqc->bchpwq", parts).reshape(-1, parts.shape[-1], height * size, width * size)
