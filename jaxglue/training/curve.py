"""The loss curve of a run."""

from collections.abc import Sequence
from pathlib import Path

from jaxglue.hf.files import atomic_file
from jaxglue.training.metrics import read_metrics


def save_loss_curve(metrics: Path, output: Path) -> None:
    """Draw `loss` and `eval_loss` of a `metrics.jsonl` over the steps, as a PNG."""
    # Imported late: matplotlib would delay every start by a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(metrics)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    steps, losses = _series(lines, "loss")
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="train")
    axes.plot(steps, smooth(losses), color="tab:blue", label="train, smoothed")
    eval_steps, eval_losses = _series(lines, "eval_loss")
    if eval_steps:
        axes.plot(eval_steps, eval_losses, "o-", color="tab:orange", label="eval")
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_file(output) as temporary:
        FigureCanvasAgg(figure).print_figure(temporary, dpi=120, format="png")


def smooth(values: Sequence[float], *, decay: float = 0.9) -> list[float]:
    """Return the exponential moving average, bias-corrected as in Adam (Kingma & Ba 2015, section 3)."""
    average, smoothed = 0.0, []
    for count, value in enumerate(values, start=1):
        average = decay * average + (1 - decay) * value
        smoothed.append(average / (1 - decay**count))
    return smoothed


def _series(lines: list[dict], name: str) -> tuple[list[int], list[float]]:
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]
