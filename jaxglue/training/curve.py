"""The loss curve of a run."""

from collections.abc import Sequence
from pathlib import Path

from jaxglue.hf.files import atomic_file
from jaxglue.training.metrics import read_metrics

_REWARDS = (
    *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "kl"),
    *("mean_reward", "margin", "accuracy"),
)


def save_loss_curve(metrics: Path, output: Path) -> None:
    """Draw `loss` and `eval_loss` of a `metrics.jsonl` over the steps, and rewards where there are any, as a PNG."""
    # Imported late: matplotlib would delay every start by a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = list(read_metrics(metrics))
    rewards = {name: _series(lines, name) for name in _REWARDS if _series(lines, name)[0]}
    rows = 2 if rewards else 1
    figure = Figure(figsize=(8, 4.5 * rows), layout="constrained")
    axes = figure.add_subplot(rows, 1, 1, xlabel="step", ylabel="loss" if rewards else "loss (nats per token)")
    steps, losses = _series(lines, "loss")
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="train")
    axes.plot(steps, smooth(losses), color="tab:blue", label="train, smoothed")
    eval_steps, eval_losses = _series(lines, "eval_loss")
    if eval_steps:
        axes.plot(eval_steps, eval_losses, "o-", color="tab:orange", label="eval")
    axes.grid(alpha=0.3)
    axes.legend()
    if rewards:
        below = figure.add_subplot(rows, 1, 2, xlabel="step", ylabel="reward, accuracy")
        for name, (steps, values) in rewards.items():
            below.plot(steps, smooth(values), label=name)
        below.grid(alpha=0.3)
        below.legend()
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
    points = [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]
    return [step for step, _ in points], [value for _, value in points]
