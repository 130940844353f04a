"""
The mutations: each changes one operator, condition or collective of the package. 40 are chosen, the
others are drawn by `draw.py`.
"""

import json
from pathlib import Path
from typing import Dict, List, NamedTuple, Tuple

DRAWN = Path(__file__).with_name("drawn.json")
"""What is drawn. With the reason, if no test can tell it from the package as it is."""

OUTCOME = "outcome of a mutation: "
"""Begins a line with the number of a mutation, its outcome, and the tests that have failed."""
FAILED, HUNG, PASSED = "yes", "yes, by the time limit", "**no**"


class Mutation(NamedTuple):
    """
    A change that makes the package wrong.

    # Parameters

    file : `str`
        In the package's folder.
    old : `str`
        A text that occurs once in the file.
    new : `str`
    tests : `Tuple[str, ...]`
        The tests of which one is to fail, as pytest names them in the folder of tests.
    equivalent : `str`, optional (default = `""`)
        Why it changes nothing that a user could see: it isn't tried.
    """

    file: str
    old: str
    new: str
    tests: Tuple[str, ...]
    equivalent: str = ""


_GRAD_CACHE = "end_to_end/grad_cache_test.py::"
_SYNCHRONIZATION = "end_to_end/gradient_synchronization_test.py::"
_HEADS = "integration/library_models_test.py::test_heads_that_only_one_rank_uses_"
_GLOBAL_BATCH = "integration/global_batch_test.py::"
_CROSS = "cross/cross_test.py::test_combinations_of_features_train_as_plain_pytorch_does"
_OUTSIDE_CHANGES = "integration/outside_changes_test.py::"
_CHANGE = _OUTSIDE_CHANGES + "test_change"

