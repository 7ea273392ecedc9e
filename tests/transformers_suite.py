"""transformers' own common model tests, run on MHLAForCausalLM; nothing of them is kept here.

    python tests/transformers_suite.py [--tests FOLDER] [pytest's arguments]

FOLDER is the folder ``tests`` of transformers' sources. Without it the source distribution of the installed version is
downloaded from the package index; it holds the modeling, configuration and training tests. A checkout also holds the
generation tests, which are run where they are there.

What cannot apply is switched off by transformers' own flags, as its recurrent models do: attention matrices
(``has_attentions``), and a base model without a head (``test_missing_keys``). ``_is_stateful`` leaves out decoding that crops
a cache (assisted, prompt lookup), and ``is_compileable`` static caches.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

LEFT_OUT = {
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
}
"""Modules that the common tests import and the source distribution does not hold."""

HARNESS = """
import unittest

import torch
from mhla_tasks.language import MHLAConfig, MHLAForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.testing_utils import torch_device

from lightning_mhla import AttentionConfig

from .test_configuration_common import ConfigTester
from .test_modeling_common import ModelTesterMixin, ids_tensor
from .test_training_mixin import TrainingTesterMixin

from .generation.test_utils import GenerationTesterMixin

MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["mhla"] = "MHLAForCausalLM"  # or the tests hand no labels over


class Tester:
    batch_size, seq_length, vocab_size, is_training, use_labels = 3, 7, 99, True, True
    hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, intermediate_size = 32, 2, 4, 2, 64

    def __init__(self, parent, kind, mixing, tie):
        self.parent, self.kind, self.mixing, self.tie = parent, kind, mixing, tie

    def get_config(self):
        attention = AttentionConfig(
            kind=self.kind, mixing=self.mixing, block_size=4, normalize=False, rotary=True, gate=True
        )
        config = MHLAConfig(
            vocab_size=99, dim=32, depth=2, heads=4, key_value_heads=2, mlp_width=64, context=512, attention=attention,
            tie_word_embeddings=self.tie, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
        config.layer_types = ["linear_attention"] * 2
        return config

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        mask = torch.tril(torch.ones_like(ids).to(torch_device))
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


class Common(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin):
    all_model_classes = all_generative_model_classes = (MHLAForCausalLM,)
    has_attentions = test_missing_keys = False

    def setUp(self):
        self.model_tester = Tester(self, *self.chosen)
        names = ["hidden_size", "num_hidden_layers", "num_attention_heads"]
        self.config_tester = ConfigTester(self, config_class=MHLAConfig, dim=36, heads=4, common_properties=names)

    def test_config(self):
        self.config_tester.run_common_tests()

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        self.assertEqual(past_key_values.get_seq_length(), seq_length)
        lengths = [len(state.lengths) for state in past_key_values.layers]
        self.assertEqual(lengths, [batch_size] * config.num_hidden_layers)

    def _check_caches_are_equal(self, first, second):
        for one, two in zip(first.layers, second.layers, strict=True):
            self.assertEqual(one.lengths, two.lengths)
            for a, b in zip(vars(one).values(), vars(two).values(), strict=True):
                if isinstance(a, torch.Tensor) and a.shape == b.shape:
                    torch.testing.assert_close(a, b)


class ExponentialTest(Common, unittest.TestCase):
    chosen = ("mhla", "exponential", True)


class DenseTest(Common, unittest.TestCase):
    chosen = ("mhla", "dense", True)


class SoftmaxTest(Common, unittest.TestCase):
    chosen = ("softmax", "dense", True)


class UntiedLinearTest(Common, unittest.TestCase):
    chosen = ("linear", "dense", False)
"""


def download(folder: Path) -> Path:
    """The tests of the installed version's source distribution."""
    asked = f"transformers=={version('transformers')}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-binary",
        ":all:",
    ]
    subprocess.run(
        [*command, "-d", str(folder), asked], check=False
    )  # building its metadata may fail; the file is there
    (archive,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return next(folder.glob("transformers-*/tests"))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, help="folder tests of transformers' sources (default: downloaded)")
    args, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tests = args.tests or download(folder)
        copy = folder / "copy" / "tests"
        shutil.copytree(tests, copy, ignore=shutil.ignore_patterns("models", "quantization", "pipelines", "trainer"))
        (copy / "__init__.py").touch()
        for name, text in LEFT_OUT.items():
            if not (copy / name).is_file():
                (copy / name).parent.mkdir(exist_ok=True)
                (copy / name).parent.joinpath("__init__.py").touch()
                (copy / name).write_text(text)
        (copy / "test_mhla.py").write_text(HARNESS)
        (copy.parent / "pytest.ini").write_text("[pytest]\naddopts = -q --import-mode=prepend\n")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "tests/test_mhla.py", *rest]
        return subprocess.run(command, cwd=copy.parent, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
