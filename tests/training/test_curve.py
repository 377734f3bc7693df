import matplotlib.image
import pytest

from jaxglue.training.record import reward_change, save_loss_curve, smooth
from jaxglue.training.trackers import open_loggers


@pytest.mark.parametrize("with_eval", [False, True])
def test_curve_shows_train_and_eval_losses(tmp_path, with_eval):
    with open_loggers(tmp_path) as loggers:
        for step in range(1, 4):
            loggers.log(step, {"loss": 1 / step} | ({"eval_loss": 1.0} if with_eval else {}))
    save_loss_curve(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    pixels = matplotlib.image.imread(tmp_path / "loss.png")
    orange = (abs(pixels[..., :3] - [1.0, 0.498, 0.055]) < 0.02).all(-1)
    assert orange.any() == with_eval
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(("metric", "is_above"), [("reward", True), ("rewards/accuracies", False)])
def test_rewards_of_answers_written_in_training_stand_above_the_loss(tmp_path, metric, is_above):
    with open_loggers(tmp_path) as loggers:
        for step in range(1, 4):
            loggers.log(step, {"loss": 1.0, metric: step / 4} | ({"eval_loss": 1.0} if step == 3 else {}))
    save_loss_curve(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    pixels = matplotlib.image.imread(tmp_path / "loss.png")
    (rows, _) = (abs(pixels[..., :3] - [1.0, 0.498, 0.055]) < 0.02).all(-1).nonzero()  # eval_loss, beside the loss
    assert (rows.min() > len(pixels) / 2) == is_above


def test_rewards_change_from_the_first_to_the_last_answers(tmp_path):
    with open_loggers(tmp_path) as loggers:
        for step, reward in ((1, 0.25), (2, None), (3, 0.5), (4, None)):
            loggers.log(step, {"loss": 0.0} | ({} if reward is None else {"reward": reward}))
    assert reward_change(tmp_path / "metrics.jsonl") == (0.25, 0.5)


def test_smoothing_is_a_bias_corrected_mean():
    assert smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert smooth([1.0, 3.0], decay=0.5) == pytest.approx([1.0, (0.5 * 1 + 3) / 1.5])
