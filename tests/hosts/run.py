"""Run the test suites of transformers, peft, timm and diffusers on models of this project. No copy of them is stored here.

    python tests/hosts/run.py [transformers peft timm diffusers] [--checkout LIBRARY=FOLDER] [pytest's arguments]

The sources are those of the installed versions, downloaded from the package index. Files that are missing there
are taken from a checkout of the library's repository, if one is named:

- transformers: the distribution has the modeling, configuration and training tests; a checkout also has the generation
  tests. Its export tests change with every commit of its exporters; ``transformers_models.py`` calls the exporters of the
  installed version itself.
- diffusers: the distribution has no model tests, so these need a checkout.

The other files in this folder define which models are tested, and which tests are omitted and why.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent

ABSENT = {
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
}
"""Modules that transformers' common tests import and its source distribution does not hold."""

PEFT_MODELS = re.compile(r"^PEFT_DECODER_MODELS_TO_TEST = \[.*?^\]", re.MULTILINE | re.DOTALL)


def download(library: str, folder: Path) -> Path:
    """Download the sources of an installed library.

    Args:
        library: name of the library on the package index.
        folder: folder to unpack into.

    Returns:
        The unpacked folder.
    """
    options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(folder)]
    wanted = f"{library}=={version(library)}"
    # pip also builds the metadata, which may fail; the file is there by then
    subprocess.run([sys.executable, "-m", "pip", "download", *options, wanted], check=False)
    (archive,) = folder.glob(f"{library}-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return next(path for path in folder.glob(f"{library}-*") if path.is_dir())


def transformers(sources: Path, checkout: Path | None) -> list[str]:
    """Add our models to transformers' tests, and return the test files to run."""
    tests = sources / "tests"
    if checkout is not None and not (tests / "generation").exists():
        shutil.copytree(checkout / "tests" / "generation", tests / "generation")
    for name, text in ABSENT.items():
        if not (tests / name).is_file():
            (tests / name).parent.mkdir(exist_ok=True)
            (tests / name).parent.joinpath("__init__.py").touch()
            (tests / name).write_text(text)
    (tests / "__init__.py").touch()
    shutil.copy(HERE / "transformers_models.py", tests / "test_ours.py")
    return ["tests/test_ours.py"]


def peft(sources: Path, checkout: Path | None) -> list[str]:
    """Replace Llama by our language model in peft's tests of decoders, and return the test files to run."""
    tests = sources / "tests"
    (tests / "__init__.py").touch()
    folder = sources / "tiny-random-LlamaForCausalLM"
    subprocess.run([sys.executable, str(HERE / "peft_models.py"), str(folder)], check=True)
    path = tests / "test_decoder_models.py"
    text, count = PEFT_MODELS.subn(f"PEFT_DECODER_MODELS_TO_TEST = [{str(folder)!r}]", path.read_text())
    if count != 1:
        raise ValueError(f"{path} has no list of models")
    path.write_text(text)
    shutil.copy(HERE / "peft_models.py", tests / "conftest.py")
    return ["tests/test_decoder_models.py", "-k", "parametrized or tiny-random-LlamaForCausalLM"]


def timm(sources: Path, checkout: Path | None) -> list[str]:
    """Add the models of this package to timm's tests of models, and return the test files to run.

    Tests of TorchScript are omitted, because it does not support annotations such as ``Tensor | None``. The architecture
    ``mhla_swapped`` is omitted, because timm can build it only from the folder of a swapped model.
    """
    tests = sources / "tests"
    path = tests / "test_models.py"
    path.write_text(path.read_text().replace("NON_STD_FILTERS = [", "NON_STD_FILTERS = ['mhla_deit*',", 1))
    conftest = tests / "conftest.py"
    conftest.write_text(f"import lightning_mhla.timm\n{conftest.read_text()}")
    return ["tests/test_models.py", "-k", "(mhla or ravlt or mavit) and not torchscript and not mhla_swapped"]


def diffusers(sources: Path, checkout: Path | None) -> list[str]:
    """Add swapped models to diffusers' tests, and return the test files to run.

    Raises:
        ValueError: if there is no checkout.
    """
    if checkout is None:
        raise ValueError("diffusers' source distribution holds no tests of models: give --checkout diffusers=FOLDER")
    shutil.rmtree(sources / "tests", ignore_errors=True)
    shutil.copytree(checkout / "tests", sources / "tests")
    target = sources / "tests" / "models" / "transformers" / "test_ours.py"
    shutil.copy(HERE / "diffusers_models.py", target)
    return [str(target.relative_to(sources))]


SUITES = {"transformers": transformers, "peft": peft, "timm": timm, "diffusers": diffusers}


def run(library: str, checkout: Path | None, rest: list[str]) -> int:
    """Run the tests of one library, and return the exit status."""
    with tempfile.TemporaryDirectory() as name:
        sources = download(library, Path(name))
        files = SUITES[library](sources, checkout)
        for own in ("src", library):  # the installed library is tested, not its sources
            shutil.rmtree(sources / own, ignore_errors=True)
        (sources / "pytest.ini").write_text("[pytest]\naddopts = -q --import-mode=prepend\n")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", *files, *rest]
        return subprocess.run(command, cwd=sources, env=environment, check=False).returncode


def main() -> int:
    """Run the tests of the libraries that the command line names, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", help="suites to run (default: all whose tests are available)")
    parser.add_argument("--checkout", action="append", default=[], metavar="LIBRARY=FOLDER")
    args, rest = parser.parse_known_args()
    checkouts = {name: Path(folder).resolve() for name, _, folder in (each.partition("=") for each in args.checkout)}
    if unknown := {*args.libraries, *checkouts} - set(SUITES):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(SUITES)}")
    chosen = args.libraries or [name for name in SUITES if name != "diffusers" or name in checkouts]
    status = 0
    for library in chosen:
        sys.stdout.write(f"\n{library} {version(library)}\n")
        sys.stdout.flush()
        status = run(library, checkouts.get(library), rest) or status
    return status


if __name__ == "__main__":
    sys.exit(main())
