"""Causal language models from the transformers library, trained as baselines in the same way as MHLA models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from lightning_mhla.swap.networks import build_configuration
from lightning_mhla.system.modes import evaluation_mode
from lightning_mhla.system.sharding import is_sharded_module
from lightning_mhla.system.untrusted import reason
from mhla_tasks.language.lengths import position_table
from mhla_tasks.language.loss import IGNORED, linear_cross_entropy, logits_cross_entropy, token_losses
from mhla_tasks.language.model import MHLAForCausalLM


def build_network(network: Mapping[str, Any], vocab_size: int) -> PreTrainedModel:
    """Build a causal language model with random weights from a transformers configuration.

    Args:
        network: dict with these entries:

            * ``class_path``: name of a configuration class, such as ``transformers.LlamaConfig``.
            * ``init_args`` (optional): options of the configuration.
            * ``extra`` (optional): entries of a published ``config.json`` that the class does not know; kept unchanged.
            * ``generation_config`` (optional): options of ``transformers.GenerationConfig``.
        vocab_size: number of tokens in the vocabulary; must equal that in ``init_args`` if it is set there.

    Raises:
        ValueError: if transformers has no such class, the configuration has no such option, or the model is not a causal
            language model.
    """
    generation = network.get("generation_config")
    description = {name: value for name, value in network.items() if name != "generation_config"}
    config = build_configuration(description, {"vocab_size": vocab_size})
    try:
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except ValueError as error:
        raise ValueError(
            f"network: {type(config).__name__} does not build a causal language model ({reason(error)})"
        ) from error
    if generation:
        model.generation_config = GenerationConfig.from_dict(dict(generation))
    return model


@torch.no_grad()
def examine(network: PreTrainedModel, context: int) -> bool:
    """Check that a model can be trained, and test whether its logits are the product of hidden states and head weight.

    If they are, the loss can be computed without storing the logits of all tokens at once.

    Args:
        network: causal language model from the transformers library.
        context: number of tokens in a training sample.

    Returns:
        Whether the logits are that product; False for a model on the meta device, which cannot be tested.

    Raises:
        ValueError: if tokens attend to later tokens, the model supports fewer than ``context`` tokens, or its configuration
            sets ``output_router_logits``, whose router loss is not supported.
    """
    config, name = network.config, type(network).__name__
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and limit < context:
        raise ValueError(
            f"network: max_position_embeddings={limit} is below context={context}; set it to at least that"
        )
    if getattr(config, "output_router_logits", False):
        raise ValueError("network: output_router_logits asks for a router loss, which is not supported; leave it out")
    if any(parameter.is_meta for parameter in network.parameters()):
        return False
    # Change the last of four tokens: in a causal model, the logits of the first three stay the same.
    tokens = torch.arange(4)[None] % config.vocab_size
    with evaluation_mode(network):  # dropout would make the logits of the two passes differ
        logits = network(tokens, use_cache=False).logits
        changed = network(tokens.index_fill(1, torch.tensor([3]), config.vocab_size - 1), use_cache=False).logits
        head = network.get_output_embeddings()
        plain = type(head) is nn.Linear and torch.equal(head(_hidden(network, tokens)), logits)
    if not torch.allclose(logits[:, :3], changed[:, :3], rtol=0, atol=1e-6):
        raise ValueError(
            f"network: tokens of a {name} see later ones, so it is not a causal language model (is_decoder: true?)"
        )
    return plain and head.bias is None


def _hidden(network: PreTrainedModel, tokens: Tensor) -> Tensor:
    return network.base_model(tokens, use_cache=False).last_hidden_state


def network_loss(network: PreTrainedModel, inputs: Tensor, targets: Tensor, mean: bool, plain: bool) -> Tensor:
    """Compute the cross-entropy of the targets in nats, as a mean over the tokens or separately for each token.

    Args:
        network: causal language model from the transformers library.
        inputs: input tokens, ``[B, N]`` int64.
        targets: token that follows each input token, ``[B, N]`` int64; -100 is ignored.
        mean: whether to return the mean over the targets instead of the loss of each token.
        plain: whether the logits are the hidden states times the weight of the head, as :func:`examine` determines. If so, the
            logits of all tokens are not stored at once, unless the model is sharded with FSDP2.

    Returns:
        The loss: a scalar, or ``[B, N]``.
    """
    # FSDP2 gathers parameters in the model's own forward pass only, so that a sharded model is called in one piece.
    if not plain or is_sharded_module(network):
        logits = network(inputs, use_cache=False).logits.float().flatten(0, 1)
        if mean:
            return logits_cross_entropy(logits, targets.flatten())
        losses = nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="none")
        return losses.view(targets.shape)
    hidden, weight = _hidden(network, inputs).flatten(0, 1), network.get_output_embeddings().weight
    if mean:
        return linear_cross_entropy(hidden, weight, targets.flatten())
    return token_losses(hidden, weight, targets.flatten()).view(targets.shape)


def longest(network: PreTrainedModel) -> int | None:
    """Return the maximum number of tokens that a model can read; None if there is no limit.

    Mixing coefficients of an MHLA model and learned positions of other models limit the number.

    Args:
        network: causal language model of this package or of transformers.
    """
    return network.backbone.max_tokens if isinstance(network, MHLAForCausalLM) else position_table(network)


def training_flops(network: PreTrainedModel) -> float:
    """Estimate the floating-point operations of training on one token: 6 for each entry of the weight matrices.

    The estimate follows Kaplan et al. (arXiv 2001.08361, section 2.1), and omits the input embedding, attention scores and
    recurrences.
    """
    embedding = network.get_input_embeddings().weight
    head = network.get_output_embeddings().weight
    matrices = sum(p.numel() for p in network.parameters() if p.dim() >= 2 and p is not embedding and p is not head)
    return 6.0 * (matrices + head.numel())
