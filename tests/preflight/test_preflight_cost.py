"""HLO text is read and counted: kernels, bytes, operations, host trips, collectives, loops and their names."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from releases import names_of_loops

from ejax.preflight.cost import Collective, Cost, instruction_cost
from ejax.preflight.hlo import Computation, Instruction, Module, Shape, parse
from ejax.preflight.loops import EPOCH, MINIBATCH, Loop, count

LOOPS = (Path(__file__).parents[1] / "golden/loops.hlo").read_text()
"""As XLA's GPU compiler prints it, written by hand and small enough to count by hand."""
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
    with pytest.raises(ValueError, match="no HLO module: it has no ENTRY"):
        parse("module @jit_f {}")


def test_an_instruction_is_read_with_the_leaves_of_its_tuple() -> None:
    steps = find(parse(LOOPS).entry, "steps")
    assert steps.opcode == "while" and steps.operands == ("start",)
    assert steps.shapes == (Shape("s32", ()), Shape("f32", (4, 8)), Shape("f32", (3, 4, 8)))
    assert steps.called("body", "condition") == ("env_step", "unfinished")
    assert steps.trip_count == 3


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [("pred", 6), ("s4", 3), ("bf16", 12), ("f32", 24), ("f64", 48), ("f8e4m3fn", 6), ("token", 0)],
)
def test_a_shape_knows_its_bytes(dtype: str, num_bytes: int) -> None:
    assert Shape(dtype, (2, 3)).num_bytes == num_bytes


@pytest.mark.parametrize(
    "groups", ["[1,8]<=[8]", "{{0,1,2,3,4,5,6,7}}", "mesh['axis_0'=1,'axis_1'=8] {'axis_1'}", "mesh['env'=8] {'env'}"]
)
def test_every_form_of_replica_groups_gives_their_size(groups: str) -> None:
    text = f"%x = f32[] parameter(0)\n%r = f32[] all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%add"
    (collective,) = one(text).collectives
    assert collective == Collective("all-reduce", 4, 8, "")


def test_a_fusion_is_one_kernel_that_reads_its_operands_and_writes_its_result() -> None:
    module = parse(LOOPS)
    within = module.computations["env_step"]
    cost = instruction_cost(module, within, find(within, "stepped"), "")
    assert cost.kernels == 1.0
    assert cost.num_bytes == 3 * ARRAY
    assert cost.element_ops == 2 * 32  # a product and a sum


def test_of_an_array_updated_in_place_only_the_row_counts() -> None:
    module = parse(LOOPS)
    within = module.computations["env_step"]
    assert instruction_cost(module, within, find(within, "stored"), "").num_bytes == 2 * ARRAY + 4  # and the index


def test_of_an_array_that_is_sliced_only_the_slice_is_read() -> None:
    module = parse(LOOPS.replace("calls=%write_row", "calls=%read_row").replace("(%kept, %next, %i)", "(%kept, %i)"))
    within = module.computations["env_step"]
    stored = find(within, "stored")
    assert instruction_cost(module, within, stored, "").num_bytes == 2 * ARRAY + 4


def test_products_inside_a_fusion_count() -> None:
    module = parse(LOOPS)
    assert instruction_cost(module, module.entry, module.entry.root, "").dot_flops == {"f32": 2 * 4 * 16 * 8}


def test_a_product_that_asks_for_full_precision_is_told_apart() -> None:
    dot = "%d = f32[4,4]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}"
    text = f"%a = f32[4,8]{{1,0}} parameter(0)\n{dot}, operand_precision={{highest,highest}}"
    assert one(text).dot_flops == {"f32 exact": 2 * 4 * 4 * 8}


def test_a_library_product_has_the_operations_of_its_operands() -> None:
    text = """
    %a = bf16[8,32]{1,0} parameter(0)
    %b = bf16[32,16]{1,0} parameter(1)
    %g = (bf16[8,16]{1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", """
    config = '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    cost = one(f"{text}backend_config={config}")
    assert cost.dot_flops == {"bf16": 2 * 8 * 16 * 32}
    assert cost.library_calls == {"__cublas$gemm": 1} and cost.kernels == 1


def test_a_cholesky_has_a_third_of_a_cube_for_each_matrix() -> None:
    text = """
    %a = f32[64,12,12]{2,1,0} parameter(0)
    %c = (f32[64,12,12]{2,1,0}, s32[64]{0}) custom-call(%a), custom_call_target="cusolver_potrf_ffi"
    """
    assert one(text).dot_flops == {"f32": 64 * 12**3 // 3}


def test_a_convolution_counts_window_and_channels() -> None:
    text = """
    %x = f32[2,8,8,3]{3,2,1,0} parameter(0)
    %k = f32[5,5,3,16]{3,2,1,0} parameter(1)
    %y = f32[2,4,4,16]{3,2,1,0} convolution(%x, %k), window={size=5x5}, dim_labels=b01f_01io->b01f
    """
    assert one(text).dot_flops == {"f32": 2 * (2 * 4 * 4 * 16) * 5 * 5 * 3}


def test_a_callback_to_python_is_counted() -> None:
    text = '%c = (f32[4]{0}) custom-call(), custom_call_target="xla_ffi_python_gpu_callback"'
    assert one(text).callbacks == 1.0


def test_an_all_gather_that_starts_is_counted_by_its_result_and_its_end_is_free() -> None:
    text = """
    %x = f32[4]{0} parameter(0)
    %s = (f32[4]{0}, f32[32]{0}) all-gather-start(%x), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
    """
    assert set(one(text).collectives) == {Collective("all-gather", 32 * 4, 8, "")}
    assert one(text + "\n%d = f32[32]{0} all-gather-done(%s)").kernels == 0.0


def test_loops_have_the_names_that_a_user_knows() -> None:
    assert set(loops()) == {"program", "env step", "env step / reset"}


def test_a_trip_of_the_environments_counts_the_longer_branch_and_one_trip_of_an_unknown_loop() -> None:
    step = loops()["env step"]
    # step, any, all-reduce; the branch's two; one trip of the loop and two questions whether there is another; the row
    assert step.trip.kernels == 3 + 2 + (1 + 2) + 1
    assert step.trip.host_trips == 1 + 2
    assert step.trip.num_collectives == 1


def test_known_trips_multiply_what_a_loop_costs() -> None:
    program, step = loops()["program"], loops()["env step"]
    # around the loop: the broadcast of the empty rows and the product
    assert program.trip.kernels == 3 * step.trip.kernels + 2
    assert program.trip.collectives == {Collective("all-reduce", 1, 8, "env step"): 3}


def test_a_loop_of_unknown_length_has_no_number_of_trips() -> None:
    assert loops()["env step / reset"].trips is None and loops()["env step"].trips == 3


@names_of_loops
def test_a_scan_of_scans_is_epochs_of_minibatches() -> None:
    def learn(x: jax.Array) -> jax.Array:
        minibatch = lambda x, _: (jnp.sin(x) @ jnp.cos(x), None)  # noqa: E731
        epoch = lambda x, _: (jax.lax.scan(minibatch, x, length=5)[0] + 1.0, None)  # noqa: E731
        return jax.lax.scan(epoch, x, length=7)[0]

    program = count(compiled(learn, jnp.ones((6, 6))))
    epoch, minibatch = program.find(EPOCH), program.find(MINIBATCH)
    assert epoch is not None and minibatch is not None
    assert (epoch.trips, minibatch.trips) == (7, 5)
    assert minibatch.trip.dot_flops == {"f32": 2 * 6**3}
    assert program.trip.dot_flops == {"f32": 7 * 5 * 2 * 6**3}


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
