"""Fixtures and hooks for all tests: no network, a fixed seed, marks by test file, and no GPU tests without a GPU."""

from __future__ import annotations

import ast
import atexit
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.pop("MHLA_BACKEND", None)
os.environ["OMP_NUM_THREADS"] = "1"  # of the programs that tests start: their threads would compete for the cores

import pytest
import torch
from fork_server import ForkServer

torch.set_num_threads(1)  # the sums of a test must equal those of the programs that it starts
for name, start in {"HF_HOME": "hugging-face-", "MHLA_CACHE": "mhla-"}.items():
    if name not in os.environ:  # workers inherit it from the process that starts them
        os.environ[name] = tempfile.mkdtemp(prefix=start)
        atexit.register(shutil.rmtree, os.environ[name], ignore_errors=True)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
if not torch.cuda.is_available() and find_spec("triton"):
    from triton.runtime import interpreter

    _patch_lang, patched = interpreter._patch_lang, set()

    def patch_once(function: Any) -> Any:
        """Replace the functions of triton.language that a kernel or helper calls, once, where the interpreter does it at each call."""
        if function not in patched:
            patched.add(function)
            _patch_lang(function)
        return interpreter._LangPatchScope()  # holds no changes, so that nothing is restored

    interpreter._patch_lang = patch_once
    scalar_types = cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda kind: scalar_types(
        interpreter.tl.uint64 if kind.scalar.is_ptr() else kind.scalar
    )
    # The interpreter computes every sum and product of int32 indices again in int64. The tensors of tests are too small to
    # overflow; `lightning bench native` checks large ones on a GPU.
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options


STARTS_PROCESSES = {
    "subprocess", "run_cli", "run_in_turn", "fork_server", "server", "num_workers", "kill_at", "cluster",
}  # fmt: skip
"""Names whose use means that a test starts processes, directly or in a function. ``make check`` omits such tests."""

SLOW = (
    "test_cross", "test_cross_graphs",
    "test_forms", "test_causality", "test_ops", "test_benchmarks", "test_hostile_data", "test_language_evaluation",
    "test_run_folder", "test_resume", "test_verdicts", "test_compile", "test_endings", "test_swap_graphs", "test_transforms",
    "test_checkpoint_matrix", "test_language_graphs", "test_checkpoint_choice", "test_video_training", "test_diffusion_training",
    "test_swap_folders", "test_swap_transformers", "test_linearized_settings", "test_encoders", "test_language_peft",
    "test_text_to_image_training", "test_accumulation", "test_resume_options", "test_kinds", "test_data_modules", "test_vlt",
    "test_diffusion_metrics", "test_language_networks", "test_classification", "test_portable", "test_language_transformers",
    "test_block_causal", "test_cli", "test_parallel", "test_linearize_timm", "test_pictures", "test_rejected_start",
    "test_shared_cache", "test_block_causal_graphs", "test_windowed", "test_pretrained",
)  # fmt: skip
"""Test files that take more than ten seconds: interpreted kernels, compilers, fuzzing, lm-eval, complete runs."""

LONGEST = (
    "test_swap_graphs", "test_docs", "test_configs", "test_linearize_command", "test_accumulation",
    "test_benchmarks", "test_transforms", "test_real_weights", "test_sharding", "test_video_training",
    "test_compile", "test_slurm", "test_checkpoint_matrix", "test_run_folder", "test_portable",
    "test_linearize_timm", "test_sweep", "test_distributed", "test_paper", "test_forms", "test_language_evaluation",
    "test_ops", "test_cli", "test_gpu_program", "test_launching", "test_kinds",
)  # fmt: skip
"""Test files that take more than a minute in ``make test`` or ``make thorough``, the longest first. They are started first, so that
no worker has one left when the others are done."""


