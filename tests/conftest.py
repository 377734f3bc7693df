"""Shared fixtures: tiny models, batches, a tokenizer, chats, Triton's interpreter, an H200 compile target."""

import copy
import ctypes
import dataclasses
import functools
import gc
import importlib.util
import itertools
import json
import mmap
import os
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads spin between calls, on the cores of other workers
if os.environ.get("JAX_PLATFORMS") == "cpu":  # before JAX reads it: tiny models compile longer than they run
    gc.disable()  # until tests run: imports make millions of objects, of which most stay
    quick = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    quick += " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"  # those take twice as long to compile
    os.environ["XLA_FLAGS"] = f"{quick} {os.environ.get('XLA_FLAGS', '')}"
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # lines of sources, written into every operation

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_once import share_draws
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from shared_programs import OWN, RUNS, NotingPatch, share
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxglue.data.batch import Batch
from jaxglue.engine import program_cache
from jaxglue.models import build_model, config_from_hf
from jaxglue.ops.kernel_cost import KernelKind
from jaxglue.ops.segments import pack_segments

share_draws()


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=10, help="kills of the campaign in tests/training/test_kills.py")
    parser.addoption("--flips", type=int, default=40, help="flipped bits in tests/training/test_checkpoint.py")


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # modules and tests stay: searching them for garbage while JAX traces takes a tenth of the time
    gc.set_threshold(100_000, 20, 100)
    gc.enable()


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("long") is None)  # a long one at the end would run alone


@pytest.fixture(autouse=True)
def compile_without_turns():
    """Let this process compile again while others do, whatever a run asked for."""
    yield
    program_cache._turns().take = False


@pytest.fixture
def patches():
    """Patch what all tests need; `monkeypatch` is of those that replace something."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture
def monkeypatch():
    """As pytest's, and notes what a test replaces."""
    with NotingPatch.context() as patch:
        yield patch


@pytest.fixture(autouse=True)
def programs_of_runs(request, patches):
    """Let runs of equal models share their programs (see `shared_programs.py`)."""
    if request.path.parent.name in RUNS and not OWN & {*request.fixturenames}:
        share(patches)


@pytest.fixture
def own_programs():
    """Compile also what other tests have compiled."""


@pytest.fixture(autouse=True)
def unsynced_files(patches):
    """Leave files in the page cache: waiting for the disk is a tenth of the time of runs, and no machine fails here."""
    patches.setattr(os, "fsync", lambda descriptor: None)
    if module := sys.modules.get("orbax.checkpoint._src.serialization.tensorstore_utils"):
        patches.setitem(module._DEFAULT_OCDBT_TS_CONTEXT, "file_io_sync", False)


@pytest.fixture(autouse=True)
def short_ends(request, patches):
    """Let runs draw no curve and collect no garbage, a quarter of a short one's time, but those of `whole_runs`."""
    if (module := sys.modules.get("jaxglue.training.loop")) and "whole_runs" not in request.fixturenames:
        patches.setattr(module, "save_loss_curve", lambda *_: None)
        nothing = SimpleNamespace(collect=lambda: 0, freeze=lambda: None, unfreeze=lambda: None)
        patches.setattr(sys.modules["jaxglue.training.record"], "gc", nothing)


@pytest.fixture(autouse=True)
def short_rows(patches):
    """Score texts in rows of 128 tokens: attention over GPUs' 2,048 takes a second without XLA's optimizations."""
    if module := sys.modules.get("jaxglue.generation.scoring"):
        patches.setattr(module, "_SHORTEST_ROW", 128)


DESCRIBED: dict[tuple, list | None] = {}


@pytest.fixture(autouse=True)
def described_once(patches):
    """Describe equal environments once: the process that does it imports transformers, which takes a second."""
    if module := sys.modules.get("jaxglue.rl.episode_process"):
        describe = module.EpisodeProcess.describe

        def once(self):
            file, name, options = self._function
            if not os.path.isfile(file):
                return describe(self)
            key = Path(file).read_bytes(), name, *sorted(options.items())
            if key not in DESCRIBED:
                DESCRIBED[key] = describe(self)
            return copy.deepcopy(DESCRIBED[key])

        patches.setattr(module.EpisodeProcess, "describe", once)


@pytest.fixture
def whole_runs():
    """Let runs do all that they do for users."""


TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="session")
def tiny_config():
    """config.json of a small model without model_type."""
    return TINY


@pytest.fixture(scope="session")
def tiny_model():
    """Build a small random model: tiny_model(model_type, **config changes)."""

    def make(model_type: str = "qwen3", dtype=jnp.float32, **changes):
        config = config_from_hf({"model_type": model_type, **TINY, **changes})
        return build_model(config, dtype=dtype, rngs=nnx.Rngs(0))

    return make


