"""Command-line tools that convert data to shards, such as ``lightning prepare images`` and ``lightning prepare text``."""

# Longer than other modules because it contains all of these commands, each a function with its options.

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mhla_tasks.commandline.console import harmless
from mhla_tasks.commandline.registry import Run

if TYPE_CHECKING:
    from lightning_mhla.data.pack import Packing


def _shards(parser: ArgumentParser, samples: str, per_shard: int) -> None:
    parser.add_argument("--prefix", default="train", help="prefix of the shards' names (default: train)")
    parser.add_argument("--per_shard", type=int, default=per_shard, help=f"{samples} per shard (default: {per_shard})")
    _forced(parser)


def _forced(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--force",
        action="store_true",
        help="delete the shards of this prefix and write them again, if the source or an option has changed",
    )


def _shuffled(parser: ArgumentParser, samples: str) -> None:
    parser.add_argument("--seed", type=int, default=0, help=f"seed of the order of the {samples} (default: 0)")
    _skipping(parser, samples)


def _skipping(parser: ArgumentParser, samples: str) -> None:
    parser.add_argument(
        "--max_skipped", type=int, default=100, help=f"broken {samples} to skip before the command fails (default: 100)"
    )


def _caption_key(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--caption_key",
        default="caption",
        help="entry of NNN.json, or of a line of metadata.jsonl, that is the caption (default: caption)",
    )


def _captioned_folder(parser: ArgumentParser, samples: str, per_shard: int) -> None:
    """Add to a parser the arguments that ``prepare captions`` and ``prepare clips`` have in common.

    Args:
        parser: parser of the command.
        samples: plural noun for the files, used in the help text, such as ``images``.
        per_shard: default number of samples in a shard.
    """
    parser.add_argument("source", type=Path, help=f"folder of {samples} and captions")
    parser.add_argument("target", type=Path, help="folder for the shards")
    _shards(parser, samples, per_shard)
    _caption_key(parser)
    _shuffled(parser, samples)


def _packing(args: Namespace) -> Packing:
    from lightning_mhla.data.pack import Packing

    return Packing(args.target, args.prefix, args.per_shard, args.seed, args.max_skipped, args.force)


def _report(paths: Sequence[Path], samples: str, skipped: int, share: tuple[int, int] = (0, 1)) -> None:
    """Print the number of samples in the completed shards, and the number of samples that this process skipped.

    Args:
        paths: paths of all shards, including those that other processes write.
        samples: plural noun for the samples, such as ``images``.
        skipped: number of samples that this process skipped.
        share: rank of this process, and number of processes among which the shards are divided.
    """
    from lightning_mhla.data import ShardReader

    rank, world = share
    written = [path for path in paths if path.exists()]
    part = f", {len(paths[rank::world])} of them by process {rank} of {world}" if world > 1 else ""
    left_out = f"; {skipped} {samples} skipped (to add them once repaired: --force)" if skipped else ""
    _say(f"{len(ShardReader(written))} {samples} in {_describe(paths, part)}{left_out}")


def _describe(paths: Sequence[Path], part: str = "") -> str:
    """Describe the number and the paths of shards, such as ``2 shards: a.tar to b.tar``. ``part`` is put before the colon."""
    if len(paths) == 1:
        return f"1 shard{part}: {paths[0]}"
    return f"{len(paths)} shards{part}: {paths[0]} to {paths[-1].name}"


def _say(text: str) -> None:
    from rich.console import Console

    Console(soft_wrap=True, highlight=False).print(harmless(text), markup=False)


def images(parser: ArgumentParser) -> Run:
    """Pack a folder of images, with one subfolder for each class, into WebDataset shards.

        lightning prepare images photos/train shards --prefix train

    The classes are the folder names in alphabetical order, numbered from 0; ``shards/train-classes.txt`` lists them. If the
    target folder already has shards with a different prefix, each class gets the number that it has there. Every image is
    decoded to check it, and copied byte for byte, in a random order that ``--seed`` determines. Images that cannot be decoded,
    such as truncated ones, are skipped with a warning. The option ``--max_skipped`` limits their number.

    The same command resumes after an interruption. It fails if the images or the options have changed in the meantime.
    """
    parser.add_argument("source", type=Path, help="folder that holds one folder of images for each class")
    parser.add_argument("target", type=Path, help="folder for the shards")
    _shards(parser, "images", 1000)
    parser.add_argument(
        "--classes",
        type=Path,
        metavar="FILE",
        help="file with the name of a class on each line, in the order of their labels (default: the classes of shards with a "
        "different prefix in the target, otherwise the folders in alphabetical order)",
    )
    _shuffled(parser, "images")

    def run(args: Namespace) -> None:
        from mhla_tasks.classification.prepare import class_list, images_to_shards

        classes = class_list(args.classes) if args.classes else None
        paths, skipped = images_to_shards(args.source, _packing(args), classes)
        _report(paths, "images", skipped)

    return run


