"""The reliability diagram of decisions: accuracy by confidence, and how many answers have it."""

from collections.abc import Sequence
from pathlib import Path

from jaxglue.files.atomic import atomic_file
from jaxglue.objectives.calibration import Bin, calibration_error


def draw_reliability(bins: Sequence[Bin], output: Path) -> None:
    """Draw bins of equal width as a PNG; ValueError without any."""
    if not bins:
        raise ValueError("a reliability diagram is of decisions, and these are none")
    # Imported late: matplotlib would delay every start by a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    width, filled = 1 / len(bins), [(index, each) for index, each in enumerate(bins) if each.answers]
    places = [(index + 0.5) * width for index, _ in filled]
    above.bar(places, [each.accuracy for _, each in filled], width, color="tab:blue", alpha=0.6, label="accuracy")
    above.plot([each.confidence for _, each in filled], [each.accuracy for _, each in filled], "o", color="tab:blue")
    above.plot([0, 1], [0, 1], color="gray", linestyle="dashed", label="calibrated")
    above.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1), title=f"ECE {calibration_error(list(bins)):.3f}")
    above.legend(loc="upper left")
    below.bar(places, [each.answers for _, each in filled], width, color="gray")
    below.set(xlabel="confidence: largest probability", ylabel="answers")
    with atomic_file(output) as temporary:
        FigureCanvasAgg(figure).print_figure(temporary, dpi=120, format="png")