LONG = (
    "test_accumulation::test_every_callback_of_a_shipped_run_lasts",
    "test_accumulation::test_the_speed_of_tokens_is_in_the_rows_of_the_log",
    "test_assistant_loss::test_two_processes_train_as_one_does",
    "test_benchmarks::test_a_fit_is_measured_beside_a_bare_loop",
    "test_benchmarks::test_a_step_of_linearising_a_1b_llama_is_counted_on_fake_tensors",
    "test_benchmarks::test_architectures_are_measured_by_kind_and_size",
    "test_benchmarks::test_everyday_work_is_measured_in_turn_with_its_peers",
    "test_benchmarks::test_kernels_compile_ahead_of_time_within_their_limits",
    "test_benchmarks::test_losses_are_compared_to_the_last_bit",
    "test_benchmarks::test_tiles_are_measured_one_change_at_a_time",
    "test_benchmarks::test_what_sana_takes_is_counted",
    "test_benchmarks::test_what_wan_takes_is_counted",
    "test_block_causal::test_later_blocks_do_not_change_earlier_ones_in_the_kernels",
    "test_block_causal::test_random_calls_of_the_kernels_agree_with_the_definition",
    "test_block_causal_graphs::test_onnx_takes_other_lengths",
    "test_chat::test_in_a_terminal_a_reply_can_be_stopped",
    "test_chat::test_messages_from_a_pipe",
    "test_checkpoint_choice::test_a_run_that_a_tuner_began_resumes_with_what_it_found",
    "test_checkpoint_choice::test_last_is_the_last_state_whatever_is_monitored",
    "test_checkpoint_matrix::test_killed_and_resumed",
    "test_checkpoint_matrix::test_stopped_moved_and_resumed",
    "test_cli::test_overlays_go_over_every_experiment_and_set_no_lists",
    "test_compile::test_a_compiled_run_is_the_same_run",
    "test_compile::test_compiled_layers_are_sharded",
    "test_compile::test_other_sizes_and_checkpointing",
    "test_configs::test_a_shipped_configuration_from_fit_to_export",
    "test_configs::test_a_shipped_evaluation_scores_all_its_tasks",
    "test_configs::test_a_shipped_overlay_on_one_process",
    "test_cross_benchmark::test_losses_and_times_are_written",
    "test_cross::test_triton_forms_agree_with_the_definition",
    "test_cross_graphs::test_kernels_compile_as_one_graph",
    "test_cross_graphs::test_opcheck",
    "test_data::test_a_program_that_took_a_batch_ends_at_once",
    "test_diffusion_metrics::test_metrics_are_those_of_torch_fidelitys_command",
    "test_diffusion_metrics::test_the_classifier_of_digits_names_those_held_out",
    "test_distributed::test_a_process_that_fails_alone_ends_the_run",
    "test_distributed::test_fsdp_trains_validates_resumes_and_becomes_one_file",
    "test_distributed::test_two_processes_see_the_samples_that_one_sees",
    "test_docs::test_a_page_works_from_top_to_bottom",
    "test_docs::test_every_key_of_the_migration_page_exists",
    "test_doctor::test_this_machine",
    "test_examples::test_a_whole_run_in_plain_python",
    "test_exported_folder::test_a_killed_export_leaves_the_earlier_one",
    "test_former_names::test_a_sweep_may_use_a_former_name",
    "test_forms::test_triton_forms_agree_with_the_definition",
    "test_gpu_program::test_every_part_runs_once",
    "test_guards::test_a_process_that_stands_still_is_named",
    "test_guards::test_all_processes_stop_or_skip_for_one",
    "test_kills::test_kills_lose_nothing",
    "test_kinds::test_kinds_for_images_train_there_and_are_refused_for_text",
    "test_kinds::test_one_command_trains",
    "test_kinds::test_trained_on_packed_documents_it_writes_exports_and_is_scored",
    "test_kinds::test_what_a_kind_cannot_do_is_refused_in_one_line_before_training",
    "test_language_data::test_standard_library_is_split_by_file_and_cached",
    "test_language_evaluation::test_tasks_that_are_not_there",
    "test_language_evaluation::test_three_ways_to_the_same_numbers",
    "test_language_evaluation::test_tools_say_which_checkpoint_they_use",
    "test_language_graphs::test_an_exported_graph_of_fixed_sizes_traces_strictly",
    "test_language_graphs::test_an_exported_graph_takes_other_batches_and_lengths",
    "test_language_graphs::test_onnx_runs_other_batches_and_lengths",
    "test_language_graphs::test_training_compiles_as_one_graph",
    "test_language_networks::test_packed_documents_are_refused_in_one_line",
    "test_language_networks::test_trained_resumed_continued_and_exported",
    "test_language_networks::test_two_processes_shard_it",
    "test_language_processes::test_two_processes_score_as_one_does",
    "test_language_serving::test_the_server_answers_what_the_model_says",
    "test_launching::test_fsdp_resumes_from_one_file_and_writes_one",
    "test_launching::test_lightnings_launcher_resumes_a_run_in_its_folder",
    "test_launching::test_processes_of_notebooks_hand_back_their_weights",
    "test_linearize_command::test_a_language_model_and_the_same_options_again",
    "test_linearize_command::test_a_text_encoder_with_a_budget_after_two_wrong_calls",
    "test_linearize_command::test_a_second_run_that_makes_the_model_worse_is_said_and_its_best_state_exported",
    "test_linearize_command::test_an_image_encoder",
    "test_linearize_command::test_killed_and_called_again_it_ends_with_the_same_weights",
    "test_linearize_timm::test_a_broken_model_on_the_hub_is_named",
    "test_linearize_timm::test_from_a_folder_to_an_export_in_another_process",
    "test_linearize_timm::test_what_is_not_supported_is_one_line",
    "test_linearized_settings::test_from_the_original_to_generation_in_another_process",
    "test_ops::test_opcheck",
    "test_paper::test_a_run_that_fails_ends_the_other_ones",
    "test_paper::test_a_signal_stops_the_runs_too",
    "test_paper::test_a_stopped_row_resumes_from_its_checkpoint",
    "test_paper::test_a_study_trains_each_row_once_and_writes_its_part_of_the_page",
    "test_paper::test_recurrences_agree_and_are_written",
    "test_paper::test_several_rows_at_a_time",
    "test_portable::test_compiled_it_is_the_same",
    "test_portable::test_int8_keeps_the_top_class",
    "test_progress_bar::test_the_bar_of_a_resumed_run_counts_up_to_its_total",
    "test_real_weights::test_smollm2",
    "test_real_weights::test_minilm",
    "test_real_weights::test_minilm_with_many_dense_blocks_for_each_head_does_not_diverge",
    "test_real_weights::test_dinov2",
    "test_rejected_start::test_a_run_resumes_and_evaluates_after_rejected_starts",
    "test_rendezvous::test_a_run_on_one_machine_listens_on_the_loopback_interface_alone",
    "test_run_folder::test_a_damaged_newest_checkpoint_costs_the_steps_since_the_one_before",
    "test_run_folder::test_a_longer_run_goes_on_where_the_shorter_one_ended",
    "test_run_folder::test_a_run_keeps_everything_in_its_folder",
    "test_run_folder::test_a_signal_between_two_halves_of_a_step_loses_nothing",
    "test_run_folder::test_a_signal_loses_nothing",
    "test_run_folder::test_the_best_checkpoint_counts_the_last_validation",
    "test_sequence_parallel::test_processes_together_give_what_one_gives",
    "test_sharding::test_a_checkpoint_of_two_processes_goes_on_with",
    "test_sharding::test_processes_that_share_sequences_train_as_one_does",
    "test_sharding::test_the_default_configuration_shares_sequences",
    "test_sharding::test_the_sharded_average_is_that_of_whole_weights",
    "test_sharding::test_two_processes_train_as_one_does",
    "test_sharding::test_what_cannot_share_sequences_says_so",
    "test_slurm::test_a_signal_and_a_killed_rank_lose_nothing",
    "test_start::test_a_mistake_is_told_in_domains_that_import_large_libraries",
    "test_start::test_packages_that_are_put_off_lack_nothing",
    "test_streamed_training::test_killed_five_times_it_ends_with_the_weights_of_an_undisturbed_run_from_local_files",
    "test_streaming::test_a_pass_that_rests_does_not_fetch_against_the_one_that_moves",
    "test_streaming::test_processes_of_a_machine_share_the_limit",
    "test_streaming::test_what_a_killed_process_left_is_removed",
    "test_swap_cross::test_saved_models_are_the_same_in_a_new_process",
    "test_swap_cross_pictures::test_a_saved_model_is_the_same_in_a_new_process",
    "test_swap_folders::test_a_name_on_the_hub_is_read_from_the_cache",
    "test_swap_folders::test_every_auto_class_opens_it_with_trust",
    "test_swap_folders::test_no_class_opens_it_without_trust",
    "test_swap_folders_pictures::test_what_opens_it_is_right_and_everything_else_fails",
    "test_swap_graphs::test_a_compiled_prompt_is_continued",
    "test_swap_graphs::test_blocks_that_are_compiled_by_themselves",
    "test_swap_graphs::test_decoders_are_one_graph_at_every_length",
    "test_swap_graphs::test_encoders_are_one_graph_at_every_length",
    "test_swap_graphs::test_exported_with_an_open_batch",
    "test_swap_graphs::test_image_models_are_one_graph_at_every_size",
    "test_swap_graphs::test_image_models_are_trained_as_one_graph",
    "test_swap_graphs::test_inductor_at_three_lengths",
    "test_swap_graphs::test_onnx_with_an_open_batch",
    "test_swap_graphs::test_steps_of_generation_are_compiled",
    "test_swap_graphs::test_text_models_are_trained_as_one_graph",
    "test_swap_transformers::test_saved_it_loads_in_another_process",
    "test_sweep::test_a_stopped_sweep_saves_and_resumes",
    "test_sweep::test_a_sweep_trains_every_combination_once_and_compares",
    "test_sweep::test_locations_of_data_are_read_as_the_data_module_reads_them",
    "test_sweep::test_the_check_runs_in_a_process_of_its_own",
    "test_trial::test_forked_processes_of_a_trial_leave_no_file",
    "test_sweep::test_ctrl_c_ends_the_sweep_and_not_its_run_alone",
    "test_text_to_image_training::test_cross_attention_is_replaced_by_an_option",
    "test_text_to_image_training::test_pictures_and_scores_are_drawn_on_two_processes",
    "test_text_to_image_training::test_two_processes_train_as_one_does",
    "test_transforms::test_exponential_mixing_trains_in_one_graph_at_new_lengths",
    "test_transforms::test_packed_bounds_in_a_tensor_are_no_break_of_a_graph",
    "test_transforms::test_transformations",
    "test_verdicts::test_a_kernel_that_fails_after_its_trial_is_withdrawn",
    "test_video_continuation::test_fit_resume_and_predict",
    "test_video_training::test_distillation_matches_layers_then_the_velocity",
    "test_video_training::test_fine_tuning_starts_from_the_checkpoint",
    "test_video_training::test_resume_is_bitwise_exact",
    "test_video_training::test_strips_and_animations_are_drawn",
    "test_video_training::test_train_lora_and_export",
    "test_video_training::test_two_processes_see_the_model_that_one_sees",
)  # fmt: skip
"""Tests that take more than about six seconds each: ``make thorough`` runs them, ``make test`` runs the others."""