def latents(parser: ArgumentParser) -> Run:
    """Encode images into latent shards with a diffusers VAE, for training without the VAE.

        lightning prepare latents photos/train latents --vae stabilityai/sd-vae-ft-ema --image_size 256
        torchrun --nproc-per-node 8 -m mhla_tasks prepare latents 'shards/train-{0000..1023}.tar' latents --vae VAE

    The source is a folder with one folder of images for each class, or WebDataset shards. For each sample, such a shard
    contains an image such as 17.jpg and its label 17.cls. The command stores the means and standard deviations of the latents
    of each image and of its mirror image, in float16. Images that cannot be read are skipped with a warning. The option
    ``--max_skipped`` limits their number.

    Processes of torchrun or srun divide the shards among them, and each uses the GPU of its local rank. A shard receives its
    name when it is complete, so the same command resumes after an interruption, with any number of processes.
    """
    parser.add_argument("source", help="folder of class folders, or shards of images")
    parser.add_argument("target", type=Path, help="folder for the latent shards")
    parser.add_argument("--vae", required=True, help="folder or hub name of a diffusers AutoencoderKL")
    parser.add_argument(
        "--image_size", type=int, default=256, help="side of the encoded square in pixels (default: 256)"
    )
    _shards(parser, "latents", 1000)
    parser.add_argument("--batch_size", type=int, default=32, help="images encoded at once (default: 32)")
    parser.add_argument(
        "--num_classes",
        type=int,
        help="number of classes of labeled shards (default: the number of names in PREFIX-classes.txt beside the shards)",
    )
    _skipping(parser, "images")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")

    def run(args: Namespace) -> None:
        from lightning_mhla.generative.codecs import LatentCodec
        from lightning_mhla.system.processes import process_device, process_ranks
        from mhla_tasks.diffusion.prepare_latents import encode_images, open_source

        (rank, world, _), device = process_ranks(), process_device(args.device)
        source = open_source(args.source, args.target, args.prefix, args.image_size, args.num_classes)
        paths, skipped = encode_images(
            source, args.target, LatentCodec(args.vae), args.prefix, args.per_shard, args.batch_size, device,
            args.image_size, args.max_skipped, (rank, world), args.force,
        )  # fmt: skip
        _report(paths, "images", skipped, (rank, world))

    return run


def tokenizer(parser: ArgumentParser) -> Run:
    """Train a byte-level BPE tokenizer on text, without network access.

        lightning prepare tokenizer tokenizer texts/ more.jsonl --vocab_size 4096

    The command accepts the same sources as ``lightning prepare text``. The folder that it writes can be given to the option
    ``--tokenizer`` of that command, and transformers' AutoTokenizer loads it.

    ``--chat`` adds the chat template ChatML, which ``lightning prepare text`` needs for dialogues, and ``lightning chat`` uses:

        lightning prepare tokenizer tokenizer texts/ --chat
    """
    parser.add_argument("target", type=Path, help="folder for the tokenizer")
    parser.add_argument(
        "sources",
        nargs="+",
        help="text files, tables (.jsonl, .json, .csv, .tsv, .parquet), folders, hub:NAME[:CONFIG[:SPLIT]]",
    )
    parser.add_argument("--vocab_size", type=int, default=4096, help="number of tokens (default: 4096)")
    parser.add_argument("--column", default="text", help="column of tables with the texts or dialogues (default: text)")
    parser.add_argument("--chat", action="store_true", help="add a chat template (default: none)")

    def run(args: Namespace) -> None:
        from lightning_mhla.system.files import rebuilt_folder
        from mhla_tasks.language.corpus import read_documents
        from mhla_tasks.language.dialogues import text_of
        from mhla_tasks.language.tokenizer import save_tokenizer, train_tokenizer

        texts = map(text_of, read_documents(args.sources, args.column))
        trained = train_tokenizer(texts, args.vocab_size, args.chat)
        with rebuilt_folder(args.target) as aside:
            save_tokenizer(trained, aside)
        _say(f"{len(trained):,} tokens in {args.target}")
        if len(trained) < args.vocab_size:
            _say(
                f"the texts are too short for {args.vocab_size:,} tokens; use --model.vocab_size={len(trained)} in training"
            )

    return run


