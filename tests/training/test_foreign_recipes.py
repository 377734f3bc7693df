"""Recipes of other programs: documents, loss masks and steps are theirs (goldens of `make_recipes.py`)."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxglue.settings.recipe import from_settings
from jaxglue.training.config import TrainConfig
from jaxglue.training.setup import resolve

ROOT = Path(__file__).parents[2]
GOLDENS = json.loads((ROOT / "tests/goldens/recipes.json").read_text(encoding="utf-8"))
MARKED = json.loads((ROOT / "tests/goldens/masks.json").read_text(encoding="utf-8"))["template"]
ENDS_WITH_NEWLINE = {"llama_factory"}
"""Programs that also train the newline after an end of turn, which is never generated."""


@pytest.mark.parametrize("name", GOLDENS)
def test_documents_masks_and_steps_are_those_of_the_program(name, tmp_path):
    golden = GOLDENS[name]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in golden["rows"]))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"sums": {"file_name": "rows.jsonl"}}))
    (tmp_path / "template.jinja").write_text(MARKED)
    model = str(ROOT / "jaxglue/recipes/quickstart/model")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(golden["recipe"].replace("{model}", model).replace("{folder}", str(tmp_path)))
    more = {"random_weights": True, "cache_dir": str(tmp_path / "cache"), "workers": 1}
    if "dataset" not in golden["recipe"]:  # data are given beside it
        more["data"] = str(tmp_path / "rows.jsonl")
    if "assistant_only_loss" in golden["recipe"]:
        more["chat_template"] = str(tmp_path / "template.jinja")
    run = resolve(from_settings(TrainConfig, more, recipe))
    assert run.schedule.total_steps == golden["steps"]
    data = run.data.train
    found = [data.store.tokens[data.indices(document)].tolist() for document in range(len(data))]
    assert found == [document["tokens"] for document in golden["documents"]]
    for number, document in enumerate(golden["documents"]):
        expected = np.zeros(len(document["tokens"]), np.uint8)
        for first, last in document["trained"]:
            expected[first : last - (name in ENDS_WITH_NEWLINE)] = 1
        np.testing.assert_array_equal(data.store.mask[data.indices(number)][1:], expected[1:])
    run.batches.close()
