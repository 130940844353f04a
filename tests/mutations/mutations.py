"""The mutations: each changes one operator, condition or collective of the package."""

from typing import NamedTuple, Tuple

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
        The tests that are to fail, as pytest names them in the folder of tests.
    """

    file: str
    old: str
    new: str
    tests: Tuple[str, ...]


_GRAD_CACHE = "end_to_end/grad_cache_test.py::"
_SYNCHRONIZATION = "end_to_end/gradient_synchronization_test.py::"
_HEADS = "integration/library_models_test.py::test_heads_that_only_one_rank_uses_"
_GLOBAL_BATCH = "integration/global_batch_test.py::"
_WEIGHT_CHANGES = "integration/weight_changes_test.py::"

MUTATIONS = [
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
        ("end_to_end/parity_test.py::test_training_is_that_of_gradient_descent[tagger-0]",),
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
        "training/sync_phase.py",
        "has_apart = self._has_deferred and self._accumulates_apart",
        "has_apart = self._has_deferred and False",
        ("unit/training/sync_phase_test.py",),
    ),
    Mutation(
        "training/gradient_sync.py",
        "is_due = is_last or not self.schedule.is_once_a_step",
        "is_due = is_last or self.schedule.is_once_a_step",
        (_SYNCHRONIZATION + "test_gradients_are_reduced_as_often_as_the_mode_says[2-step]",),
    ),
    Mutation(
        "training/gradient_sync.py",
        "needs_all = state.waits_for_all or (self._reducer.is_offloaded and state.is_last)",
        "needs_all = self._reducer.is_offloaded and state.is_last",
        (_HEADS + "are_found_in_the_first_step[2-zero2-others]",),
    ),
    # What the ranks agree on.
    Mutation(
        "training/gradient_sync.py",
        "collectives.is_same_on_all_ranks(self._used_checksum, device)",
        "True",
        (_HEADS + "are_found_in_the_first_step[2-zero2-others]",),
    ),
    Mutation(
        "training/step_status.py",
        "ranks_differ=largest_used != -smallest_used",
        "ranks_differ=False",
        (_HEADS + "later_are_noticed",),
    ),
    Mutation(
        "training/running_loss.py",
        "return num_steps + 1 - nan_step if nan_step else 0",
        "return num_steps - nan_step if nan_step else 0",
        ("integration/parameters_test.py::test_a_loss_of_nan_is_what_is_shown_where_there_is_one",),
    ),
    Mutation(
        "training/resume_state.py",
        'set_random_states(state["random_states"])',
        "pass",
        (
            "end_to_end/checkpoint_test.py::"
            "test_a_recovered_run_ends_as_an_uninterrupted_one[checkpoint_e1_b2-0]",
        ),
    ),
    # Reduction of gradients by the engine.
    Mutation(
        "engine/parameters/gradient_reduction.py",
        "self._optimizer.grad_partitions_flat_buffer.zero_()",
        "pass",
        ("integration/fp16_test.py::test_parameters_may_be_unused_in_fp16[3]",),
    ),
    Mutation(
        "engine/parameters/gradient_reduction.py",
        "self._sums[parameter].add_(gradient)",
        "self._sums[parameter].copy_(gradient)",
        (
            "integration/trainer_test.py::"
            "test_gradients_are_accumulated_in_the_type_that_the_config_names"
            "[fp32-1.015625-3-step]",
        ),
    ),
    Mutation(
        "engine/parameters/gradient_reduction.py",
        "grads=[*gradients, used]",
        "grads=gradients",
        (_HEADS + "are_found_in_the_first_step[0-zero0-others]",),
    ),
    Mutation(
        "engine/parameters/gradient_reduction.py",
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
        ("end_to_end/parity_test.py::test_adagrad_with_groups_and_a_schedule",),
    ),
    Mutation(
        "engine/lifecycle/loss_scaling.py",
        "return loss.float() * self._optimizer.loss_scale",
        "return loss.float()",
        ("integration/fp16_test.py::test_fp16_trains_as_fp32_does[0]",),
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
        "engine/parameters/weight_changes.py",
        "if collectives.all_reduce_any(self.has_detected(), self._device):",
        "if self.has_detected():",
        (
            _WEIGHT_CHANGES
            + "test_a_change_on_one_rank_after_the_last_step_is_an_error_on_all_too[2]",
        ),
    ),
    Mutation(
        "engine/parameters/full_parameters.py",
        "(0, fragment.padding)",
        "(0, 0)",
        (_WEIGHT_CHANGES + "test_changes_within_modified_weights_are_kept[3]",),
    ),
    Mutation(
        "engine/parameters/full_parameters.py",
        "dist.broadcast(value.view(-1).view(torch.uint8), src=0)",
        "pass",
        (_WEIGHT_CHANGES + "test_the_changes_of_rank_0_count",),
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
        "internals.set_saves_model_states(trainer.engine, trainer.directories.is_leader)",
        "internals.set_saves_model_states(trainer.engine, dist.get_rank() == 0)",
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
            "[0-model states-flip-True]",
        ),
    ),
    Mutation(
        "checkpoint/load_time_resharding.py",
        "_fill(values[key], shards, index, partial(checkpoint.state, key))",
        "pass",
        (
            "end_to_end/resize_test.py::"
            "test_another_number_of_workers_continues_the_same_training[2-1-2]",
        ),
    ),
    Mutation(
        "checkpoint/parameter_order.py",
        "[index[name] for group in current for name in group]",
        "list(range(len(index)))",
        (
            "integration/parameter_order_test.py::"
            "test_layers_in_another_order_continue_as_without_an_interruption"
            "[stage 0, Adam, two workers]",
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
        ("integration/loss_scale_test.py::test_gradient_caching_in_fp16_is_that_of_fp32[0-3]",),
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
        "contrastive/gathering.py",
        "return gradient * world_size()",
        "return gradient",
        (_GRAD_CACHE + "test_gradients_are_reduced_as_often_as_the_mode_says[0-step]",),
    ),
    # Masks of responses, and normalization of the loss.
    Mutation(
        "language_modeling/example_tokenizer.py",
        "token if all_count or counts else IGNORED",
        "token if all_count or not counts else IGNORED",
        ("unit/language_modeling/example_tokenizer_test.py",),
    ),
    Mutation(
        "language_modeling/causal_lm.py",
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