def text(parser: ArgumentParser) -> Run:
    """Tokenize text once into shards for training with any sequence length.

        lightning prepare text shards texts/ more.jsonl data.parquet --tokenizer gpt2 --prefix train
        lightning prepare text shards hub:HuggingFaceFW/fineweb-edu:sample-10BT --tokenizer TOKENIZER_FOLDER

    A source is one of these; files may be compressed (.gz, .bz2, .xz, .zst):

    * text file, which is one document;
    * table (.jsonl, .json, .csv, .tsv, .parquet) with one document per row, in the column that --column names;
    * folder of text files and tables;
    * hub:NAME[:CONFIG[:SPLIT]], a data set on the Hugging Face Hub, which is streamed.

    Where the column holds a list of messages with role and content, the document is a dialogue: the chat template of the
    tokenizer turns it into text.

    Text is UTF-8, or UTF-16 or UTF-32 with a byte order mark. Rows without a text are skipped. In folders, the command also
    skips hidden and binary files, tables without the column, and files in a different encoding. It prints the number of skipped
    rows and files.

    Tokenization uses all CPU cores. A shard receives its name when it is complete, so the same command resumes after an
    interruption. The tokenizer is saved in the folder tokenizer/ below the target.
    """
    parser.add_argument("target", type=Path, help="folder for the shards")
    parser.add_argument(
        "sources",
        nargs="+",
        help="text files, tables (.jsonl, .json, .csv, .tsv, .parquet), folders, hub:NAME[:CONFIG[:SPLIT]]",
    )
    parser.add_argument("--tokenizer", required=True, help="folder with a tokenizer, or a model on the hub")
    parser.add_argument("--prefix", default="train", help="prefix of the shards' names (default: train)")
    parser.add_argument("--column", default="text", help="column of tables with the texts or dialogues (default: text)")
    parser.add_argument("--skip", type=int, default=0, help="number of documents to skip at the start (default: 0)")
    parser.add_argument("--limit", type=int, help="maximum number of documents (default: all)")
    parser.add_argument(
        "--run_characters", type=int, default=4_000_000, help="characters per sample (default: 4000000)"
    )
    parser.add_argument("--runs_per_shard", type=int, default=16, help="samples per shard (default: 16)")
    _forced(parser)
    parser.add_argument(
        "--control_tokens",
        action="store_true",
        help="encode the spelling of a control token in a text, such as <|endoftext|>, as this token (default: as text)",
    )

    def run(args: Namespace) -> None:
        from lightning_mhla.data import ShardReader
        from mhla_tasks.language.prepare import write_token_shards
        from mhla_tasks.language.token_shards import ShardRuns
        from mhla_tasks.language.tokenizer import load_tokenizer

        paths = write_token_shards(
            args.target, args.sources, load_tokenizer(args.tokenizer), args.prefix, args.column, args.run_characters,
            args.runs_per_shard, args.skip, args.limit, args.control_tokens, args.force,
        )  # fmt: skip
        runs = ShardRuns(ShardReader(paths))
        _say(f"{sum(runs.lengths):,} tokens in {_describe(paths)}")

    return run


