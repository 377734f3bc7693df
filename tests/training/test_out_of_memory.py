"""Running out of memory ends in one line."""

import jax
import pytest
from selection import repeat, repeats_parts_of

from jaxglue.planner.gpus import find_gpu
from jaxglue.training import out_of_memory
from jaxglue.training.out_of_memory import OutOfMemory, explained_out_of_memory
from jaxglue.training.record import MemoryUse
from jaxglue.training.setup import resolve
from jaxglue.training.train import train


@repeats_parts_of("test_gpu_out_of_memory_names_a_plan_that_fits")
def test_exhausted_memory_names_plan_and_remedy(make_config, monkeypatch):
    def exhausted(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")

    monkeypatch.setattr("jaxglue.training.loop.train_step", exhausted)
    line = r"ran out of memory, .*planned was --remat 'dots'.*1 × 96 tokens\. Lower --batch-size or --seq-len"
    with pytest.raises(OutOfMemory, match=line) as error:
        train(make_config(steps=2))
    assert "\n" not in str(error.value)


def test_gpu_out_of_memory_names_a_plan_that_fits(make_config, monkeypatch):
    monkeypatch.setattr(out_of_memory, "memory_use", lambda devices: MemoryUse(0, 2**34, "device"))
    monkeypatch.setattr(out_of_memory, "device_gpu", lambda *_: find_gpu("H200"))
    setup = resolve(make_config(remat="none", batch_size=4096))
    line = (
        r"the GPU ran out of memory, with 16.0 GiB .*planned was --remat 'none'.* --remat '.*' .*or lower --batch-size"
    )
    with pytest.raises(OutOfMemory, match=line), explained_out_of_memory(setup):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")


@pytest.mark.parametrize(
    ("limit", "kind", "said"), [(15.0, "device", True), (17.0, "device", False), repeat(15.0, "host", False)]
)
def test_memory_beyond_the_limit_is_said_after_the_first_step(make_config, monkeypatch, capsys, limit, kind, said):
    monkeypatch.setattr(out_of_memory, "memory_use", lambda devices: MemoryUse(0, 2**34, kind))
    train(make_config(steps=1, memory_limit=limit, remat="dots"))
    line = "took 16.0 GiB of the GPU, above the 14.3 that --memory-limit 15 leaves: where no more is free, start again"
    assert (line in " ".join(capsys.readouterr().out.split())) == said
