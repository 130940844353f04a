"""The state of gradient synchronization: which phase a step is in, and what the ranks know."""

from enum import Enum, auto

_NOT_THERE = "Gradient synchronization can't go from the phase {} to {}."


class Phase(Enum):
    """What happens to gradients. docs/architecture.md explains the phases."""

    IDLE = auto()
    """No micro-batch is running. Gradients may be accumulated locally for a later one."""
    DEFER = auto()
    """Each rank accumulates what backward passes compute locally."""
    REDUCE = auto()
    """Backward passes reduce gradients in order while they run."""
    REST = auto()
    """What no backward pass of the micro-batch has reduced is reduced."""


_NEXT = {
    Phase.IDLE: {Phase.DEFER, Phase.REDUCE},
    Phase.DEFER: {Phase.DEFER, Phase.REDUCE, Phase.REST, Phase.IDLE},
    Phase.REDUCE: {Phase.REDUCE, Phase.DEFER, Phase.REST},
    Phase.REST: {Phase.IDLE},
}


class Usage(Enum):
    """Whether all ranks use the same parameters in a step."""

    SAME = auto()
    """They do, or are assumed to without a comparison: a backward pass may reduce while it runs."""
    UNKNOWN = auto()
    """They compare after the first step, which waits for all gradients."""
    DIFFERENT = auto()
    """They have compared, and don't."""
    IRRELEVANT = auto()
    """Every micro-batch that reduces waits for all gradients, whatever the ranks use."""


class SyncPhase:
    """
    State machine of the micro-batches of a step.

    # Parameters

    usage : `Usage`, required.
    accumulates_apart : `bool`, required.
        Whether deferred gradients are accumulated outside of `grad`, so that the pass that reduces
        can't include them.
    """

    def __init__(self, usage: Usage, accumulates_apart: bool) -> None:
        self.usage = usage
        self.phase = Phase.IDLE
        self.is_last = True
        """Whether the micro-batch is the last of the step."""
        self.has_gradients = False
        """Whether the step has a gradient on this rank, or zeros instead of one."""
        self.has_reduced = False
        """Whether an earlier micro-batch of the step has reduced gradients."""
        self._accumulates_apart = accumulates_apart
        # Whether the micro-batch reduces, and whether gradients wait for it.
        self._is_due = False
        self._has_deferred = False

    @property
    def waits_for_all(self) -> bool:
        """Returns whether reduction begins after the backward passes, with all parameters."""
        return self.usage is not Usage.SAME

    def start_step(self) -> None:
        """
        # Raises

        `RuntimeError`
            If a micro-batch is running.
        """
        if self.phase is not Phase.IDLE:
            raise RuntimeError(_NOT_THERE.format(self.phase.name, "the next step"))
        self._has_deferred = self.has_gradients = self.has_reduced = False

    def start_micro_batch(self, is_last: bool, is_due: bool, in_no_sync: bool) -> None:
        """
        Starts a micro-batch.

        # Parameters

        is_last : `bool`, required.
        is_due : `bool`, required.
            Whether it reduces gradients.
        in_no_sync : `bool`, required.
            Whether its first backward pass accumulates locally.

        # Raises

        `RuntimeError`
            If another one is running.
        """
        if self.phase is not Phase.IDLE:
            raise RuntimeError(_NOT_THERE.format(self.phase.name, "another micro-batch"))
        self.is_last, self._is_due = is_last, is_due
        self._enter(self._phase_of_pass(in_no_sync))

    def start_pass(self, in_no_sync: bool) -> None:
        """Decides what the next backward passes do, if a micro-batch is running."""
        if self.phase is not Phase.IDLE:
            self._enter(self._phase_of_pass(in_no_sync))

    def _phase_of_pass(self, in_no_sync: bool) -> Phase:
        # Gradients that were accumulated apart are added first, when the pass is done.
        has_apart = self._has_deferred and self._accumulates_apart
        can_reduce = self._is_due and not (in_no_sync or self.waits_for_all or has_apart)
        return Phase.REDUCE if can_reduce else Phase.DEFER

    def finish_passes(self) -> bool:
        """Returns whether the rest has to be reduced now, before `finish_rest` is called."""
        self._enter(Phase.REST if self._is_due else Phase.IDLE)
        if self._is_due:
            self._has_deferred = False
        return self._is_due

    def finish_rest(self) -> None:
        """Ends the micro-batch, which has reduced all of its gradients."""
        self.has_reduced = not self.is_last
        self._enter(Phase.IDLE)

    def abandon(self) -> None:
        """Ends a micro-batch that has failed. The step must not be finished."""
        self.phase = Phase.IDLE

    def _enter(self, phase: Phase) -> None:
        if phase not in _NEXT[self.phase]:
            raise RuntimeError(_NOT_THERE.format(self.phase.name, phase.name))
        self.phase = phase
        self._has_deferred |= phase is Phase.DEFER