def captions(parser: ArgumentParser) -> Run:
    """Pack a folder of images with captions into WebDataset shards.

        lightning prepare captions photos/train shards --prefix train

    The source folder contains images (JPEG, PNG, WebP) at any depth. The caption of an image such as 17.jpg is in 17.txt or
    17.json in the same folder. Alternatively, the source folder can contain a metadata.jsonl with a file_name and a caption on
    each line. Every image is decoded to check it, and copied byte for byte, in a random order that ``--seed`` determines.
    Images that cannot be decoded or lack a caption are skipped with a warning. The option ``--max_skipped`` limits their
    number. The same command resumes after an interruption.
    """
    _captioned_folder(parser, "images", 1000)

    def run(args: Namespace) -> None:
        from lightning_mhla.data.images import EXTENSIONS, decode_image
        from lightning_mhla.data.pack import pack_captioned

        paths, skipped = pack_captioned(args.source, EXTENSIONS, decode_image, args.caption_key, _packing(args))
        _report(paths, "images", skipped)

    return run


def caption_latents(parser: ArgumentParser) -> Run:
    """Encode images and captions into latent shards, for training without VAE and text encoder.

        lightning prepare caption-latents 'shards/train-*.tar' latents --model Efficient-Large-Model/Sana_600M_512px_diffusers
        torchrun --nproc-per-node 8 -m mhla_tasks prepare caption-latents photos latents --model SANA --height 1024 --width 1024

    The source is WebDataset shards or a folder. The caption of an image such as 17.jpg is in 17.txt or 17.json. Images are
    scaled to cover the given size and cropped at the center. SANA's autoencoder encodes the images, and its text encoder
    encodes the captions. Latents and embeddings are stored in float16. Images that cannot be read or lack a caption are skipped
    with a warning. The option ``--max_skipped`` limits their number.

    Processes of torchrun or srun divide the shards among them, and each uses the GPU of its local rank. A shard receives its
    name when it is complete, so the same command resumes after an interruption, with any number of processes.
    """
    parser.add_argument("source", help="shards of images and captions, or a folder of them")
    parser.add_argument("target", type=Path, help="folder for the latent shards")
    parser.add_argument(
        "--model",
        required=True,
        help="folder or hub name of a diffusers SANA pipeline: autoencoder, text encoder, tokenizer",
    )
    parser.add_argument("--height", type=int, help="height of an image in pixels (default: 512)")
    parser.add_argument("--width", type=int, help="width of an image in pixels (default: 512)")
    parser.add_argument(
        "--buckets",
        nargs="+",
        metavar="HEIGHTxWIDTH",
        help="sizes in place of --height and --width, such as 512x512 384x640; an image uses that of the closest aspect ratio",
    )
    _caption_key(parser)
    parser.add_argument(
        "--text_length", type=int, default=300, help="maximum number of tokens of a caption (default: 300)"
    )
    parser.add_argument(
        "--instruction",
        default="sana",
        help="text before each caption; sana for that of SanaPipeline, empty for none (default: sana)",
    )
    _shards(parser, "images", 1000)
    _skipping(parser, "images")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")

    def run(args: Namespace) -> None:
        from lightning_mhla.data.images import EXTENSIONS
        from lightning_mhla.generative.codecs import ImageCodec
        from lightning_mhla.system.processes import process_device, process_ranks
        from mhla_tasks.captioned.encoded import encode_samples, open_source
        from mhla_tasks.captioned.text import TextConfig, make_encoder
        from mhla_tasks.text_to_image.buckets import parse_buckets
        from mhla_tasks.text_to_image.sources import CaptionedImages

        (rank, world, _), device = process_ranks(), process_device(args.device)
        if args.buckets and (args.height, args.width) != (None, None):
            raise ValueError("--buckets gives all sizes; leave out --height and --width")
        args.height, args.width = (512 if side is None else side for side in (args.height, args.width))
        sizes = parse_buckets(args.buckets) if args.buckets else [(args.height, args.width)]
        codec = ImageCodec(args.model)
        for size in sizes:
            codec.latent_size(*size)
        source = open_source(
            args.source, args.target, "image", EXTENSIONS, args.caption_key, lambda files: CaptionedImages(files, sizes)
        )
        encoder = make_encoder(TextConfig(args.model, args.text_length, args.instruction or None), None)
        options = ("height", "width", "model", "caption_key", "text_length", "instruction", "buckets")
        made_with = {name: getattr(args, name) for name in options}
        paths, skipped = encode_samples(
            source, made_with, args.target, codec.encode, encoder, args.prefix, args.per_shard, device, args.max_skipped,
            (rank, world), args.force,
        )  # fmt: skip
        _report(paths, "images", skipped, (rank, world))

    return run


