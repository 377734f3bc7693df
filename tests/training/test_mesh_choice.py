"""Choice of the mesh by `auto` when some meshes do not fit the GPUs."""

from types import SimpleNamespace

import jax
import pytest

from jaxglue.models import config_from_hf
from jaxglue.planner.plan import DoesNotFit
from jaxglue.training import remat
from jaxglue.training.remat import RematChoice

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.fixture
def choose(make_config, tiny_config, monkeypatch):
    """choose(method, fitting meshes, **changes to config.json) → the mesh on eight GPUs, as text."""

    def make(method: str, fitting: set[str], **changes):
        def choose_remat(settings, workload, steps, explain):
            if str(workload.mesh) not in fitting:
                raise DoesNotFit(f"{workload.mesh} does not fit")
            return SimpleNamespace(host_embeddings=False)

        monkeypatch.setattr(remat, "choose_remat", choose_remat)
        monkeypatch.setattr(jax, "device_count", lambda: 8)
        model = config_from_hf({**tiny_config, "model_type": "qwen3", **changes})
        workload, _ = remat.choose_mesh(make_config(method=method, batch_size=8), model, (32,))
        return str(workload.mesh)

    return make


def test_auto_prefers_copies_for_adapters_and_parts_for_full(choose):
    assert choose("lora", {"data=8", "fsdp=8"}) == "data=8"
    assert choose("lora", {"fsdp=8"}) == "fsdp=8"
    assert choose("full", {"data=8", "fsdp=8"}) == "fsdp=8"
    with pytest.raises(DoesNotFit, match="context=8 does not fit"):
        choose("lora", set())


def test_auto_splits_rows_that_do_not_fit_or_are_fewer_than_gpus(choose, make_config, tiny_config):
    assert choose("lora", {"data=4,context=2", "fsdp=4,context=2", "context=8"}) == "data=4,context=2"
    assert choose("full", {"data=4,context=2", "fsdp=2,context=4", "context=8"}) == "fsdp=2,context=4"
    model = config_from_hf({**tiny_config, "model_type": "qwen3"})
    for batch_size, mesh in ((4, "data=4,context=2"), (1, "context=8")):
        workload, _ = remat.choose_mesh(make_config(batch_size=batch_size), model, (32,))
        assert str(workload.mesh) == mesh
    with pytest.raises(ValueError, match=r"--batch-size 1 does not divide .*: use --batch-size 8"):
        remat.choose_mesh(make_config(batch_size=1, seq_len=31), model, (32,))
    with pytest.raises(ValueError, match="context cannot split rows of --objective distill, whose teacher is on one"):
        remat.choose_mesh(
            make_config(objective="distill", teacher="base", mesh="context=8", batch_size=1), model, (32,)
        )


def test_auto_spreads_experts_over_the_fewest_gpus(choose):
    everything = {"data=8", "data=4,expert=2", "data=2,expert=4", "fsdp=2,expert=4"}
    assert choose("lora", everything, **EXPERTS) == "data=8"
    assert choose("lora", everything - {"data=8"}, **EXPERTS) == "data=4,expert=2"
    assert choose("lora", {"data=2,expert=4"}, **EXPERTS) == "data=2,expert=4"
    assert choose("full", everything, **EXPERTS) == "fsdp=2,expert=4"
    assert choose("lora", {"fsdp=8"}, **EXPERTS | {"num_experts": 3}) == "fsdp=8"


def test_other_errors_try_no_further_mesh(make_config, tiny_config, monkeypatch):
    def choose_remat(settings, workload, steps, explain):
        raise ValueError(f"bad policy on {workload.mesh}")

    monkeypatch.setattr(remat, "choose_remat", choose_remat)
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    model = config_from_hf({**tiny_config, "model_type": "qwen3"})
    with pytest.raises(ValueError, match="bad policy on data=8"):
        remat.choose_mesh(make_config(batch_size=8), model, (32,))


def test_a_mesh_of_two_is_explained_by_those_that_do_not_fit_and_the_next(make_config, tiny_config, monkeypatch):
    def choose_remat(settings, workload, steps=None, *, explain=False):
        if str(workload.mesh) == "data=2":
            raise DoesNotFit("data=2 needs more")
        return RematChoice(policies=(), weights=(), remat=f"full on {workload.mesh}")

    monkeypatch.setattr(remat, "choose_remat", choose_remat)
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    config = make_config(batch_size=2, explain=True)
    dense, experts = (config_from_hf({**tiny_config, **kind}) for kind in ({"model_type": "qwen3"}, EXPERTS))
    parts, spread = (remat.choose_mesh(config, model, (32,))[1].reasons["mesh"] for model in (dense, experts))
    assert (parts.choice, parts.limit, parts.runner_up) == (
        "fsdp=2",
        "the GPU's memory: data=2 needs more",
        "context=2: full on context=2",
    )
    assert spread.choice == "expert=2"
    monkeypatch.setattr(
        remat, "choose_remat", lambda settings, *_, **__: RematChoice(policies=(), weights=(), remat="dots")
    )
    alone = remat.choose_mesh(make_config(batch_size=1, explain=True), dense, (32,))[1].reasons["mesh"]
    assert (alone.choice, alone.limit) == ("context=2", "the rows: --batch-size 1 for 2 GPUs")
    copies = remat.choose_mesh(config, dense, (32,))[1].reasons["mesh"]
    assert str(copies) == (
        "data=2; bound by preference: copies before parts; runner-up: fsdp=2: dots; to change it: "
        "--mesh, or the memory named"
    )


def test_other_processes_plan_for_the_choice_of_process_0(make_config, tiny_config, monkeypatch):
    planned = []

    def choose_remat(settings, workload):
        chosen = settings.remat, settings.weights, settings.layers_per_program
        planned.append((*chosen, workload.attention, workload.tile, str(workload.mesh)))
        return RematChoice(policies=(), weights=(), remat=settings.remat)

    monkeypatch.setattr(remat, "choose_remat", choose_remat)
    settings = {"remat": "full", "weights": "device", "attention": "reference", "tile": 16, "layers_per_program": 2}
    choice = {"mesh": "fsdp=2", "settings": settings}
    processes = SimpleNamespace(is_main=False, all_gather_object=lambda value: [choice, value])
    model = config_from_hf({**tiny_config, "model_type": "qwen3"})
    workload, chosen = remat.agree_on_mesh(make_config(batch_size=2), model, (32,), processes)
    assert planned == [("full", "device", 2, "reference", 16, "fsdp=2")]
    assert (str(workload.mesh), workload.attention, workload.tile, chosen.remat) == ("fsdp=2", "auto", None, "full")