_CHOSEN = [
    # Accumulation and the loss.
    Mutation(
        "training/gradient_step.py",
        'loss = outputs["loss"] / self.num_accumulation_steps',
        'loss = outputs["loss"]',
        ("integration/trainer_test.py::test_one_process_accumulates_gradients[auto-none-0]",),
    ),
    Mutation(
        "training/batch_groups.py",
        "-= common_size\n            yield BatchGroup(batches[:common_size], len(batches))",
        "-= common_size\n            yield BatchGroup(batches[:common_size], self._full_size)",
        ("end_to_end/parity_test.py::test_training_is_that_of_gradient_descent[tagger-3]",),
    ),
    Mutation(
        "training/loss_weights.py",
        "total = own.sum()\n        dist.all_reduce(total)",
        "total = own.sum()",
        (_GLOBAL_BATCH + "test_numbers_are_those_of_the_global_batch[2-0-3000-2-arguments2]",),
    ),
    Mutation(
        "training/loss_weights.py",
        "own[len(own) - num_dummy_batches :] = 0",
        "own[len(own) :] = 0",
        (
            _GLOBAL_BATCH
            + "test_parts_may_weigh_fractions_and_nothing[basic_classifier-labeled_batches-3]",
        ),
    ),
    # Phases of the synchronization of gradients.
    Mutation(
        "engine/gradient_synchronizer.py",
        "return Phase.DEFER if self._has_deferred and self._summed else Phase.REDUCE",
        "return Phase.REDUCE",
        ("integration/gradient_synchronizer_test.py",),
    ),
    Mutation(
        "engine/gradient_synchronizer.py",
        "is_due = is_last or not self.is_once_a_step",
        "is_due = is_last or self.is_once_a_step",
        (_SYNCHRONIZATION + "test_gradients_are_reduced_as_often_as_the_mode_says[2-step]",),
    ),
    Mutation(
        "engine/gradient_synchronizer.py",
        "needs_all = self._waits_for_all or (self._is_offloaded and self._is_last)",
        "needs_all = self._is_offloaded and self._is_last",
        (_HEADS + "are_found_in_the_first_step[2-zero2-others]",),
    ),
    # What the ranks agree on.
    Mutation(
        "engine/gradient_synchronizer.py",
        "collectives.is_same_on_all_ranks(self._used_checksum, device)",
        "True",
        (_HEADS + "are_found_in_the_first_step[2-zero2-others]",),
    ),
    Mutation(
        "training/agreement.py",
        "[first] == second if second",
        "True if second",
        (_HEADS + "later_are_noticed",),
    ),
    Mutation(
        "training/running_loss.py",
        "return num_steps + 1 - nan_step if nan_step else 0",
        "return num_steps - nan_step if nan_step else 0",
        (_CHANGE + "[losses: NaN loss-0-1]",),
    ),
    Mutation(
        "training/resume_state.py",
        'set_random_states(state["random_states"])\n        modules',
        "modules",
        (
            "end_to_end/checkpoint_test.py::"
            "test_a_recovered_run_ends_as_an_uninterrupted_one[checkpoint_e1_b2-0]",
        ),
    ),
    # Reduction of gradients by the engine.
    Mutation(
        "engine/gradient_synchronizer.py",
        "gradient.zero_()",
        "pass",
        ("integration/fp16_test.py::test_parameters_may_be_unused_in_fp16[3]",),
    ),
    Mutation(
        "engine/gradient_synchronizer.py",
        "self._sums[parameter].add_(gradient)",
        "self._sums[parameter].copy_(gradient)",
        (
            "integration/trainer_test.py::"
            "test_gradients_are_accumulated_in_the_type_that_the_config_names"
            "[fp32-1.015625-3-step]",
        ),
    ),
    Mutation(
        "engine/gradient_synchronizer.py",
        "grads=[*gradients, used]",
        "grads=gradients",
        (_HEADS + "are_found_in_the_first_step[0-zero0-others]",),
    ),
    Mutation(
        "engine/gradient_synchronizer.py",
        "key=lambda p: -places.get(p, -1)",
        "key=lambda p: (-1) ** (dist.get_rank() + 1) * places.get(p, -1)",
        (
            "integration/reduction_order_test.py::"
            "test_sentences_of_equal_length_on_one_worker_only[2]",
        ),
    ),
    # Clipping and the loss scale.
    Mutation(
        "training/gradient_step.py",
        'for group in optimizer.param_groups for p in group["params"]',
        'for group in optimizer.param_groups[:1] for p in group["params"]',
        (_CROSS + "[3-1034]",),
    ),
    Mutation(
        "engine/lifecycle/loss_scaling.py",
        "return loss.float() * self._optimizer.loss_scale",
        "return loss.float()",
        (_CROSS + "[0-1036]",),
    ),
    Mutation(
        "engine/lifecycle/loss_scaling.py",
        "_update_scale=overflows.append",
        "_update_scale=update_scale",
        (
            "integration/fp16_test.py::test_a_step_that_overflows_is_left_out[clipping_of_the_norm-2]",
        ),
    ),
    # Gathering, and changes of weights.
    Mutation(
        "training/invariants.py",
        "if has_changed:",
        "if self._error is not None:",
        (_CHANGE + "[weights: on one rank after the last step-2-2]",),
    ),
    Mutation(
        "engine/parameters/full_parameters.py",
        "(0, fragment.padding)",
        "(0, 0)",
        (_CHANGE + "[weights: within modified_weights-3-2]",),
    ),
    Mutation(
        "engine/parameters/full_parameters.py",
        "dist.broadcast(value.view(-1).view(torch.uint8), src=0)",
        "pass",
        (_OUTSIDE_CHANGES + "test_the_changes_of_rank_0_count",),
    ),
    Mutation(
        "engine/optimizers/sub_group_steps.py",
        "_set_values(param_group, values)",
        "pass",
        (
            "integration/optimizer_steps_test.py::"
            "test_each_group_counts_each_step_once[3-1-zero6-Counting]",
        ),
    ),
    # Which ranks save, and when a checkpoint is committed.
    Mutation(
        "checkpoint/checkpointer.py",
        "by_name.collect(shards, trainer.directories.is_leader, shadows, excluded)",
        "by_name.collect(shards, dist.get_rank() == 0, shadows, excluded)",
        (
            "hosts/own_directories_test.py::test_what_one_host_has_committed_when_the_other_died_is_continued_from",
        ),
    ),
    Mutation(
        "checkpoint/background_commit.py",
        "self._collect_file_records(key, unfinished, own_group)",
        "self._collect_file_records(key, unfinished, own_group[:1])",
        ("unit/checkpoint/background_commit_test.py",),
    ),
    Mutation(
        "checkpoint/background_commit.py",
        'self._synchronize_directories(key, "prepared")',
        "pass",
        ("unit/checkpoint/background_commit_test.py",),
    ),
    # What is read of a checkpoint.
    Mutation(
        "checkpoint/commit_record.py",
        "if found == record:",
        "if found.bytes == record.bytes:",
        ("unit/checkpoint/checkpoint_files_test.py::test_ranks_verify_every_file_between_them",),
    ),
    Mutation(
        "checkpoint/selection.py",
        "problem for problems in collectives.all_gather_object(problems) for problem in problems",
        "problem for problems in [problems] for problem in problems",
        (
            "faults/bad_files_test.py::"
            "test_a_damaged_checkpoint_is_refused_and_the_older_one_is_offered"
            "[0-engine-flip-True]",
        ),
    ),
    Mutation(
        "checkpoint/by_name.py",
        "_read(values[key], shards, index, saved, STATE + key)",
        "pass",
        (
            "end_to_end/resize_test.py::"
            "test_another_number_of_workers_and_stage_continue_the_same_training[2-1-2-2]",
        ),
    ),
    Mutation(
        "checkpoint/by_name.py",
        "saved.read(name, kind, fragment.offset, fragment.size)",
        "saved.read(name, kind, 0, fragment.size)",
        (
            "end_to_end/resize_test.py::"
            "test_another_number_of_workers_and_stage_continue_the_same_training[1-2-2-2]",
        ),
    ),
    # Precedence and refusals of the config.
    Mutation(
        "config/unset_values.py",
        "elif deepspeed_value != value:",
        "elif False:",
        ("unit/config/refusals_test.py::test_a_contradiction",),
    ),
    Mutation(
        "config/resolution.py",
        "0.0 if isinstance(grad_norm, bool) else grad_norm",
        "1.0 if isinstance(grad_norm, bool) else grad_norm",
        ("unit/config/config_test.py::TestGradientNorm",),
    ),
    # Restarts, and who may connect.
    Mutation(
        "launch/agent.py",
        "return last == failure.step",
        "return False",
        ("end_to_end/restarts_test.py::test_a_step_that_fails_twice_ends_the_training",),
    ),
    Mutation(
        "launch/process_group.py",
        "network_interfaces.select_loopback()",
        "pass",
        ("hosts/listening_test.py::test_a_training_on_one_host_listens_on_loopback_only[2]",),
    ),
    # Gradient caching and gathered negatives.
    Mutation(
        "extensions/grad_cache.py",
        "representation.grad.div_(scales[0])",
        "pass",
        (_CROSS + "[0-1040]",),
    ),
    Mutation(
        "extensions/grad_cache.py",
        "set_random_states(state)\n                with",
        "with",
        (_GRAD_CACHE + "test_dropout_is_the_same_in_both_passes",),
    ),
    Mutation(
        "training/chunking.py",
        "range(0, max_batch_size, chunk_size)",
        "range(0, batch_size, chunk_size)",
        (_GRAD_CACHE + "test_the_weights_are_those_of_one_piece[2-3]",),
    ),
    Mutation(
        "models/contrastive/gathering.py",
        "return gradient * world_size()",
        "return gradient",
        (_GRAD_CACHE + "test_gradients_are_reduced_as_often_as_the_mode_says[0-step]",),
    ),
    # Masks of responses, and normalization of the loss.
    Mutation(
        "models/language_modeling/example_tokenizer.py",
        "token if all_count or counts else IGNORED",
        "token if all_count or not counts else IGNORED",
        ("unit/language_modeling/example_tokenizer_test.py",),
    ),
    Mutation(
        "models/language_modeling/causal_lm.py",
        "losses.total / losses.num_targets.clamp(min=1)",
        "losses.total / targets.numel()",
        (
            "unit/language_modeling/causal_lm_test.py::test_loss_and_gradients_are_those_of_transformers",
        ),
    ),
    # Metrics of all workers.
    Mutation(
        "metrics/distributed_metrics.py",
        "_add_counts(metric, [counts[name] for counts in of_ranks])",
        "_add_counts(metric, [own[name]])",
        (
            "integration/metrics_in_training_test.py::"
            "test_metrics_are_those_of_all_workers_without_a_collective_in_a_forward_pass[Adding]",
        ),
    ),
]