def clips(parser: ArgumentParser) -> Run:
    """Pack a folder of videos with captions into WebDataset shards.

        lightning prepare clips clips/train shards --prefix train

    The source folder contains MP4 files at any depth. The caption of a video such as 17.mp4 is in 17.txt or 17.json in the same
    folder. The files are copied byte for byte, in a random order that ``--seed`` determines. Videos that
    are truncated, cannot be decoded at their beginning or their end, or lack a caption are skipped with a warning. The option
    ``--max_skipped`` limits their number. The same command resumes after an interruption.
    """
    _captioned_folder(parser, "videos", 100)

    def run(args: Namespace) -> None:
        from lightning_mhla.data.pack import pack_captioned
        from mhla_tasks.video.clips import check_video
        from mhla_tasks.video.sources import VIDEO

        paths, skipped = pack_captioned(args.source, (VIDEO,), check_video, args.caption_key, _packing(args))
        _report(paths, "videos", skipped)

    return run


def clip_latents(parser: ArgumentParser) -> Run:
    """Encode clips and captions into latent shards, for training without the VAE and the text encoder.

        lightning prepare clip-latents 'clips/train-{0000..0099}.tar' latents --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers
        torchrun --nproc-per-node 8 -m mhla_tasks prepare clip-latents clips latents --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers

    The source is WebDataset shards or a folder. The caption of a video such as 17.mp4 is in 17.txt or 17.json. Wan's VAE
    encodes a clip from the middle of every video, and its text encoder UMT5 encodes the caption. Latents and embeddings are
    stored in float16. Videos that cannot be read, are too short or lack a caption are skipped with a warning. The option
    ``--max_skipped`` limits their number.

    Processes of torchrun or srun divide the shards among them, and each uses the GPU of its local rank. A shard receives its
    name when it is complete, so the same command resumes after an interruption, with any number of processes.
    """
    parser.add_argument("source", help="shards of videos and captions, or a folder of them")
    parser.add_argument("target", type=Path, help="folder for the latent shards")
    parser.add_argument(
        "--model", required=True, help="folder or hub name of a diffusers Wan pipeline: VAE, UMT5, tokenizer"
    )
    parser.add_argument("--frames", type=int, default=81, help="frames of a clip (default: 81)")
    parser.add_argument("--height", type=int, default=480, help="height of a clip in pixels (default: 480)")
    parser.add_argument("--width", type=int, default=800, help="width of a clip in pixels (default: 800)")
    parser.add_argument("--fps", type=float, default=16.0, help="frames per second of a clip (default: 16)")
    _caption_key(parser)
    parser.add_argument(
        "--text_length", type=int, default=512, help="maximum number of tokens of a caption (default: 512)"
    )
    parser.add_argument(
        "--text_width", type=int, help="width of a token's embedding; an encoder with a different width is an error"
    )
    _shards(parser, "videos", 100)
    _skipping(parser, "videos")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")

    def run(args: Namespace) -> None:
        from lightning_mhla.generative.codecs import ClipCodec
        from lightning_mhla.system.processes import process_device, process_ranks
        from mhla_tasks.captioned.encoded import encode_samples, open_source
        from mhla_tasks.captioned.text import TextConfig, make_encoder
        from mhla_tasks.video.sources import VIDEO, CaptionedClips

        (rank, world, _), device = process_ranks(), process_device(args.device)
        size = {"frames": args.frames, "height": args.height, "width": args.width}
        source = open_source(
            args.source,
            args.target,
            "video",
            (VIDEO,),
            args.caption_key,
            lambda files: CaptionedClips(files, **size, fps=args.fps),
        )
        codec = ClipCodec(args.model)
        codec.latent_size(*size.values())
        captions = make_encoder(TextConfig(args.model, args.text_length), args.text_width)
        encoding = {
            "fps": args.fps,
            "model": args.model,
            "caption_key": args.caption_key,
            "text_length": args.text_length,
        }
        paths, skipped = encode_samples(
            source, {**size, **encoding}, args.target, codec.encode, captions, args.prefix, args.per_shard, device,
            args.max_skipped, (rank, world), args.force,
        )  # fmt: skip
        _report(paths, "videos", skipped, (rank, world))

    return run
