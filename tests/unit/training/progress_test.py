"""How far a training is, and where it continues from."""

from allennlp_deepspeed.storage.checkpoint_directory import PointInTime
from allennlp_deepspeed.training.progress import Progress


def test_a_training_from_the_beginning_replays_nothing() -> None:
    progress = Progress()
    assert not progress.is_replaying and not progress.is_replaying_epoch
    progress.complete_step()
    assert progress.point == PointInTime(0, 1)
    assert progress.total_batches_completed == 1


def test_steps_are_replayed_up_to_the_point_of_the_checkpoint() -> None:
    saved = Progress(epochs_completed=1, batches_in_epoch_completed=2, total_batches_completed=5)
    progress = Progress()
    progress.load_state_dict(saved.state_dict())
    assert progress.start == saved.point
    replayed = []
    for epoch in range(2):
        progress.epochs_completed, progress.batches_in_epoch_completed = epoch, 0
        while progress.is_replaying and progress.batches_in_epoch_completed < 3:
            replayed.append((*progress.point, progress.is_replaying_epoch))
            progress.complete_step()
    assert replayed == [(0, 0, True), (0, 1, True), (0, 2, True), (1, 0, False), (1, 1, False)]


def test_the_rest_is_known_where_the_checkpoint_is_reached() -> None:
    saved = Progress(total_batches_completed=40, should_validate_this_epoch=False)
    progress = Progress()
    progress.load_state_dict(saved.state_dict())
    # Another number of workers comes there in another number of steps.
    progress.total_batches_completed = 20
    assert progress.should_validate_this_epoch
    progress.arrive()
    assert progress.total_batches_completed == 40
    assert not progress.should_validate_this_epoch
