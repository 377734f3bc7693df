import matplotlib.image
import pytest

from jaxglue.training.record import save_loss_curve, smooth
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


def test_smoothing_is_a_bias_corrected_mean():
    assert smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert smooth([1.0, 3.0], decay=0.5) == pytest.approx([1.0, (0.5 * 1 + 3) / 1.5])
