"""Adapter through which lm-evaluation-harness evaluates MHLA models; it is registered as model type ``mhla``."""

from __future__ import annotations

import copy
import logging
import os
from collections import Counter
from typing import Any, Literal

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mhla_tasks.language.encoding import encode_prompts, encode_texts
from mhla_tasks.language.export import load_model
from mhla_tasks.language.model import MHLAForCausalLM
from mhla_tasks.language.networks import longest

log = logging.getLogger(__name__)


@register_model("mhla")
class MHLALM(HFLM):
    """Model adapter for lm-evaluation-harness that also loads training checkpoints and can cut long prompts in the middle.

    It extends lm-eval's adapter for Hugging Face models. Contexts and continuations are encoded as in lm-eval: text that spells
    a control token becomes that token, because the harness writes chat templates into its prompts. A token that the tokenizer
    appends to every text is omitted. Under ``torch.distributed``, each process answers a share of the requests.

    Args:
        pretrained: path of a training checkpoint, of a run's folder (for its latest checkpoint) or of an exported folder, name
            of a model on the Hugging Face Hub, or model object.
        tokenizer: folder of a tokenizer, name of a model on the Hugging Face Hub, or tokenizer object; None for the model's own
            tokenizer.
        device: device to load the model to; None for the GPU if there is one. Ignored if ``pretrained`` is a model object.
        dtype: name of the dtype to load the weights in, such as ``"bfloat16"``. Ignored if ``pretrained`` is a model object.
        max_length: maximum number of tokens in prompt and answer together; None for the model's context. A model whose mixing
            coefficients cover fewer tokens is extended; if it was passed as an object, a copy of it is extended.
        cut: part to remove from prompts that are too long: ``"middle"`` (as LongBench's authors do, arXiv 2308.14508) or
            ``"left"`` (as lm-eval does).
        options: further arguments of lm-eval's class ``HFLM``, such as ``batch_size``. The default of ``softmax_dtype`` is
            ``"float32"`` here: sums of log-probabilities in the model's dtype would have 3 digits for a bfloat16 model.

    Raises:
        FileNotFoundError: if there is no such model or tokenizer.
        ValueError: if ``cut`` or ``dtype`` is invalid, or ``max_length`` exceeds the learned positions of the model.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        device: str | None = None,
        dtype: str = "float32",
        max_length: int | str | None = None,
        cut: Literal["middle", "left"] = "middle",
        **options: Any,
    ) -> None:
        if cut not in ("middle", "left"):
            raise ValueError(f"cut={cut!r} is not one of 'middle', 'left'")
        length = None if max_length is None else int(max_length)
        model: PreTrainedModel
        if isinstance(pretrained, PreTrainedModel):
            model = pretrained
        else:
            name = None if isinstance(tokenizer, PreTrainedTokenizerBase) else tokenizer
            model, model_tokenizer = load_model(pretrained, name)
            tokenizer = tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else model_tokenizer
            weights = torch.float32 if dtype in (None, "auto") else getattr(torch, str(dtype), None)
            if not isinstance(weights, torch.dtype):
                raise ValueError(f"dtype={dtype!r} is not one of float32, bfloat16, float16")
            model = model.to(device=_device(device), dtype=weights)
        limit = longest(model)
        if length is not None and limit is not None and length > limit:
            if not isinstance(model, MHLAForCausalLM):
                raise ValueError(f"max_length={length} exceeds the {limit} positions that the model has; lower it")
            # The caller goes on using the object, in training for example.
            model = copy.deepcopy(model) if model is pretrained else model
            model.extend(length)
        for unused in ("trust_remote_code", "parallelize"):
            options.pop(unused, None)
        options.setdefault("softmax_dtype", "float32")
        super().__init__(pretrained=model, tokenizer=tokenizer, max_length=length, backend="causal", **options)
        self.cut = cut
        self.prompts: Counter[str] = Counter()
        self.prompts_cut: Counter[str] = Counter()
        self._shortened: set[str] = set()
        # HFLM assumes a single process if it gets a model object.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._rank, self._world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather a tensor from all processes, and concatenate the results along the first dimension.

        Scalars are stacked into a vector. With a single process, the tensor is returned unchanged.
        """
        if self.world_size <= 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, tensor)
        return torch.stack(parts) if tensor.dim() == 0 else torch.cat(parts)

    def barrier(self) -> None:
        """Wait until all processes have reached this call."""
        if self.world_size > 1:
            torch.distributed.barrier()

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score the continuation of each prompt as lm-eval does, and count the prompts that were cut to fit the model.

        Args:
            requests: requests of lm-eval, each with a prompt and its continuation.
            disable_tqdm: whether to hide the progress bar.

        Returns:
            For each request, the log-likelihood of the continuation in nats, and whether greedy decoding would produce it.
        """
        return self._counted(requests, super().loglikelihood(requests, disable_tqdm=disable_tqdm))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate an answer to each prompt as lm-eval does, and count the prompts that were cut to fit the model.

        Args:
            requests: requests of lm-eval, each with a prompt and options of generation.
            disable_tqdm: whether to hide the progress bar.

        Returns:
            The generated text for each request.
        """
        return self._counted(requests, super().generate_until(requests, disable_tqdm=disable_tqdm))

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Encode one text as lm-eval does, but without the special tokens that the tokenizer appends.

        Appended tokens, such as an end token, would stand between a context and its continuation.

        Args:
            string: text to encode.
            add_special_tokens: whether to add the special tokens in front of the text; None for lm-eval's setting.
            left_truncate_len: number of tokens to keep at the end of the text; None for all.
            kwargs: ignored.

        Returns:
            Token indices of the text.
        """
        begin = self.add_bos_token if add_special_tokens is None else add_special_tokens
        encode = encode_texts if begin is False else encode_prompts
        (row,) = encode(self.tokenizer, [string], read_control_tokens=True)
        return row[-left_truncate_len:] if left_truncate_len else row

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Encode texts as a padded batch, and shorten texts of more than ``left_truncate_len`` tokens.

        The attribute ``cut`` determines whether the middle or the left part of these texts is removed.

        Args:
            strings: texts to encode.
            padding_side: side on which shorter texts are padded, ``"left"`` or ``"right"``.
            left_truncate_len: maximum number of tokens in a text; None for no maximum.
            truncation: whether to first shorten texts to the maximum length that the tokenizer sets.

        Returns:
            Token indices, and a mask that is 1 for tokens and 0 for padding, each ``[B, N]`` int64.
        """
        rows = [self.tok_encode(string) for string in strings]
        if truncation:
            longest_row, side = self.tokenizer.model_max_length, self.tokenizer.truncation_side
            rows = [row[:longest_row] if side == "right" else row[-longest_row:] for row in rows]
        self._note(strings, [len(row) for row in rows], left_truncate_len)
        if left_truncate_len is not None:
            cut = cut_middle if self.cut == "middle" else cut_left
            rows = [cut(row, left_truncate_len) for row in rows]
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self.tokenizer.pad_token_id)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for number, row in enumerate(rows):
            at = slice(width - len(row), None) if padding_side == "left" else slice(0, len(row))
            ids[number, at], mask[number, at] = ids.new_tensor(row), 1
        return ids, mask

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **options: Any) -> list[tuple[float, bool]]:
        window = self.max_length + 1  # the last token of the continuation is a target, not an input
        shortened = []
        for key, context, continuation in requests:
            context_limit = window - len(continuation)
            if key is not None:
                self._note([key[0]], [len(context)], context_limit)
            cut = self.cut == "middle" and len(context) > context_limit > 0
            shortened.append((key, cut_middle(context, context_limit) if cut else context, continuation))
        return super()._loglikelihood_tokens(shortened, *args, **options)

    def _note(self, strings: list[str], lengths: list[int], limit: int | None) -> None:
        if limit is not None:
            self._shortened |= {text for text, length in zip(strings, lengths, strict=True) if length > limit}

    def _counted(self, requests: list[Instance], answers: list[Any]) -> list[Any]:
        for request in requests:
            self.prompts[str(request.task_name)] += 1
            self.prompts_cut[str(request.task_name)] += request.args[0] in self._shortened
        return answers

    def cut_shares(self) -> dict[str, float]:
        """Return the fraction of prompts that were cut to fit the model, by task, over all processes.

        This is a collective operation, so call it on every process.
        """
        counts = [(dict(self.prompts), dict(self.prompts_cut))]
        if self.world_size > 1:
            gathered: list[Any] = [None] * self.world_size
            torch.distributed.all_gather_object(gathered, counts[0])
            counts = gathered
        prompts: Counter[str] = Counter()
        cut: Counter[str] = Counter()
        for process_prompts, process_cut in counts:
            prompts.update(process_prompts)
            cut.update(process_cut)
        return {task: cut[task] / number for task, number in sorted(prompts.items())}

    def get_model_info(self) -> dict[str, Any]:
        """Return the entries about the model for lm-eval's results file.

        The entries are the number of parameters, the dtype, and the fraction of prompts that this process cut, by task.
        """
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": str(self.model.dtype),
            "prompts_cut": {task: self.prompts_cut[task] / number for task, number in sorted(self.prompts.items())},
        }


def _device(requested: str | None) -> str:
    """Return the name of the device for the model.

    Args:
        requested: name of a device. None, or a name that starts with ``cuda``, selects the GPU of this process, or the CPU if
            there is no GPU.
    """
    if requested is not None and not requested.startswith("cuda"):
        return requested
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{os.environ['LOCAL_RANK']}" if "LOCAL_RANK" in os.environ else requested or "cuda"


def cut_left(tokens: list[int], length: int) -> list[int]:
    """Return the last ``length`` tokens of a list; a shorter list is returned unchanged."""
    return tokens[max(0, len(tokens) - length) :]


def cut_middle(tokens: list[int], length: int) -> list[int]:
    """Remove tokens from the middle of a list until ``length`` remain; a shorter list is returned unchanged."""
    if len(tokens) <= length:
        return tokens
    head = length // 2
    return tokens[:head] + tokens[len(tokens) - (length - head) :]
