"""Lists of prompts of GenEval, DPG-Bench and MJHQ-30K, the folders that they read, and CLIP's score."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mhla_tasks.captioned.requests import PromptRequest, RequestedSamples
from mhla_tasks.commandline import registry
from mhla_tasks.text_to_image import ClipScore
from mhla_tasks.text_to_image.layouts import arrange
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizerFast

PROMPTS = {"one": "a red three", "two": "a blue seven"}


def draw(source: RequestedSamples, folder: Path) -> None:
    """Write images whose brightness is their index."""
    folder.mkdir()
    for index in range(len(source)):
        Image.new("RGB", (4, 4), (index, index, index)).save(folder / source[index]["file"])


def level(path: Path, x: int = 0, y: int = 0) -> int:
    return int(Image.open(path).getpixel((x, y))[0])  # type: ignore[index]


def test_geneval(tmp_path: Path) -> None:
    lines = [json.dumps({"tag": "single_object", "prompt": prompt}) for prompt in PROMPTS.values()]
    (tmp_path / "list.jsonl").write_text("\n".join(lines) + "\n")
    draw(RequestedSamples(PromptRequest(str(tmp_path / "list.jsonl"), 4), [], "png"), tmp_path / "images")
    arguments = [str(tmp_path / "images"), str(tmp_path / "out"), "--prompts", str(tmp_path / "list.jsonl")]
    registry.run("arrange", [*arguments, "--layout", "geneval"])
    assert (tmp_path / "out/00001/metadata.jsonl").read_text() == lines[1] + "\n"
    levels = [level(tmp_path / f"out/0000{prompt}/samples/000{number}.png") for prompt in (0, 1) for number in range(4)]
    assert levels == list(range(8))
    (tmp_path / "images/00001-0.png").unlink()
    with pytest.raises(SystemExit, match="draw all prompts of the list first"):
        registry.run("arrange", [*arguments, "--layout", "geneval"])


def test_dpg_and_mjhq(tmp_path: Path) -> None:
    (tmp_path / "prompts").mkdir()
    for name, prompt in PROMPTS.items():
        (tmp_path / f"prompts/{name}.{'TXT' if name == 'two' else 'txt'}").write_text(prompt)
    draw(RequestedSamples(PromptRequest(str(tmp_path / "prompts"), 4), [], "png"), tmp_path / "images")
    arguments = [str(tmp_path / "images"), str(tmp_path / "dpg"), "--prompts", str(tmp_path / "prompts")]
    registry.run("arrange", [*arguments, "--layout", "dpg"])
    tiles = [level(tmp_path / "dpg/two.png", x, y) for y in (0, 4) for x in (0, 4)]
    assert tiles == [4, 5, 6, 7], "as the program crops them: right, then below"
    (tmp_path / "meta.json").write_text(
        json.dumps({name: {"category": "any", "prompt": text} for name, text in PROMPTS.items()})
    )
    assert RequestedSamples(PromptRequest(str(tmp_path / "meta.json")), [], "png")[1]["caption"] == PROMPTS["two"]
    arguments = [str(tmp_path / "images"), str(tmp_path / "mjhq"), "--prompts", str(tmp_path / "meta.json")]
    registry.run("arrange", [*arguments, "--layout", "mjhq"])
    assert level(tmp_path / "mjhq/two.png") == 4
    for name in PROMPTS:
        (tmp_path / f"images/{name}-3.png").unlink()
    with pytest.raises(SystemExit, match="has 3 images of one, DPG-Bench needs 4"):
        registry.run(
            "arrange",
            [str(tmp_path / "images"), str(tmp_path / "x"), "--prompts", str(tmp_path / "prompts"), "--layout", "dpg"],
        )
    (tmp_path / "wrong.jsonl").write_text('{"text": 1}')
    with pytest.raises(ValueError, match="line 1 has no 'prompt', only"):
        RequestedSamples(PromptRequest(str(tmp_path / "wrong.jsonl")), [], "png")


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("mjhq", "../ESCAPED"), ("mjhq", "/tmp/ESCAPED"), ("mjhq", "a/b"), ("mjhq", ".."), ("mjhq", ".hidden"), ("mjhq", ""),
        ("mjhq", "nul\0"), ("mjhq", "x" * 300), ("mjhq", "\ud800"), ("dpg", "../ESCAPED"), ("dpg", "../../x/ESCAPED"),
    ],
)  # fmt: skip
def test_names_lead_out_of_no_folder(layout: str, name: str, tmp_path: Path) -> None:
    images = tmp_path / "bench/images"
    images.mkdir(parents=True)
    for folder in (images, images.parent):
        for number in range(4):
            Image.new("RGB", (4, 4)).save(folder / f"ESCAPED-{number}.png")
    (tmp_path / "prompts.json").write_text(json.dumps({name: {"prompt": "a"}}))
    there = sorted(tmp_path.rglob("*"))
    options = ["--prompts", str(tmp_path / "prompts.json"), "--layout", layout]
    with pytest.raises(SystemExit, match="cannot be a file name"):
        registry.run("arrange", [str(images), str(tmp_path / "bench/x/y"), *options])
    assert sorted(tmp_path.rglob("*")) == there


def test_a_list_of_lines_is_checked_as_well(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "images/one-0.png")
    for lines, message in {"../ESCAPED\ta": "cannot be a file name", "one\ta\none\tb": "occurs twice"}.items():
        (tmp_path / "prompts.txt").write_text(lines)
        with pytest.raises(ValueError, match=message):
            arrange(tmp_path / "images", tmp_path / "prompts.txt", "mjhq", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_lead_neither_to_other_files_nor_through_them(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "images/one-0.png").symlink_to(tmp_path / "secret")
    (tmp_path / "prompts.json").write_text(json.dumps({"one": {"prompt": "a"}}))
    with pytest.raises(ValueError, match=r"one-0.png is not a JPEG, PNG or WebP image"):
        arrange(tmp_path / "images", tmp_path / "prompts.json", "mjhq", tmp_path / "out")
    (tmp_path / "images/one-0.png").unlink()
    Image.new("RGB", (4, 4)).save(tmp_path / "images/one-0.png")
    (tmp_path / "out/one.png").symlink_to(tmp_path / "secret")
    arrange(tmp_path / "images", tmp_path / "prompts.json", "mjhq", tmp_path / "out")
    assert (tmp_path / "secret").read_text() == "mine"
    assert level(tmp_path / "out/one.png") == 0


LAYOUTS = ["geneval", "dpg", "mjhq"]


def prepare(folder: Path, prompts: int, per_prompt: int = 4) -> Path:
    """Write a list of prompts and their images below a folder, and return the path of the list."""
    path = folder / f"{prompts}-prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"prompt {number}"}) + "\n" for number in range(prompts)))
    draw(RequestedSamples(PromptRequest(str(path), per_prompt), [], "png"), folder / "images")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_of_an_earlier_call_are_not_mixed_with_new_ones(layout: str, tmp_path: Path) -> None:
    prompts = prepare(tmp_path, 3)
    assert arrange(tmp_path / "images", prompts, layout, tmp_path / "out") == 3
    complete = contents(tmp_path / "out")
    # The same call again, after one that was stopped: in a system's folder, and beside an unfinished file.
    (tmp_path / "out/.DS_Store").touch()
    path = sorted((tmp_path / "out").rglob("*.png"))[0]
    path.with_name(f"{path.name}.part").touch()
    arrange(tmp_path / "images", prompts, layout, tmp_path / "out")
    assert contents(tmp_path / "out") == {**complete, ".DS_Store": b""}
    shorter = tmp_path / "shorter.jsonl"
    shorter.write_text(json.dumps({"prompt": "another"}) + "\n")
    # The list is now shorter: 00001 and 00002 would stay.
    with pytest.raises(
        FileExistsError, match=r"out/00001.* choose a new folder, or delete the files of the earlier call"
    ):
        arrange(tmp_path / "images", shorter, layout, tmp_path / "out")
    assert contents(tmp_path / "out") == {**complete, ".DS_Store": b""}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["notes.txt", "00000/other.png", "00000.png/0000.png", "00009.png.part"])
def test_a_target_with_other_files_is_rejected(layout: str, name: str, tmp_path: Path) -> None:
    prompts = prepare(tmp_path, 1)
    (tmp_path / "out" / name).parent.mkdir(parents=True)
    (tmp_path / "out" / name).write_text("mine")
    with pytest.raises(SystemExit, match=rf"out/{name} is not one of the files to write"):
        registry.run(
            "arrange",
            [str(tmp_path / "images"), str(tmp_path / "out"), "--prompts", str(prompts), "--layout", layout],
        )
    assert contents(tmp_path / "out") == {name: b"mine"}


def test_fewer_images_of_each_prompt_are_not_mixed_with_earlier_ones(tmp_path: Path) -> None:
    prompts = prepare(tmp_path, 2)
    arrange(tmp_path / "images", prompts, "geneval", tmp_path / "out")
    for number in range(2):
        (tmp_path / f"images/0000{number}-3.png").unlink()
    with pytest.raises(FileExistsError, match=r"out/00000/samples/0003\.png is not one of the files to write"):
        arrange(tmp_path / "images", prompts, "geneval", tmp_path / "out")
    # The folder of the images is not a target either: mjhq would write beside them.
    with pytest.raises(FileExistsError, match=r"images/00000-0\.png is not one of the files to write"):
        arrange(tmp_path / "images", prompts, "mjhq", tmp_path / "images")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("missing", ["00000-0", "00000-2", "00001-1", "00001-4", "00002-0"])
def test_all_prompts_have_the_same_images(layout: str, missing: str, tmp_path: Path) -> None:
    prompts = prepare(tmp_path, 3, per_prompt=5)
    (tmp_path / f"images/{missing}.png").unlink()
    with pytest.raises(
        FileNotFoundError, match=rf"{missing}\.png is missing; draw all prompts .* same number of images"
    ):
        arrange(tmp_path / "images", prompts, layout, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_images_of_prompts_that_are_not_listed_do_not_count(tmp_path: Path) -> None:
    """The name of a prompt may end like that of an image, and more than nine images are in the order of their numbers."""
    (tmp_path / "prompts.txt").write_text("a\na-1\n")
    draw(RequestedSamples(PromptRequest(str(tmp_path / "prompts.txt"), 11), [], "png"), tmp_path / "images")
    for name in ("b-0", "a-12-0", "a-011", "a"):
        Image.new("RGB", (4, 4), (99, 99, 99)).save(tmp_path / f"images/{name}.png")
    arrange(tmp_path / "images", tmp_path / "prompts.txt", "mjhq", tmp_path / "mjhq")
    assert [level(tmp_path / f"mjhq/{name}.png") for name in ("a", "a-1")] == [0, 11]
    arrange(tmp_path / "images", tmp_path / "prompts.txt", "dpg", tmp_path / "dpg")
    assert [level(tmp_path / "dpg/a-1.png", x, y) for y in (0, 4) for x in (0, 4)] == [11, 12, 13, 14]


@pytest.mark.parametrize("layout", ["dpg", "mjhq"])
@pytest.mark.parametrize("kind", ["EPS", "BMP", "GIF", "PCX"])
def test_no_other_format_is_opened(layout: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was started"))
    (tmp_path / "images").mkdir()
    for number in range(4):
        Image.new("RGB", (4, 4)).save(tmp_path / f"images/one-{number}.png", kind)
    (tmp_path / "prompts.json").write_text(json.dumps({"one": {"prompt": "a"}}))
    with pytest.raises(ValueError, match=r"not .*JPEG, PNG or WebP"):
        arrange(tmp_path / "images", tmp_path / "prompts.json", layout, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("sign", ["\f", "\u2028", "\x85", "\x1c", "\r\n"])
def test_a_line_of_geneval_ends_at_line_feeds_alone(sign: str, tmp_path: Path) -> None:
    line = json.dumps({"prompt": f"one{sign}two"}, ensure_ascii=False)
    (tmp_path / "list.jsonl").write_text(f"{line}\n{line}\n", encoding="utf-8", newline="")
    (tmp_path / "images").mkdir()
    for number in range(2):
        Image.new("RGB", (4, 4)).save(tmp_path / f"images/0000{number}-0.png")
    assert arrange(tmp_path / "images", tmp_path / "list.jsonl", "geneval", tmp_path / "out") == 2
    assert (tmp_path / "out/00001/metadata.jsonl").read_text(encoding="utf-8") == line + "\n"


def save_clip(folder: Path) -> Path:
    """Save a tiny random CLIP, and return its folder."""
    torch.manual_seed(0)
    words = ["<|startoftext|>", "<|endoftext|>", "a</w>", "red</w>", "blue</w>", "three</w>", "seven</w>"]
    tower = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "projection_dim": 4,
    }
    text = {**tower, "vocab_size": len(words), "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1}
    config = CLIPConfig(text_config=text, vision_config={**tower, "image_size": 8, "patch_size": 4}, projection_dim=4)
    CLIPModel(config).save_pretrained(folder)
    tokenizer = CLIPTokenizerFast(vocab={word: number for number, word in enumerate(words)}, merges=[])
    images = CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    CLIPProcessor(images, tokenizer).save_pretrained(folder)
    return folder


def test_clip_score(tmp_path: Path) -> None:
    """Scores agree with the model's own logits, whose scale is known."""
    callback = ClipScore(str(save_clip(tmp_path / "clip")), list(PROMPTS.values()))
    pixels = torch.randint(0, 256, (2, 3, 12, 12), dtype=torch.uint8)
    model, processor = CLIPModel.from_pretrained(callback.model), CLIPProcessor.from_pretrained(callback.model)
    given = processor(text=callback.prompts, images=list(pixels), return_tensors="pt", padding=True)
    with torch.no_grad():
        cosine = model(**given).logits_per_image.diagonal() / model.logit_scale.exp()
    assert callback.score(pixels) == pytest.approx(100 * cosine.clamp(min=0).mean().item(), abs=1e-4)
    with pytest.raises(FileNotFoundError, match="model nowhere is not a folder or hub name of a CLIP model"):
        ClipScore("nowhere", ["a"])._load()
