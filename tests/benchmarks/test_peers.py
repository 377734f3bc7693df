"""Scripts of peers: what needs neither their packages nor a GPU."""

import hashlib
import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
ELF, PTX = 2, 1


@pytest.fixture(autouse=True)
def peers(scripts, monkeypatch):
    monkeypatch.syspath_prepend(PEERS)


def fat_binary(*programs: tuple[int, int, bytes]) -> bytes:
    """A container of (kind, architecture, code), as nvcc makes them."""
    entries = b""
    for kind, architecture, code in programs:
        header = struct.pack("<HHIQ", kind, 0x0101, 64, len(code)) + bytes(12) + struct.pack("<I", architecture)
        entries += header.ljust(64, b"\0") + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def test_programs_of_other_gpus_become_zeros_in_place():
    import pack_vllm

    hopper = fat_binary((ELF, 80, b"a" * 32), (ELF, 90, b"b" * 40), (PTX, 80, b"c" * 24), (ELF, 120, b"d" * 16))
    portable = fat_binary((ELF, 75, b"e" * 32), (PTX, 80, b"f" * 24), (PTX, 120, b"g" * 8))
    library = b"code" + hopper + b"\x50\xed\x55\xba others" + portable + b"end"
    kept = pack_vllm.for_hopper(library)
    assert len(kept) == len(library) and kept.startswith(b"code") and kept.endswith(b"end")
    for letter in b"bf":
        assert kept.count(letter) >= library.count(letter) - 2
    assert b"b" * 40 in kept and b"f" * 24 in kept  # machine code, or where there is none what the driver compiles
    assert not [code for code in (b"a" * 32, b"c" * 24, b"d" * 16, b"e" * 32, b"g" * 8) if code in kept]


def test_pieces_are_joined_once_all_have_arrived(tmp_path):

    wheels, there = tmp_path / "wheels", tmp_path / "there"
    wheels.mkdir()
    content = os.urandom(300_000)
    with zipfile.ZipFile(wheels / "vllm-0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("vllm/engine.py", content)
        wheel.writestr("vllm/vllm-rs", b"left out")
        wheel.writestr("vllm/third_party/deep_gemm/x.hpp", b"left out")
        wheel.writestr("vllm/third_party/pynvml.py", b"kept")
    command = [sys.executable, str(PEERS / "pack_vllm.py"), str(tmp_path / "pack"), "--wheels", str(wheels)]
    subprocess.run([*command, "--mebibytes", "0.12"], check=True)
    pieces = sorted((tmp_path / "pack").iterdir(), key=lambda path: int(path.name))
    assert len(pieces) == 3
    for piece in reversed(pieces):
        assert not (there / "site").exists()
        subprocess.run(["bash", str(piece / "join.sh"), str(there)], check=True)
    found = (there / "site/vllm/engine.py").read_bytes()
    assert hashlib.sha256(found).digest() == hashlib.sha256(content).digest()
    assert sorted(path.name for path in (there / "site/vllm").rglob("*.*")) == ["engine.py", "pynvml.py"]


def test_batches_by_length_take_as_long_as_all_pairs():
    import dpo

    rng = np.random.default_rng(0)
    rows = [
        {"prompt_ids": [1] * int(size), "chosen_ids": [2], "rejected_ids": [3]} for size in rng.integers(1, 90, 403)
    ]
    found = [len(row["prompt_ids"]) for row in dpo.by_length(rows, 4, steps=5)]
    assert found[:4] == sorted((len(row["prompt_ids"]) for row in rows), reverse=True)[:4]
    assert len(found) == 44 and found[4:24] == found[24:] and max(np.ptp(np.reshape(found, (-1, 4)), axis=1)) < 4
    assert np.mean(found[24:]) == pytest.approx(np.mean([len(row["prompt_ids"]) for row in rows]), rel=0.03)


def test_checkpointing_of_transformers_stays_on_the_gpu():
    import engines

    tried = ["offload", "device", "none"]
    assert engines.known_checkpointing("unsloth", tried) == tried
    assert engines.known_checkpointing("liger", tried) == ["device", "none"]


def test_ours_beside_vllm_for_each_number_of_requests():
    import serve_peers

    rows = [
        {"server": server, "at a time": streams, "tokens/s": rate, "first token s, p50": wait}
        for server, streams, rate, wait in [("ours", 64, 90.0, 0.2), ("vllm", 64, 100.0, 0.1), ("ours", 256, 1.0, 1.0)]
    ]
    assert serve_peers.ratios(rows) == [
        {"at a time": 64, "tokens/s, ours of vLLM's": "0.90", "first token, p50": "2.00"}
    ]


def test_rounds_of_requests_have_prompts_of_their_own_of_the_same_lengths():
    import serve_peers

    one, other, third = (serve_peers.make_requests(8, 100, (8, 16), (4, 8), seed) for seed in (0, 0, 1))
    assert one == other and {4 <= request["max_tokens"] <= 8 for request in one} == {True}
    for first, second in zip(one, third, strict=True):
        assert first["prompt"] != second["prompt"] and len(first["prompt"]) == len(second["prompt"])
        assert first["max_tokens"] == second["max_tokens"]


@pytest.mark.parametrize(
    ("seconds", "rounds"),
    [([9.0, 5.0, 4.9], 3), ([9.0, 5.0, 6.0], 3), ([9.0, 9.5], 2), ([0.5**n for n in range(8)], 8), ([60.0, 50.0], 2)],
)
def test_servers_are_warmed_up_until_rounds_are_hardly_faster(seconds, rounds):
    import serve_peers

    sent = []
    assert serve_peers.warm_up(lambda number: sent.append(number) or seconds[number - 1], limit=100) == rounds
    assert sent == [*range(1, rounds + 1)]


def test_a_size_of_batches_that_does_not_hold_all_pairs_has_no_speed(monkeypatch):
    import dpo

    class FullError(Exception):
        pass

    def build_trainer(args, batch, kind, results):
        def train():
            results[-1] |= {"pairs_per_second": float(batch)}
            if batch > 4:
                raise FullError("CUDA out of memory\nmore")

        return SimpleNamespace(train=train)

    cuda = SimpleNamespace(is_available=lambda: False, OutOfMemoryError=FullError)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(dpo, "build_trainer", build_trainer)
    monkeypatch.setattr(dpo, "make_clock", lambda batch, warm_up, host, results: results)
    args = SimpleNamespace(checkpointing=["device"], batch=[4, 8], warm_up=1, engine="trl", by_length=False)
    *_, told = dpo.measure(args)
    assert told["pairs_per_step"] == 4 and told["tried"][1]["error"] == "CUDA out of memory"
    assert "pairs_per_second" not in told["tried"][1]


def test_a_peers_file_tells_where_and_how_it_was_measured(tmp_path, monkeypatch):
    import engines

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)))
    engines.write_results(tmp_path / "a.json", {"ms": 1.0})
    told = json.loads((tmp_path / "a.json").read_text())
    assert told.keys() == {"gpu", "date", "commit", "versions", "command", "host_memory_gib", "results"}


def test_a_server_that_has_the_port_is_not_measured_in_anothers_place(tmp_path, monkeypatch):
    import serve_peers

    monkeypatch.setattr(serve_peers, "_answers", lambda port: True)
    monkeypatch.setattr(serve_peers, "command_of", lambda *_: (["false", "", "vllm.x"], {}))
    (row,) = serve_peers.told("vllm", tmp_path, SimpleNamespace(port=1, limit=1), tmp_path / "log")
    assert row["server"] == "vllm" and "already" in row["error"]
