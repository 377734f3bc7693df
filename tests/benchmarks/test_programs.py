"""The work of a program's operations is read off its text, and programs off a trace."""

import jax
import jax.numpy as jnp
import pytest

PROGRAM = """\
HloModule jit_f, is_scheduled=true

%fused (p: bf16[64,32]) -> f32[64,32] {
  %p = bf16[64,32]{1,0} parameter(0)
  ROOT %c = f32[64,32]{1,0} convert(%p), metadata={op_name="jit(f)/convert"}
}

%sliced (q: bf16[64,32]) -> f32[64,8] {
  %q = bf16[64,32]{1,0} parameter(0)
  %q.1 = bf16[1,64,32]{2,1,0} bitcast(%q)
  %s = bf16[1,64,8]{2,1,0} slice(%q.1), slice={[0:1], [0:64], [0:8]}
  ROOT %e = f32[1,64,8]{2,1,0} convert(%s)
}

%gemm (a: bf16[64,16], b: bf16[32,16]) -> bf16[64,32] {
  %a = bf16[64,16]{1,0} parameter(0)
  %b = bf16[32,16]{1,0} parameter(1)
  ROOT %d = bf16[64,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

ENTRY %main (x: bf16[64,16], w: bf16[32,16]) -> f32[64,32] {
  %x = bf16[64,16]{1,0} parameter(0)
  %w = bf16[32,16]{1,0} parameter(1)
  %blas = (bf16[64,32]{1,0}, s8[1024]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %triton = bf16[64,32]{1,0} fusion(%x, %w), kind=kCustom, calls=%gemm
  %part = f32[1,64,8]{2,1,0} fusion(%triton), kind=kLoop, calls=%sliced
  ROOT %loop = f32[64,32]{1,0} fusion(%triton), kind=kLoop, calls=%fused
}
"""


def test_matmuls_have_flops_wherever_they_are_and_everything_has_bytes():
    from programs import operations

    found = operations(PROGRAM)
    flops, operands = 2 * 64 * 32 * 16, 2 * 16 * (64 + 32)
    assert found["blas"] == (flops, operands + 2 * 64 * 32 + 1024, "bf16[64,32]")
    assert found["triton"] == (flops, operands + 2 * 64 * 32, "bf16[64,32]")
    assert found["part"] == (0, (2 + 4) * 64 * 8, "f32[1,64,8]")
    assert found["loop"] == (0, (2 + 4) * 64 * 32, "f32[64,32]")


def test_programs_are_read_from_a_trace(tmp_path):
    from programs import read_programs

    def f(x):
        return (x @ x).sum()

    x = jnp.ones((48, 48))
    jax.block_until_ready(jax.jit(f)(x))
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(jax.jit(f)(x))
    (trace,) = tmp_path.rglob("*.xplane.pb")
    flops = [work.flops for program in read_programs(trace).values() for work in program._named.values()]
    assert pytest.approx(2 * 48**3) in flops  # beside those of other tests' programs


def test_kernels_of_libraries_are_told_by_their_order():
    from programs import Program

    program = Program(PROGRAM)
    work = program.work(["nvjet_tst", "triton", "loop", "nvjet_tst"])
    assert [each.shape for each in work] == ["bf16[64,32]", "bf16[64,32]", "f32[64,32]", "bf16[64,32]"]
    second = PROGRAM.replace(
        "%triton = bf16", '%more = f32[2]{0} custom-call(%x), custom_call_target="x"\n  %triton = bf16'
    )
    assert [each.shape for each in Program(second).work(["nvjet", "other"])] == ["bf16[64,32]", "f32[2]"]
    assert [each.shape for each in Program(second).work(["nvjet", "other", "third"])] == ["bf16[64,32]", "", ""]
    parts = ["nvjet_splitK", "splitKreduce", "other"]
    assert [each.shape for each in Program(second).work(parts)] == ["bf16[64,32]", "", "f32[2]"]


def test_kernels_that_do_not_repeat_as_the_calls_do_are_not_told():
    from programs import UNKNOWN, Program

    calls = "".join(f'  %c{i} = f32[{i}]{{0}} custom-call(%x), custom_call_target="x"\n' for i in (2, 3, 4))
    program = Program(PROGRAM.replace("  %triton = bf16", calls + "  %triton = bf16"))
    once_then_in_a_loop = ["norm", *["loss"] * 4, "gradient"]
    assert program.work(once_then_in_a_loop) == [UNKNOWN] * 6


def test_calls_with_many_results_are_operations_too():
    from programs import UNKNOWN, Program

    results = ", ".join(f"{'/*index=5*/' if index == 5 else ''}f32[8]{{0:S(5)}}" for index in range(6))
    many = f'  %triton_kernel_call.7 = ({results}) custom-call(%x), custom_call_target="x"\n'
    strange = '  %odd.1 = token[] custom-call %x, custom_call_target="x"\n'
    program = Program(PROGRAM.replace("  %triton = bf16", many + strange + "  %triton = bf16"))
    work = program.work(["nvjet", "adam_kernel", "odd"])
    assert [each.shape for each in work] == ["bf16[64,32]", "f32[8]", ""] and work[2] == UNKNOWN
    assert work[1].bytes == 2 * 64 * 16 + 6 * 4 * 8


def test_kernels_are_held_against_their_limits():
    from kernel_profile import COPY, MATMUL, Kernel, profile_rows

    gemm = Kernel("nvjet", "bf16[64,64]", 2.0, 4, MATMUL * 1e-3, COPY * 1e-4)
    rows = profile_rows([gemm, Kernel("add", "f32[8]", 1.0, 2, 0.0, COPY * 0.9e-3), Kernel("Memcpy", "", 1.0, 2, 0, 0)])
    assert [row["of the limit"] for row in rows] == ["50%", "90%"]
    assert rows[0]["rate"] == "395 TFLOP/s" and rows[0]["share"] == "66.7%"
    assert [row["kernel"] for row in profile_rows([gemm] * 3, top=1)] == ["nvjet", "2 others"]
