"""Continue a prompt in the terminal, token by token.

    python -m mhla_tasks.language.generate runs/stdlib/version_0/checkpoints/last.ckpt "def main():"

The model is a checkpoint of training, an exported folder or a name on the hub. Without a prompt it is read from the
terminal, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import TextStreamer, set_seed

from lightning_mhla.system.commands import add_allow, command_parser, short_errors
from mhla_tasks.language.export import load_model
from mhla_tasks.language.networks import longest
from mhla_tasks.language.prompts import GenerationOptions


def main() -> None:
    """Command line."""
    parser = command_parser("mhla_tasks.language.generate", __doc__)
    default = GenerationOptions()
    parser.add_argument("model", help="checkpoint, exported folder, or name on the hub")
    parser.add_argument("prompt", nargs="?", help="what is continued")
    parser.add_argument("--max-new-tokens", type=int, help="at most (default: 256, or as many as the model reaches to)")
    parser.add_argument("--temperature", type=float, default=default.temperature, help="0 for the likeliest token")
    parser.add_argument("--top-k", type=int, default=default.top_k, help="0 for all tokens")
    parser.add_argument("--top-p", type=float, default=default.top_p)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_allow(parser)
    args = parser.parse_args()
    set_seed(args.seed)
    with short_errors():
        model, tokenizer = load_model(args.model)
        model = model.to(args.device)
        for prompt in _prompts(args.prompt):
            tokens = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(args.device)
            count = args.max_new_tokens
            if count is None:
                limit = longest(model)
                count = 256 if limit is None else max(1, min(256, limit - tokens["input_ids"].shape[1]))
            options = GenerationOptions(count, args.temperature, args.top_k, args.top_p)
            model.generate(
                **tokens, **options.for_generate(), streamer=TextStreamer(tokenizer, skip_special_tokens=True)
            )


def _prompts(given: str | None) -> Iterator[str]:
    if given is not None:
        yield given
        return
    while True:
        try:
            prompt = input("> ")
        except (EOFError, KeyboardInterrupt):
            return
        if prompt:
            yield prompt


if __name__ == "__main__":
    main()
