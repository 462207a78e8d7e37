"""Curves of a training run as a picture (needs the extra `train`: matplotlib)."""

from __future__ import annotations

from pathlib import Path

from eyas.train.journal import LOG_FILE, read_log
from eyas.types import EyasError


def plot_curves(out_dir: Path, picture: Path) -> None:
    """Draw loss, accuracy by draft step and learning rate over the steps of the log in `out_dir`.

    picture: a .png, .svg or .pdf file. Raises EyasError without matplotlib or without a log.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EyasError("figures need matplotlib: pip install 'eyas[train]'") from error
    lines = read_log(out_dir)
    if not lines:
        raise EyasError(f"{out_dir / LOG_FILE} has no lines to draw")
    steps = [line["step"] for line in lines]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    loss, accuracy, rate = figure.subplots(1, 3)
    num_curves = len(lines[0]["accuracy_by_step"])
    loss.plot(steps, [line["loss"] for line in lines], color="black", label="total")
    for k in range(num_curves):
        loss.plot(steps, [line["loss_by_step"][k] for line in lines], alpha=0.6)
        values = [line["accuracy_by_step"][k] for line in lines]
        accuracy.plot(steps, values, label=f"draft step {k + 1}")
    rate.plot(steps, [line["learning_rate"] for line in lines])
    accuracy.set_ylim(0, 1)
    accuracy.legend(fontsize="small")
    loss.legend(fontsize="small")
    titles = ((loss, "loss (nats)"), (accuracy, "accuracy"), (rate, "learning rate"))
    for axes, title in titles:
        axes.set_title(title)
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
    figure.savefig(picture)
