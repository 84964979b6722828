"""Sizes, memory and least time of pi0 and SmolVLA as published, by preflight's arithmetic: a table in Markdown.

One chunk for one observation of so many pictures, compiled for a card that need not be here, with random weights of
float32 and products of bfloat16. Needs the extra ``preflight``.
"""

import argparse
import os
from dataclasses import replace
from typing import Any, get_args

os.environ["JAX_PLATFORMS"] = "cpu"  # a GPU that is here stays untouched
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from ejax.policies.vla.config import HeadConfig
from ejax.policies.vla.expert import ExpertNetwork, Kind, touch_all
from ejax.policies.vla.flow import FlowChunk, FlowSpec
from ejax.policies.vla.lerobot_folder import FULL
from ejax.preflight.run import Program, absent_devices, measure_program, without_compilation_cache
from ejax.preflight.targets import find_card


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=get_args(Kind), metavar="pi0|smolvla", help="(default: both)")
    parser.add_argument("--target", default="rtx4090", help="the card, as of ejax preflight (default: %(default)s)")
    parser.add_argument("--pictures", type=int, default=2, help="(default: %(default)s)")
    args = parser.parse_args()
    print("| model | parameters | card | memory, GiB | product FLOPs | bytes | at least, ms | limited by |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in args.models:
        count, facts = chunk_of(kind, args.target, args.pictures)
        flops, limit = sum(facts["product_flops"].values()), facts["limited_by"]
        numbers = f"{facts['memory']['peak'] / 2**30:.1f} | {flops:.2e} | {facts['bytes']:.2e}"
        print(f"| {kind} | {count:,} | {args.target} | {numbers} | {1e3 * facts['bounds_s'][limit]:.1f} | {limit} |")


def chunk_of(kind: Kind, target: str, pictures: int) -> tuple[int, dict[str, Any]]:
    """Compile one chunk of a published model: ``(parameters, facts as preflight's)``."""
    card, spec = find_card(target), replace(FULL[kind], torch_dtype="bfloat16")
    (device,) = absent_devices(card, gpus=1, hosts=1)
    place, size, network = SingleDeviceSharding(device), spec.patch * spec.side, ExpertNetwork(spec)

    def shaped(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    given = {
        "pictures": (shaped((1, size, size, 3), jnp.uint8),) * pictures,
        "token": shaped((1, 48), jnp.int32),
        "read": shaped((1, 48), jnp.bool_),
        "state": shaped((1, spec.state_dim), jnp.float32),
    }
    made = jax.eval_shape(lambda key, given: network.init(key, given, method=touch_all), jax.random.key(0), given)
    params = jax.tree.map(lambda x: shaped(x.shape, x.dtype), made)

    def chunk(params: Any, given: Any) -> Any:
        context = network.apply(params, **given, method="encode")
        flow = FlowSpec(network, spec.chunk, spec.max_action, HeadConfig(num_steps=10), spec.action_dim)
        return FlowChunk(params, context, flow, (1,)).mode()

    with without_compilation_cache():
        traced = jax.jit(chunk).trace(params, given)
        _, _, facts = measure_program(card, 1, Program("evaluate", traced, traced.lower(), 0))
    return sum(x.size for x in jax.tree.leaves(made["params"])), facts


if __name__ == "__main__":
    main()
