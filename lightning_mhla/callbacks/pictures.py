"""Pictures and statistics of a model's attention during training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from lightning_mhla.attention import MHLA, Attention
from lightning_mhla.attention.layout import BlockLayout
from lightning_mhla.callbacks.averaging import evaluation_weights
from lightning_mhla.callbacks.maps import draw_attention, draw_frames, draw_matrices, draw_mixing
from lightning_mhla.callbacks.recovery import is_leaving
from lightning_mhla.data.loader import ResumableLoader
from lightning_mhla.data.sampling import kept_random_state
from lightning_mhla.system.figures import log_figure
from lightning_mhla.system.folders import run_folder
from lightning_mhla.system.lightning_private import prepared_batch
from lightning_mhla.system.numbers import plural

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def attention_rank(weights_HNN: Tensor) -> float:
    """Compute the numerical rank of attention matrices, averaged over heads (MHLA paper, figure 3).

    The rank is the number of singular values, computed in float32, above the default threshold of ``torch.linalg.matrix_rank``.

    Args:
        weights_HNN: attention matrices ``[H, N, N]`` of H heads and N tokens.
    """
    return float(torch.linalg.matrix_rank(weights_HNN.float().cpu()).double().mean())


def attention_entropy(weights_HNN: Tensor) -> float:
    """Compute the entropy of attention weights, averaged over heads and queries, in nats.

    Args:
        weights_HNN: attention matrices ``[H, N, N]`` of H heads and N tokens. The weights may be negative. The absolute values
            of each row are normalized to sum to 1.
    """
    share = weights_HNN.float().abs()
    share = share / share.sum(-1, keepdim=True).clamp(min=1e-12)
    return float(torch.special.entr(share).sum(-1).mean())


def numbered_layers(model: nn.Module) -> dict[str, Attention]:
    """Return the attention layers of a model, keyed by the numeric parts of their module names.

    Only instances of :class:`Attention` are returned. The layer ``blocks.5.attn1`` has the key ``"5"``, even if the attention
    layers of some other blocks are of a different class. The layer ``stages.1.blocks.0`` has the key ``"1.0"``. If a name has
    no number, or if two layers have the same key, all layers are numbered from 0 instead.
    """
    named = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
    numbers = [".".join(part for part in name.split(".") if part.isdigit()) for name in named]
    unique = all(numbers) and len(set(numbers)) == len(numbers)
    return dict(zip(numbers if unique else map(str, range(len(named))), named.values(), strict=True))


class AttentionPictures(Callback):
    """Callback that draws mixing coefficients and attention maps, and logs the rank and entropy of attention matrices.

    The callback uses one sample of the first validation batch, with the same model weights as validation. Pictures are drawn
    every ``every_n_epochs`` epochs and after the last step. They are written to ``pictures/`` in the log folder and to
    TensorBoard. Whenever pictures are drawn during a validation, ``attention/rank_layer<i>`` and ``attention/entropy_layer<i>``
    are also logged to every logger, where ``i`` is the key of the layer in :func:`numbered_layers`.

    Args:
        every_n_epochs: number ``n`` of epochs between pictures. They are drawn at the first validation in every n-th epoch
            or, if that epoch has no validation, at the next validation.
        sample: index of the sample in the first validation batch.
        max_tokens: maximum number of tokens of a layer. Layers with more tokens are skipped, because an attention matrix has an
            entry for each pair of tokens.

    Raises:
        ValueError: if ``every_n_epochs`` or ``max_tokens`` is less than 1, or ``sample`` is negative. Also at the start of a
            validation or sanity check, if its first batch has no sample with this index.
    """

    def __init__(self, every_n_epochs: int = 1, sample: int = 0, max_tokens: int = 1024) -> None:
        if every_n_epochs < 1 or sample < 0:
            raise ValueError(f"every_n_epochs={every_n_epochs} must be at least 1, and sample={sample} at least 0")
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} must be at least 1; without the callback, there are no pictures")
        self.every_n_epochs, self.sample, self.max_tokens = every_n_epochs, sample, max_tokens
        self._period = 0
        self._drawn_step = -1
        self._hooks: list[RemovableHandle] = []
        self._weights: dict[str, Tensor] = {}
        self._mixing: dict[str, Tensor] = {}
        self._layouts: dict[str, BlockLayout] = {}
        self._folder = Path()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set the output folder, and reset the index of the latest period (``every_n_epochs`` epochs) with pictures.

        Every process must call this method.
        """
        self._folder, self._period, self._drawn_step = run_folder(trainer) / "pictures", 0, -1

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: a dict with ``period``, the index of the latest period with pictures.

        A period has ``every_n_epochs`` epochs.
        """
        return {"period": self._period}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the index of the latest period (``every_n_epochs`` epochs) for which pictures were drawn."""
        self._period = int(state_dict["period"])

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Register hooks on the attention layers before the first validation batch, if pictures are to be drawn.

        Raises:
            ValueError: if the first batch has no sample with the index ``sample``.
        """
        if batch_idx or dataloader_idx:
            return
        self._check_sample(batch)
        period = (trainer.current_epoch + 1) // self.every_n_epochs
        not_due = trainer.state.fn == "fit" and period <= self._period
        if trainer.sanity_checking or not_due or _shares_sequences(pl_module):
            return
        self._period = period
        self._watch(pl_module)

    def _check_sample(self, batch: Any) -> None:
        values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else [batch]
        count = next((len(value) for value in values if isinstance(value, Tensor) and value.dim()), None)
        if count is not None and self.sample >= count:
            raise ValueError(
                f"sample={self.sample} of AttentionPictures: the first validation batch of a process has "
                f"{plural(count, 'sample')}; choose 0 to {count - 1}, or a larger batch_size"
            )

    def _watch(self, module: LightningModule) -> None:
        """Register hooks that capture the attention of each layer with at most ``max_tokens`` tokens."""
        self._weights, self._mixing, self._layouts = {}, {}, {}
        self._hooks = [
            # Before the forward pass, because the matrix is computed again from the layer's inputs; no layer returns it.
            layer.register_forward_pre_hook(partial(self._capture, number), with_kwargs=True)
            for number, layer in numbered_layers(module).items()
            if layer.layout.num_tokens <= self.max_tokens
        ]

    def _stop_watching(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @torch.no_grad()
    def _capture(self, number: str, layer: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0][self.sample : self.sample + 1]
        mask = args[1] if len(args) > 1 else kwargs.get("key_mask")
        # A layer in a pretrained model has no projections of its own, and gets them with each call.
        layer_arguments = {name: kwargs[name] for name in ("rotary", "projections") if layer.qkv is None}
        weights = layer.attention_matrix(
            x, None if mask is None else mask[self.sample : self.sample + 1], **layer_arguments
        )[0]
        if layer.block_ordered and not layer.layout.is_raster:
            # [H, N, N] with both axes in block order; pictures show raster order.
            inverse = layer.layout.inverse.to(weights.device)
            weights = weights.index_select(1, inverse).index_select(2, inverse)
        self._layouts[number] = layer.layout
        self._weights[number] = weights.float().cpu()
        if isinstance(layer, MHLA):
            mixing = layer.mixing.matrix().detach().float().cpu().clone()
            # A causal layer never uses the coefficients of later blocks, whatever their values are.
            hidden = torch.ones(mixing.shape[-2:], dtype=torch.bool).triu(1)
            self._mixing[number] = mixing.masked_fill(hidden, float("nan")) if layer.causal else mixing

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Remove the hooks from the attention layers, log rank and entropy, and draw the pictures.

        Only the first process draws.
        """
        if not self._hooks:
            return
        self._stop_watching()
        for number, weights in self._weights.items():
            pl_module.log(f"attention/rank_layer{number}", attention_rank(weights), on_epoch=True, batch_size=1)
            pl_module.log(f"attention/entropy_layer{number}", attention_entropy(weights), on_epoch=True, batch_size=1)
        self._draw(trainer, batch)

    @torch.no_grad()
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the pictures of the final weights, unless a validation of these weights has drawn them already.

        The method runs the validation step on the first validation batch once more. Its metrics are discarded.
        """
        is_drawn = self._drawn_step == trainer.global_step
        if is_drawn or is_leaving(trainer) or _shares_sequences(pl_module) or not trainer.enable_validation:
            return
        batch = _first_validation_batch(trainer, pl_module)
        if batch is None:
            return
        self._watch(pl_module)
        if not self._hooks:
            return
        with (
            kept_random_state(),
            evaluation_weights(trainer, pl_module),
            trainer.precision_plugin.forward_context(),
            _discarded_metrics(pl_module),
        ):
            try:
                pl_module.validation_step(batch, 0)
            finally:
                self._stop_watching()
        self._draw(trainer, batch)

    def skipped_parts(self, trainer: Trainer) -> list[str]:
        """Return a list with one sentence on why pictures of some or all layers are missing; empty if none are missing."""
        layers = numbered_layers(trainer.lightning_module)
        large = {number: layer.layout.num_tokens for number, layer in layers.items()}
        large = {number: tokens for number, tokens in large.items() if tokens > self.max_tokens}
        if not layers:
            return ["No pictures of attention: no layer of the model has attention of this package."]
        if _shares_sequences(trainer.lightning_module):
            return ["No pictures of attention: under sequence parallelism, no process has complete sequences."]
        if not trainer.enable_validation:
            return ["No pictures of attention: they show a validation sample, and the run has none."]
        if large:
            tokens = plural(max(large.values()), "token")
            return [
                f"No pictures of the attention of {plural(len(large), 'layer')} ({', '.join(large)}): {tokens} are more than "
                f"max_tokens={self.max_tokens} of AttentionPictures."
            ]
        return []

    def _draw(self, trainer: Trainer, batch: Any) -> None:
        """Draw the captured attention and mixing coefficients on the first process."""
        step = trainer.global_step
        self._drawn_step = step
        if trainer.is_global_zero and self._weights:
            figure, caption = self._draw_weights(batch, step)
            log_figure(trainer, figure, "attention", self._folder, caption)
            if self._mixing:
                figure, caption = draw_mixing(self._mixing, self._layouts, step)
                log_figure(trainer, figure, "mixing", self._folder, caption)
        self._weights, self._mixing = {}, {}

    def _draw_weights(self, batch: Any, step: int) -> tuple[Figure, str]:
        layout = next(iter(self._layouts.values()))
        if len(layout.grid) == 1:
            return draw_matrices(self._weights, step)
        inputs = [batch[name] for name in ("image", "video", "latent") if isinstance(batch, dict) and name in batch]
        sample = inputs[0][self.sample].float().cpu() if inputs else None
        if len(layout.grid) == 2:
            return draw_attention(self._weights, self._layouts, sample, step)
        return draw_frames(self._weights, layout, sample, step)


def _shares_sequences(module: Any) -> bool:
    """Return whether processes split each sequence of a module, so that none of them has a complete attention matrix."""
    return getattr(module, "sequence_group", None) is not None


def _first_validation_batch(trainer: Trainer, module: LightningModule) -> Any:
    """Return the first batch of the first validation loader, as Lightning passes it to the validation step.

    If there is no loader, or the loader has no batch, return None. Every process must call this function.
    """
    if trainer.val_dataloaders is None:  # a run whose validations would come later has not created the loader
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        trainer.training = True
    loaders = CombinedLoader(trainer.val_dataloaders or []).flattened
    if not loaders:
        return None
    loader = loaders[0]
    # Iterating over a ResumableLoader would start worker processes and downloads for a single batch.
    batch = loader.first_batch() if isinstance(loader, ResumableLoader) else next(iter(loader), None)
    if batch is None:
        return None
    return trainer.strategy.batch_to_device(prepared_batch(trainer, module, batch), dataloader_idx=0)


@contextmanager
def _discarded_metrics(module: LightningModule) -> Iterator[None]:
    """Context manager in which the steps of a module log nothing. On exit, all metrics of the module are reset."""
    module.log = lambda *_, **__: None  # type: ignore[method-assign]  # hides the method, which needs a running loop
    try:
        yield
    finally:
        del module.log
        for metric in module.modules():
            if isinstance(metric, Metric):
                metric.reset()
