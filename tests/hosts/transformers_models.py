"""Our language model in four kinds, and swapped models of Llama, BERT and ViT, in transformers' common tests.

Tests that cannot apply are switched off by transformers' own flags, as for its recurrent models: attention matrices
(``has_attentions``), decoding that crops a cache (``_is_stateful``: assisted, prompt lookup), and static caches
(``is_compileable``). :class:`Exported` tests the export by the exporters of transformers.
"""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Iterator
from typing import Any

import torch
from mhla_tasks.language import MHLAConfig, MHLAForCausalLM
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)
from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter
from transformers.testing_utils import torch_device

from lightning_mhla import AttentionConfig, swap_attention

from .generation.test_utils import GenerationTesterMixin
from .test_configuration_common import ConfigTester
from .test_modeling_common import ModelTesterMixin, floats_tensor, ids_tensor
from .test_training_mixin import TrainingTesterMixin

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "initializer_range": 0.02,
}  # fmt: skip


class Exported:
    """Tests of exporting each model class by transformers' exporters, including the exported model's outputs."""

    def _exported(self, exporter: Any, settings: Any) -> Iterator[tuple[Any, dict[str, Any], torch.Tensor]]:
        """Yield an exported program for each model class, its inputs, and the first output of the model for them."""
        for dynamic in (False, True):
            for model_class in self.all_model_classes:
                config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
                model = model_class(config).to(torch_device).eval()
                options = {"use_cache": False} if hasattr(config, "num_key_value_heads") else {}
                with torch.no_grad():
                    wanted = model(**inputs, **options)[0]
                program, _ = exporter().export_program(model, {**inputs, **options}, settings(dynamic=dynamic))
                yield program, inputs, wanted

    def test_export_by_dynamo(self) -> None:
        for program, inputs, wanted in self._exported(DynamoExporter, DynamoConfig):
            found = program.module()(**inputs)
            first = next(iter(found.values())) if isinstance(found, dict) else found[0]
            torch.testing.assert_close(first, wanted, atol=1e-5, rtol=1e-4)

    def test_export_to_onnx(self) -> None:
        import onnxruntime

        for program, inputs, wanted in self._exported(OnnxExporter, OnnxConfig):
            with tempfile.TemporaryDirectory() as folder:
                path = f"{folder}/model.onnx"
                OnnxExporter.save_program(program, path)
                session = onnxruntime.InferenceSession(path)
                found = session.run(None, {taken.name: inputs[taken.name].numpy() for taken in session.get_inputs()})
            torch.testing.assert_close(torch.tensor(found[0]), wanted, atol=1e-4, rtol=1e-3)