@pytest.fixture(scope="session")
def random_batch():
    """Build a packed batch of random tokens: random_batch([[5, 3], [9]], seq_len=12)."""

    def make(lengths, seq_len: int, vocab_size: int = TINY["vocab_size"], seed: int = 0):
        rng = np.random.default_rng(seed)
        shape = (len(lengths), seq_len)
        segments = pack_segments(lengths, seq_len=seq_len)
        trained = (segments.segment_ids > 0) & (rng.random(shape) < 0.7)
        tokens, targets = (rng.integers(0, vocab_size, shape, dtype=np.int32) for _ in range(2))
        return Batch(tokens=tokens, targets=targets, loss_weights=trained.astype(np.float32), segments=segments)

    return make


CHATML = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}GENERATION{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{{- '<|im_end|>' }}END{{ '\n' }}
{%- else %}{{ message.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

TEMPLATES = {
    "plain": CHATML.replace("GENERATION", "").replace("END", ""),
    "marked": CHATML.replace("GENERATION", "{% generation %}").replace("END", "{% endgeneration %}"),
    # Qwen3: only the last turn shows its (empty) thinking
    "thinking": CHATML.replace("GENERATION", "{% if loop.last %}<think></think>{% endif %}").replace("END", ""),
    # GPT-OSS: the last turn ends with another token
    "closing": CHATML.replace("GENERATION", "").replace(
        "{{- '<|im_end|>' }}END", "{{- '<|endoftext|>' if loop.last and not add_generation_prompt else '<|im_end|>' }}"
    ),
    # a leading message count makes prefixes unstable; turns do not begin at the prompt's end either
    "unstable": "{{ messages | length }}" + CHATML.replace("GENERATION", "").replace("END", "") + "<think>",
}

TEXTS = [
    f"What is {a} plus {b}? It is {a + b}. Good question, the answer is {a}." for a in range(20) for b in range(20)
]


@pytest.fixture(scope="session")
def backend():
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([*TEXTS, "user\n assistant\n system\n tool\n\n"] * 2, trainer)
    return bpe


@pytest.fixture(scope="session")
def make_tokenizer(backend):
    """Make a tokenizer with the named chat template, or none."""
    from transformers import PreTrainedTokenizerFast  # where torch is installed, it takes ten seconds

    def make(template="plain", **special):
        tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", **special}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)
        tokenizer.chat_template = TEMPLATES.get(template)
        return tokenizer

    return make


@pytest.fixture
def write_jsonl(tmp_path):
    """Write rows to a JSONL file and return its path."""

    def write(rows, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def chat_rows():
    """Make `count` chats of one to three exchanges."""

    def exchange(text):
        return [{"role": "user", "content": text[:20]}, {"role": "assistant", "content": text[20:]}]

    def rows(count, seed=0):
        rng = np.random.default_rng(seed)
        chats = [rng.choice(TEXTS, rng.integers(1, 4)) for _ in range(count)]
        return [{"messages": [message for text in chat for message in exchange(str(text))]} for chat in chats]

    return rows


def _between_guards(array: np.ndarray) -> np.ndarray:
    """Return a copy that ends at a page without access, and begins within a page of another: a stray access crashes."""
    if not array.size:
        return array.copy()
    end = (-(-array.nbytes // mmap.PAGESIZE) + 1) * mmap.PAGESIZE
    memory = mmap.mmap(-1, end + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (start, start + end):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), mmap.PAGESIZE, 0) == 0
    copy = np.frombuffer(memory, array.dtype, array.size, end - array.nbytes).reshape(array.shape)
    copy[...] = array
    return copy


class _Buffer:
    """The torch tensor interface used by Triton's interpreter."""

    _NAMES = {  # noqa: RUF012
        "float32": "fp32",
        "float16": "fp16",
        "float8_e4m3fn": "fp8e4nv",
        "int32": "i32",
        "uint8": "u8",
        "int8": "i8",
    }

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = _between_guards(array), self._NAMES[str(array.dtype)]

    def data_ptr(self) -> int:
        return self.array.ctypes.data


_interpreter_lock = threading.Lock()


@contextmanager
def _interpreting():
    """Decorate kernels and Triton's library functions for the interpreter, and restore the language afterwards.

    The interpreter itself restores patches of the kernel but not of its callees, which would break later compilation.
    """
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    scopes = {}

    def patch_until_the_end(function):
        module = function.__globals__["__name__"]
        if module not in scopes:
            scopes[module] = patch_lang(function)
        return mock.Mock()

    with _interpreter_lock:
        patch_lang = interpreter._patch_lang
        options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        before, triton.knobs.runtime.interpret = triton.knobs.runtime.interpret, True
        library = {
            name: interpreter.InterpretedFunction(getattr(tl, name).fn)
            for name in ("cdiv", "cumsum", "max", "min", "sum")
        }
        try:
            with (
                mock.patch.multiple(tl, **library),
                mock.patch.object(interpreter, "_patch_lang", patch_until_the_end),
                mock.patch.object(interpreter.interpreter_builder, "options", options),
            ):
                try:
                    yield
                finally:
                    for scope in reversed(scopes.values()):
                        scope.restore()
        finally:
            triton.knobs.runtime.interpret = before


@functools.cache
def _load_interpreted(name: str):
    """Load a second copy of a kernel module and of those it imports from, decorated for the interpreter."""
    from triton.runtime.jit import JITFunction

    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    with _interpreting():
        spec.loader.exec_module(module)
    for key, part in vars(module).items():
        if isinstance(part, JITFunction):
            setattr(module, key, getattr(_load_interpreted(part.__module__), part.__name__))
    return module


@pytest.fixture(scope="session")
def interpreted():
    """Make a `Launcher` subclass launch on the CPU: float32 and float16 only."""
    pytest.importorskip("jax_triton", reason="needs jax-triton and triton: pip install '.[test]'")
    from reference_kernels import write_references
    from triton.runtime.interpreter import GridExecutor

    from jaxglue.ops.launch import in_order

    class Executor(GridExecutor):
        def _init_args_hst(self, args, kwargs):
            return list(args), dict(kwargs)

        def _restore_args_dev(self, *args):
            pass

    def launch(kernel, inputs, outputs, grid, constants):
        """Return the outputs after a launch on the given initial outputs."""
        function = getattr(_load_interpreted(kernel.__module__), kernel.__name__)

        def run(inputs, outputs):
            buffers = jax.tree.map(lambda a: _Buffer(np.asarray(a)), (*inputs, *outputs))
            with _interpreting():
                Executor(function.rewrite(), function.arg_names, grid)(*buffers, **constants)
            return jax.tree.map(lambda b: b.array, buffers[len(inputs) :])

        types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), outputs)
        return jax.pure_callback(run, types, inputs, outputs)

    def interpret(launcher):
        class Interpreted(launcher):
            def _launch(self, kernel, arrays, out_type, grid, constants, *_, cost, **__):
                assert cost.kind in KernelKind
                arrays = in_order(kernel, arrays)
                written = [any(isinstance(leaf, jax.Ref) for leaf in jax.tree.leaves(array)) for array in arrays]
                inputs = [array for array, out in zip(arrays, written, strict=True) if not out]
                if any(written):
                    flat, tree = jax.tree.flatten((inputs, tuple(itertools.compress(arrays, written))))

                    def run(*flat):
                        inputs, outputs = jax.tree.unflatten(tree, flat)
                        return jax.tree.leaves(launch(kernel, inputs, outputs, grid, constants))

                    return write_references(run, *flat)
                unwritten = tuple(np.full(o.shape, np.nan, o.dtype) for o in out_type)  # an unwritten element shows
                return launch(kernel, inputs, unwritten, grid, constants)

        return Interpreted

    return interpret


# Public H200 properties as XLA's GPU compiler reads them.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 151397597184
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a" name: "NVIDIA H200"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.28.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 28 patch: 0 }
device_description_str: "NVIDIA H200"
"""


@pytest.fixture
def h200(gpu_target):
    """Sharding over one H200, as a compile target."""
    return gpu_target((9, 0))


@pytest.fixture
def gpu_target(monkeypatch):
    """Return the sharding over a GPU of a compute capability, as a compile target with an H200's sizes."""
    for package in ("jax_cuda13_plugin", "jax_triton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"compiling for a GPU needs {package}")
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    # Unlike LLVM for the CPU, ptxas takes longer for code that is not optimized.
    optimized = functools.partialmethod(jax.stages.Lowered.compile, {"xla_backend_optimization_level": 1})
    monkeypatch.setattr(jax.stages.Lowered, "compile", optimized)

    def target(capability):
        major, minor = capability
        feature = "feature_extension: ACCELERATED_FEATURES" if capability == (9, 0) else f"minor: {minor}"
        config = H200.replace("major: 9 feature_extension: ACCELERATED_FEATURES", f"major: {major} {feature}")
        topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1")
        return NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())

    return target
