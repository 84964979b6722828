"""HLO text is read and counted: kernels, bytes, operations, host trips, collectives, loops and their names."""

from pathlib import Path

import jax
import jax.numpy as jnp
from case_tables import cases, refused

from benchmarks.kernel_counts.cost import Collective, Cost, instruction_cost
from benchmarks.kernel_counts.hlo import Computation, Instruction, Module, Shape, parse
from benchmarks.kernel_counts.launches import PROGRAM, count_launches
from benchmarks.kernel_counts.loops import Loop, count

LOOPS = (Path(__file__).parents[1] / "golden/loops.hlo").read_text()
"""As XLA's GPU compiler prints it, written by hand and small enough to count by hand."""
THUNKS = """\
001: kWhile         [source | next=008 (1)]
condition:
    002: kCustomKernel [source | sink] compare grid: [1, 1, 1]
  body:
    003: kCustomKernel [source | next=000 (1)] step grid: [1, 1, 1]
    000: kCommandBuffer [prev=003 (1) | next=005 (1)]
        004: kCopy [source | sink] kCopy
        010: kWhile [source | sink]
condition:
            015: kCustomKernel [source | sink] more grid: [1, 1, 1]
          body:
            016: kCustomKernel [source | sink] less grid: [1, 1, 1]
    005: kConditional  [prev=000 (1) | sink]
      false_branch:
        No thunks.      true_branch:
        006: kWhile [source | next=007 (1)]
condition:
            011: kCustomKernel [source | sink] any grid: [1, 1, 1]
          body:
            012: kCustomKernel [source | sink] again grid: [1, 1, 1]
        007: kCustomKernel [prev=006 (1) | sink] row grid: [1, 1, 1]
008: kAsyncStart    [prev=001 (1) | sink] stream=communication_stream[0]
    013: kAllReduce [source | sink] kAllReduce
009: kCopy          [prev=008 (1) | sink] kCopy
014: kAsyncDone     [prev=008 (1) | sink] async_id=8
"""
"""As XLA prints the order of what it runs, graphs with what is in them."""
MORE = """
%more (x: f32[4,0]) -> f32[4,0] {
  %inner = f32[4,0]{1,0} while(%x), condition=%is_outside, body=%draw_again
  ROOT %nothing = f32[4,0]{1,0} copy(%inner)
}
"""
ARRAY = 4 * 8 * 4
"""Bytes of f32[4,8]."""


def one(lines: str) -> Cost:
    """Return the cost of the last instruction of an entry computation."""
    body = "\n".join(f"  {line.strip()}" for line in lines.strip().splitlines())
    module = parse(f"HloModule m\n\nENTRY %main () -> f32[] {{\n{body}\n}}\n")
    return instruction_cost(module, module.entry, module.entry.instructions[-1], "")


def find(computation: Computation, name: str) -> Instruction:
    return computation.by_name[name]


def loops() -> dict[str, Loop]:
    return {each.path or each.name: each for each in count(parse(LOOPS)).walk()}


def test_text_that_is_no_module_is_refused() -> None:
    refused(parse, "module @jit_f {}", match="no HLO module: it has no ENTRY")


def test_an_instruction_is_read_with_the_leaves_of_its_tuple() -> None:
    steps = find(parse(LOOPS).entry, "steps")
    assert steps.opcode == "while" and steps.operands == ("start",)
    assert steps.shapes == (Shape("s32", ()), Shape("f32", (4, 8)), Shape("f32", (3, 4, 8)))
    assert steps.called("body", "condition") == ("env_step", "unfinished")
    assert steps.trip_count == 3


@cases("groups", "[1,8]<=[8]", "{{0,1,2,3,4,5,6,7}}", "mesh['axis_0'=1,'axis_1'=8] {'axis_1'}", "mesh['env'=8] {'env'}")
def test_every_form_of_replica_groups_gives_their_size(groups: str) -> None:
    text = f"%x = f32[] parameter(0)\n%r = f32[] all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%add"
    (collective,) = one(text).collectives
    assert collective == Collective("all-reduce", 4, 8, "")


SLICED = LOOPS.replace("calls=%write_row", "calls=%read_row").replace("(%kept, %next, %i)", "(%kept, %i)")


@cases(
    "text name num_bytes",
    (LOOPS, "stepped", 3 * ARRAY),  # a fusion reads its operands and writes its result
    (LOOPS, "stored", 2 * ARRAY + 4),  # of an array updated in place the row, and the index
    (SLICED, "stored", 2 * ARRAY + 4),  # of an array that is sliced the slice
)
def test_a_fusion_is_one_kernel_that_moves_what_it_touches(text: str, name: str, num_bytes: int) -> None:
    module = parse(text)
    within = module.computations["env_step"]
    cost = instruction_cost(module, within, find(within, name), "")
    assert (cost.kernels, cost.num_bytes) == (1.0, num_bytes)
    assert name != "stepped" or cost.element_ops == 2 * 32  # a product and a sum


def test_products_inside_a_fusion_count() -> None:
    module = parse(LOOPS)
    assert instruction_cost(module, module.entry, module.entry.root, "").dot_flops == {"f32": 2 * 4 * 16 * 8}


