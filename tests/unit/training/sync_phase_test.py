import pytest

from allennlp_deepspeed.training.sync_phase import Phase, SyncPhase, Usage


def in_micro_batch(
    usage: Usage = Usage.SAME, accumulates_apart: bool = True, is_last: bool = True
) -> SyncPhase:
    state = SyncPhase(usage, accumulates_apart)
    state.start_step()
    state.start_micro_batch(is_last, is_due=is_last, in_no_sync=False)
    return state


def test_a_step_of_one_micro_batch_reduces_in_its_pass() -> None:
    state = in_micro_batch()
    assert state.phase is Phase.REDUCE
    assert state.finish_passes()
    assert state.phase is Phase.REST
    state.finish_rest()
    assert state.phase is Phase.IDLE
    assert not state.has_reduced


@pytest.mark.parametrize("apart, phase", [(True, Phase.DEFER), (False, Phase.REDUCE)])
def test_a_pass_after_deferred_ones_reduces_if_it_can_include_them(
    apart: bool, phase: Phase
) -> None:
    state = in_micro_batch(accumulates_apart=apart, is_last=False)
    assert state.phase is Phase.DEFER
    assert not state.finish_passes()
    state.start_micro_batch(is_last=True, is_due=True, in_no_sync=False)
    assert state.phase is phase


@pytest.mark.parametrize("usage", [Usage.UNKNOWN, Usage.DIFFERENT, Usage.IRRELEVANT])
def test_passes_defer_where_all_gradients_are_waited_for(usage: Usage) -> None:
    assert in_micro_batch(usage).phase is Phase.DEFER


def test_passes_in_no_sync_defer() -> None:
    state = in_micro_batch(accumulates_apart=False)
    state.start_pass(in_no_sync=True)
    assert state.phase is Phase.DEFER
    state.start_pass(in_no_sync=False)
    assert state.phase is Phase.REDUCE


def test_wrong_transitions_raise() -> None:
    state = in_micro_batch()
    with pytest.raises(RuntimeError):
        state.start_micro_batch(is_last=True, is_due=True, in_no_sync=False)
    with pytest.raises(RuntimeError):
        state.start_step()
    with pytest.raises(RuntimeError):
        state.finish_rest()
    state.finish_passes()
    with pytest.raises(RuntimeError):
        state.start_pass(in_no_sync=False)
    state.finish_rest()
    with pytest.raises(RuntimeError):
        state.finish_passes()


def test_a_step_may_begin_after_a_micro_batch_that_failed() -> None:
    state = in_micro_batch()
    state.abandon()
    state.start_step()
    state.start_micro_batch(is_last=True, is_due=True, in_no_sync=False)
    assert state.phase is Phase.REDUCE
