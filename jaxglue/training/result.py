"""The result of a run: weights of the last step, those with the lowest eval loss, or both."""

from pathlib import Path
from typing import NamedTuple

import jax
from jaxtyping import PyTree
from rich.console import Console

from jaxglue.data.batch import Batch
from jaxglue.distributed import Processes
from jaxglue.hf.export_check import ROWS_FILE
from jaxglue.training.checkpoint import Checkpoints
from jaxglue.training.export_check import check_export
from jaxglue.training.run_folder import RunFolder
from jaxglue.training.setup import Setup
from jaxglue.training.train_step import TrainStep
from jaxglue.training.weights import export_result, keep_base, why_not_kept


class Result(NamedTuple):
    """Exported folders."""

    path: Path
    """Adapter, or the model after full fine-tuning."""
    step: int
    """Step of its weights."""
    last: Path | None
    """Weights of the last step, where `path` has the best."""


class ResultWriter:
    """Exports the weights that `--keep` names, and checks the files."""

    def __init__(self, setup: Setup, model: TrainStep, output: RunFolder, processes: Processes, console: Console):
        self._setup, self._model, self._output = setup, model, output
        self._processes, self._console = processes, console

    def write(self, checkpoints: Checkpoints, best_step: int | None, batch: Batch | None) -> Result:
        """Write the result; with `--keep best` or `both`, the model has the best weights afterwards.

        Args:
            checkpoints: of the run.
            best_step: step with the lowest eval loss, if known.
            batch: for the check of the files where nothing is held out.
        """
        keep = self._setup.config.run.keep
        name = "adapter" if self._setup.config.model.method == "lora" else "model"
        base = self._keep_base()
        last = self._export(f"{name}-last", base, batch) if keep == "both" else None
        step = self._model.step
        if keep != "last" and best_step != step:
            step = self._return_to_best(checkpoints)
        return Result(self._export(name, base, batch), step, last)

    def _keep_base(self) -> Path | None:
        folder = self._output.path / "base"
        if reason := why_not_kept(self._setup, self._model.frozen):
            self._console.print(
                f"{folder} is not written ({reason}), and the adapter needs its random weights: "
                "for a usable one, name a folder with weights and leave out --random-weights",
                highlight=False,
            )
            return None
        with self._output.writing("base"):
            return keep_base(self._setup, self._model.frozen, folder, write=self._processes.is_main)

    def _return_to_best(self, checkpoints: Checkpoints) -> int:
        abstract = abstract_state(self._model.state())
        self._model.release()
        restored = checkpoints.restore_best(abstract)
        self._model.restore(restored.state, self._model.step)
        self._console.print(f"the best weights are those of step {restored.step}", highlight=False)
        return restored.step

    def _export(self, name: str, base: Path | None, batch: Batch | None) -> Path:
        path, model, is_main = self._output.path / name, self._model, self._processes.is_main
        with self._output.writing(name, ROWS_FILE):
            export_result(self._setup, model.trainable, path, base, write=is_main)
            parts = model.graphdefs, model.trainable, model.frozen
            check = check_export(self._setup, *parts, path, batch, compares=is_main)
        if check:
            self._console.print(f"{path}: {check}", highlight=False)
        return path


def abstract_state(state: PyTree) -> PyTree:
    """Return shapes, dtypes and shardings of a state."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