A, X = "%a = f32[4,8]{1,0} parameter(0)", "%x = f32[4]{0} parameter(0)"
DOT = "%d = f32[4,4]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}"
GEMM = """%a = bf16[8,32]{1,0} parameter(0)
%b = bf16[32,16]{1,0} parameter(1)
%g = (bf16[8,16]{1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}"""  # noqa: E501 as XLA writes it
CHOLESKY = """%a = f32[64,12,12]{2,1,0} parameter(0)
%c = (f32[64,12,12]{2,1,0}, s32[64]{0}) custom-call(%a), custom_call_target="cusolver_potrf_ffi\""""
CONVOLUTION = """%x = f32[2,8,8,3]{3,2,1,0} parameter(0)
%k = f32[5,5,3,16]{3,2,1,0} parameter(1)
%y = f32[2,4,4,16]{3,2,1,0} convolution(%x, %k), window={size=5x5}, dim_labels=b01f_01io->b01f"""
GATHER = f"""{X}
%s = (f32[4]{{0}}, f32[32]{{0}}) all-gather-start(%x), channel_id=1, replica_groups=[1,8]<=[8], dimensions={{0}}"""


@cases(
    "text fact expected",
    (f"{A}\n{DOT}, operand_precision={{highest,highest}}", "dot_flops", {"f32 exact": 2 * 4 * 4 * 8}),
    (GEMM, "dot_flops", {"bf16": 2 * 8 * 16 * 32}),
    (GEMM, "library_calls", {"__cublas$gemm": 1}),
    (CHOLESKY, "dot_flops", {"f32": 64 * 12**3 // 3}),
    (CONVOLUTION, "dot_flops", {"f32": 2 * (2 * 4 * 4 * 16) * 5 * 5 * 3}),
    ('%c = (f32[4]{0}) custom-call(), custom_call_target="xla_ffi_python_gpu_callback"', "callbacks", 1.0),
    (GATHER, "collectives", {Collective("all-gather", 32 * 4, 8, ""): 1}),
    (f"{GATHER}\n%d = f32[32]{{0}} all-gather-done(%s)", "kernels", 0.0),
    ("%x = f32[4,0]{1,0} parameter(0)\n%c = f32[4,0]{1,0} copy(%x)", "kernels", 0.0),
    ("%p = u32[] partition-id()", "kernels", 1.0),
    ids=["exact", "gemm", "library", "cholesky", "convolution", "callback", "gather", "its end", "nothing", "number"],
)
def test_an_operation_costs_what_its_operands_say(text: str, fact: str, expected: object) -> None:
    assert getattr(one(text), fact) == expected


def test_a_graph_is_one_launch_and_a_loop_launches_as_often_as_it_turns(tmp_path: Path) -> None:
    assert count_launches(tmp_path, parse(LOOPS)) is None  # there is no list of them
    (tmp_path / "m.thunk_sequence.txt").write_text(THUNKS)
    names = {1: "steps", 6: "redrawn", 9: "nothing", 10: "inner"}
    metadata = "".join(f'profile_annotation: "{name}"\n    thunk_id: {number}\n' for number, name in names.items())
    (tmp_path / "m.thunk_metadata.txt").write_text(metadata)
    counts = count_launches(tmp_path, parse(LOOPS + MORE))
    # a trip: a kernel, a graph, and the longer branch, in which a loop of unknown length asks twice and runs once
    step = 1 + 1 + (2 + 1 + 1)
    assert counts == {"steps": step, "redrawn": 2, "inner": 0, PROGRAM: 3 * step + 1}


def test_loops_have_the_names_that_a_user_knows() -> None:
    assert set(loops()) == {"program", "env step", "env step / reset"}


def test_a_trip_of_the_environments_counts_the_longer_branch_and_one_trip_of_an_unknown_loop() -> None:
    step = loops()["env step"]
    assert loops()["env step / reset"].trips is None and step.trips == 3
    # step, any, all-reduce; the branch's two; one trip of the loop and two questions whether there is another; the row
    assert step.trip.kernels == 3 + 2 + (1 + 2) + 1
    assert step.trip.host_trips == 1 + 2
    assert step.trip.num_collectives == 1


def test_known_trips_multiply_what_a_loop_costs() -> None:
    program, step = loops()["program"], loops()["env step"]
    # around the loop: the broadcast of the empty rows and the product
    assert program.trip.kernels == 3 * step.trip.kernels + 2
    assert program.trip.collectives == {Collective("all-reduce", 1, 8, "env step"): 3}


def test_what_a_scan_of_a_compiled_program_multiplies_is_known() -> None:
    def steps(x: jax.Array) -> jax.Array:
        with jax.named_scope("env_steps"):
            return jax.lax.scan(lambda x, _: (jnp.tanh(x @ x), x), x, length=9)[1]

    program = count(compiled(steps, jnp.ones((16, 16))))
    step = program.find("env step")
    assert step is not None and step.trips == 9
    assert program.trip.dot_flops == {"f32": 9 * 2 * 16**3}
    assert Shape("f32", (9, 16, 16)) in step.shapes


def compiled(function: object, *args: jax.Array) -> Module:
    text = jax.jit(function).lower(*args).compile().as_text()  # type: ignore[arg-type]
    assert text is not None
    return parse(text)