@cache
def _with_processes(path: Path) -> set[str]:
    """Return the names of the functions in a test file that start processes, directly or through other functions in it."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    names = {
        function.name: {
            getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
            for node in ast.walk(function)
        }
        for function in functions
    }
    starting: set[str] = set()
    while more := {
        name for name, used in names.items() if name not in starting and used & (STARTS_PROCESSES | starting)
    }:
        starting |= more
    return starting


def pytest_make_parametrize_id(val: object) -> str | None:
    """Keep bytes out of the names of tests. Compressed data contains the time, but all workers must use the same names."""
    return "bytes" if isinstance(val, bytes) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
    for item in items:
        if getattr(item, "originalname", "") in _with_processes(item.path):
            item.add_marker(pytest.mark.processes)
        if item.path.stem in SLOW:
            item.add_marker(pytest.mark.slow)
        if f"{item.path.stem}::{getattr(item, 'originalname', '')}" in LONG:
            item.add_marker(pytest.mark.long)
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fill memory that torch allocates with NaN, so that tests notice reads of uninitialized values."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Restore the signal handlers after each test.

    A run that a signal has stopped ignores further signals, and processes that later tests start would inherit this.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _permissions() -> Iterator[None]:
    """Permit later tests to load checkpoints, as a finished command does; many tests only make the plan of a command."""
    yield
    if trust := sys.modules.get("mhla_tasks.commandline.trust"):
        trust.permit_loading()


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> Iterator[None]:
    """Discard compiled code after each file: torch compiles a function for at most 8 kinds of inputs in a process."""
    yield
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Value of XDG_CACHE_HOME for this test run. Its workers tokenize the standard library only once per vocabulary."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cache-home"


@pytest.fixture(scope="session")
def cache_dir(cache_home: Path) -> Path:
    """Value of the option ``cache_dir`` of data modules for this test run."""
    return cache_home / "lightning-mhla"


@pytest.fixture(scope="session")
def server() -> ForkServer:
    """Server that runs commands in separate processes without their startup time."""
    from processes import fork_server

    return fork_server()
