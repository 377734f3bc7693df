"""Objectives that are registered from outside train like the library's own."""

import dataclasses
import json

import jax.numpy as jnp
import pytest
from selection import repeats_parts_of

from jaxglue.objectives.answers import PairObjective
from jaxglue.objectives.config import BetaSettings, ObjectiveConfig
from jaxglue.objectives.objective import OBJECTIVES, Objective
from jaxglue.objectives.rollouts import RolloutObjective
from jaxglue.settings.config import NonNegativeFloat
from jaxglue.training.train import train


class Weighted(Objective):
    """Supervised loss of rows with weights of their own."""

    columns = {"importance": 1.0}  # noqa: RUF012

    @property
    def sums(self):
        return ("weights",)

    def __call__(self, values, batch):
        weights = batch.columns["importance"]
        return jnp.stack([-jnp.sum(values.log_probs * weights), jnp.sum(batch.loss_weights * weights)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContrastSettings(BetaSettings):
    """Settings of the contrast."""

    contrast: NonNegativeFloat = 1.0


class Contrast(PairObjective):
    """Likelihood of preferred answers, less that of the others."""

    Settings = ContrastSettings

    def losses(self, pairs):
        return -pairs.chosen_mean + self.config.contrast * pairs.rejected_mean


class Sampled(RolloutObjective):
    """A loss of answers that the model writes."""


@pytest.fixture(autouse=True)
def registered():
    with OBJECTIVES.scope({"weighted": Weighted, "contrast": Contrast, "sampled": Sampled}):
        yield


@pytest.fixture
def run(make_config, write_jsonl, tmp_path):
    def start(name, rows, objective, **options):
        data = (write_jsonl(rows, f"{name}.jsonl"),)
        config = make_config(data=data, output=tmp_path / name, **{"steps": 1, "batch_size": 4, **options})
        train(dataclasses.replace(config, objective=objective))
        return [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    return start


def test_columns_of_rows_weigh_their_losses(run, chat_rows, capsys):
    rows = [chat_rows(1)[0] | {"importance": weight} for weight in (0, 1, 3.5, None)]
    (plain,) = run("plain", rows, ObjectiveConfig())
    assert "'importance'" in capsys.readouterr().out  # among columns that are not used
    (weighted,) = run("weighted", rows, ObjectiveConfig(objective="weighted"))
    assert weighted["loss"] == pytest.approx(plain["loss"] * (0 + 1 + 3.5 + 1) / 4, rel=1e-5)
    assert weighted["weights"] == pytest.approx(5.5 / 4)
    assert "'importance'" not in capsys.readouterr().out


@repeats_parts_of("test_columns_of_rows_weigh_their_losses")
def test_columns_are_kept_in_the_cache_and_held_out(run, chat_rows, capsys):
    rows = [row | {"importance": 2.0} for row in chat_rows(8)]
    options = {"eval_fraction": 0.5, "eval_every": 1}
    first = run("first", rows, ObjectiveConfig(objective="weighted"), **options)
    assert "importance" not in capsys.readouterr().out
    again = run("again", rows, ObjectiveConfig(objective="weighted"), **options)
    for lines in (first, again):
        assert next(line["eval_weights"] for line in lines if "eval_weights" in line) == pytest.approx(2)
    assert [line.get("loss") for line in first] == [line.get("loss") for line in again]
    assert "tokens from the cache" in capsys.readouterr().out


def test_value_of_a_column_that_is_no_number_names_its_row(run, chat_rows):
    rows = [row | {"importance": value} for row, value in zip(chat_rows(2), (1, "high"), strict=True)]
    with pytest.raises(ValueError, match=r"bad.jsonl:2: 'importance' must be a finite number"):
        run("bad", rows, ObjectiveConfig(objective="weighted"))


@repeats_parts_of("test_commands_train_resume_export_and_generate_with_a_kind_of_a_file")
def test_a_loss_of_pairs_with_settings_of_its_own_trains(run):
    pairs = [{"prompt": f"What is {n}? ", "chosen": f"It is {n}.", "rejected": "Good"} for n in range(4)]
    lines = {
        weight: run(f"weight-{weight}", pairs, ObjectiveConfig(objective="contrast", contrast=weight), steps=8)
        for weight in (0.0, 0.5)
    }
    for found in lines.values():
        assert found[-1]["logps/chosen"] > found[0]["logps/chosen"]
    assert lines[0.5][-1]["logps/rejected"] < lines[0.0][-1]["logps/rejected"] - 1


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="'dpo' is registered already"):
        OBJECTIVES.register("dpo")(Weighted)


def test_a_loss_of_sampled_answers_is_refused(make_config):
    with pytest.raises(ValueError, match="--objective sampled needs --reward or --environment"):
        dataclasses.replace(make_config(), objective=ObjectiveConfig(objective="sampled"))