# Of each file that mutations are drawn in, those first that are over soon.
_TESTS_OF_DRAWN: Dict[str, Tuple[str, ...]] = {
    "training/gradient_step.py": (
        "integration/trainer_test.py::test_one_process_accumulates_gradients",
        "integration/trainer_test.py::test_an_engine_in_a_session_outlives_training",
        _CHANGE + "[losses: no graph-0-1]",
        _CROSS + "[0-1036]",
        _CROSS + "[2-1020]",
        "integration/fp16_test.py::test_a_step_that_overflows_is_left_out",
        _CHANGE + "[losses: NaN gradients-2-1]",
        _GLOBAL_BATCH + "test_numbers_are_those_of_the_global_batch",
        _OUTSIDE_CHANGES
        + "test_weights_that_a_callback_has_changed_after_the_last_epoch_are_not_saved",
        "integration/run_report_test.py",
        "integration/users_code_test.py",
    ),
    "engine/gradient_synchronizer.py": (
        "integration/gradient_synchronizer_test.py",
        "integration/trainer_test.py::test_one_process_accumulates_gradients",
        "integration/trainer_test.py::"
        "test_only_accumulated_gradients_take_memory_between_micro_batches",
        "integration/trainer_test.py::"
        "test_gradients_are_accumulated_in_the_type_that_the_config_names",
        "integration/library_models_test.py",
        "integration/users_code_test.py",
        _SYNCHRONIZATION + "test_gradients_are_reduced_as_often_as_the_mode_says",
        _SYNCHRONIZATION + "test_a_callback_goes_backward_in_chunks",
        _SYNCHRONIZATION + "TestAuto",
        _HEADS + "are_found_in_the_first_step[2-zero2-others]",
    ),
    "checkpoint/background_commit.py": (
        "unit/checkpoint/background_commit_test.py",
        "integration/saving_test.py::test_all_checkpoints_are_committed_when_callbacks_end",
        "hosts/own_directories_test.py::test_each_host_continues_with_its_own_files",
        "end_to_end/failures_test.py::test_a_full_disk_is_one_message",
    ),
    "checkpoint/checkpoint_directory.py": ("unit/checkpoint/checkpoint_files_test.py",),
    "checkpoint/selection.py": (
        "integration/recovery_test.py::test_a_training_state_of_something_else_is_refused",
        "integration/recovery_test.py::test_a_training_state_of_another_version_is_refused",
        "faults/bad_files_test.py::"
        "test_a_damaged_checkpoint_is_refused_and_the_older_one_is_offered",
        "faults/bad_files_test.py::test_one_process_resumes_from_the_previous_checkpoint",
        "faults/bad_files_test.py::test_without_an_older_checkpoint_none_is_offered",
        "hosts/own_directories_test.py",
    ),
    "config/resolution.py": ("unit/config/config_test.py", "unit/config/refusals_test.py"),
}


def _drawn() -> List[Mutation]:
    return [
        Mutation(tests=_TESTS_OF_DRAWN[values["file"]], **values)
        for values in json.loads(DRAWN.read_text())
    ]


MUTATIONS = [*_CHOSEN, *_drawn()]