class OwnTester:
    """Provider of the configuration and the inputs of our language model for the tests."""

    batch_size, seq_length, vocab_size, is_training, use_labels = 3, 7, 99, True, True
    hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, intermediate_size = 32, 2, 4, 2, 64

    def __init__(self, parent: Any, kind: str, mixing: str, tie: bool) -> None:
        self.parent, self.kind, self.mixing, self.tie = parent, kind, mixing, tie

    def get_config(self) -> Any:
        """Return the configuration."""
        attention = AttentionConfig(
            kind=self.kind, mixing=self.mixing, block_size=4, normalize=False, rotary=True, gate=True
        )
        config = MHLAConfig(
            vocab_size=99, dim=32, depth=2, heads=4, key_value_heads=2, mlp_width=64, context=512, attention=attention,
            tie_word_embeddings=self.tie, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        config.layer_types = ["linear_attention"] * 2
        return config

    def prepare_config_and_inputs_for_common(self) -> Any:
        """Return the configuration and the inputs."""
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        mask = torch.tril(torch.ones_like(ids).to(torch_device))
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


class Own(Exported, ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin):
    """Tests of our language model."""

    all_model_classes = all_generative_model_classes = (MHLAForCausalLM,)
    has_attentions = test_missing_keys = False

    def setUp(self) -> None:
        self.model_tester = OwnTester(self, *self.chosen)
        names = ["hidden_size", "num_hidden_layers", "num_attention_heads"]
        self.config_tester = ConfigTester(self, config_class=MHLAConfig, dim=36, heads=4, common_properties=names)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()

    def _check_past_key_values_for_generate(
        self, batch_size: int, past_key_values: Any, seq_length: int, config: Any
    ) -> None:
        assert past_key_values.get_seq_length() == seq_length
        lengths = [len(state.lengths) for state in past_key_values.layers]
        assert lengths == [batch_size] * config.num_hidden_layers

    def _check_caches_are_equal(self, first: Any, second: Any) -> None:
        for one, two in zip(first.layers, second.layers, strict=True):
            assert one.lengths == two.lengths
            for a, b in zip(vars(one).values(), vars(two).values(), strict=True):
                if isinstance(a, torch.Tensor) and a.shape == b.shape:
                    torch.testing.assert_close(a, b)


class ExponentialTest(Own, unittest.TestCase):
    chosen = ("mhla", "exponential", True)


class DenseTest(Own, unittest.TestCase):
    chosen = ("mhla", "dense", True)


class SoftmaxTest(Own, unittest.TestCase):
    chosen = ("softmax", "dense", True)


class UntiedLinearTest(Own, unittest.TestCase):
    chosen = ("linear", "dense", False)


class WindowTest(Own, unittest.TestCase):
    chosen = ("mhla_window", "exponential", True)


class SwappedTester:
    """Provider of the configuration and the inputs of a swapped model for the tests."""

    batch_size, seq_length, vocab_size, is_training, use_labels = 3, 7, 99, True, True
    hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, intermediate_size = 32, 2, 4, 2, 64
    num_labels = 3

    def __init__(self, parent: Any) -> None:
        self.parent = parent
        if parent.plain.model_type == "vit":
            self.seq_length = 65  # tokens of an image, and the class token

    def get_config(self) -> Any:
        """Return the configuration, which records the swap."""
        model = self.parent.hosts[0](self.parent.plain)
        swap_attention(model, self.parent.attention)
        return model.config

    def prepare_config_and_inputs_for_common(self) -> Any:
        """Return the configuration and the inputs."""
        config = self.get_config()
        if self.parent.plain.model_type == "vit":
            return config, {"pixel_values": floats_tensor([3, 3, 16, 16])}
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return config, {"input_ids": ids, "attention_mask": torch.tril(torch.ones_like(ids).to(torch_device))}


LEFT_OUT = {
    "test_bc_torch_dtype": "float16, in which sums over many tokens overflow, is rejected",
    "test_keep_in_fp32_modules": "float16 is rejected",
    "test_capture_outputs_decorator": "replaced layers have no attention weights",
    "test_generate_compilation_all_outputs": "replaced layers have no attention weights",
    "test_load_with_mismatched_shapes": "loads by AutoModel without trust_remote_code, which is an error",
    "test_model_weights_reload_no_missing_tied_weights": "missing weights of the new attention are an error",
    "test_base_model_prefix_loads_base_weights": "builds the inner model by its own class, which does not know the swap",
    "test_inherits_generation_mixin": "reads the names of direct base classes",
    "test_model_get_set_embeddings": "ViT's own test replaces it: its embedding is a convolution",
}
"""Tests that cannot apply to swapped models, each with the reason. transformers' flags omit more, see above."""


class Swapped(Exported, ModelTesterMixin):
    """Tests of a swapped model. ``hosts`` holds the transformers classes, and ``attention`` configures the new attention."""

    has_attentions = test_resize_embeddings = False
    hosts: tuple[Any, ...]
    plain: Any
    attention: AttentionConfig

    @classmethod
    def setUpClass(cls) -> None:
        kinds = []
        for host in cls.hosts:
            model = host(cls.plain)
            swap_attention(model, cls.attention)
            kinds.append(type(model))
        cls.all_model_classes = tuple(kinds)
        cls.all_generative_model_classes = tuple(kind for kind in kinds if kind.can_generate())

    def setUp(self) -> None:
        if reason := LEFT_OUT.get(self._testMethodName):
            self.skipTest(reason)
        self.model_tester = SwappedTester(self)

    def _check_past_key_values_for_generate(
        self, batch_size: int, past_key_values: Any, seq_length: int, config: Any
    ) -> None:
        assert past_key_values.get_seq_length() == seq_length
        assert len(past_key_values.layers) == config.num_hidden_layers

    def _check_caches_are_equal(self, first: Any, second: Any) -> None:
        assert first.get_seq_length() == second.get_seq_length()


class SwappedLlamaTest(Swapped, GenerationTesterMixin, TrainingTesterMixin, unittest.TestCase):
    hosts = (LlamaForCausalLM, LlamaModel, LlamaForSequenceClassification)
    plain = LlamaConfig(
        vocab_size=99,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **SIZES,
    )
    attention = AttentionConfig(block_size=4, mixing="exponential")


class SwappedBertTest(Swapped, unittest.TestCase):
    hosts = (BertModel, BertForMaskedLM, BertForSequenceClassification)
    plain = BertConfig(
        vocab_size=99, max_position_embeddings=512, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0, **SIZES
    )
    attention = AttentionConfig(block_size=4)


class SwappedViTTest(Swapped, unittest.TestCase):
    hosts = (ViTModel, ViTForImageClassification)
    plain = ViTConfig(
        image_size=16, patch_size=2, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0, num_labels=3, **SIZES
    )
    attention = AttentionConfig(block_grid=[2, 2])
