"""An MLP's loss and gradient on a CPU: minibatches computed as rows beside as columns, alternately; median ms.

taskset -c 0,1 python benchmarks/columns.py
"""

import time
from statistics import median

import jax
import jax.numpy as jnp

import ejax.policies.mlp as mlp
from ejax.runtime.device import matmul_precision, prepare_jax

REPEATS = 25
FORMS = {"rows": 2**62, "columns": 0}
"""Smallest size that is computed as columns."""


def main() -> None:
    prepare_jax("cpu")
    print("| rows | hidden layers | as rows, ms | as columns, ms |\n|---|---|---|---|")
    for rows in (512, 1024, 2048, 4096, 8192):
        for width in (64, 128, 256):
            network = mlp.MLP(mlp.NetworkConfig(hidden_sizes=(width, width), activation="tanh"), 4)
            x = jax.random.normal(jax.random.key(0), (rows, 12))
            params = network.init(jax.random.key(1), x[:1])
            compiled = {}
            for form, smallest in FORMS.items():
                mlp._MIN_COLUMN_NUMBERS = smallest
                with matmul_precision("float32", "cpu"):
                    loss = jax.value_and_grad(lambda params, x, net=network: jnp.square(net.apply(params, x)).mean())
                    compiled[form] = jax.jit(loss).lower(params, x).compile()
            seconds: dict[str, list[float]] = {form: [] for form in FORMS}
            for _ in range(REPEATS):
                for form, run in compiled.items():
                    began = time.perf_counter()
                    jax.block_until_ready(run(params, x))
                    seconds[form].append(time.perf_counter() - began)
            cells = " | ".join(f"{1e3 * median(each[1:]):.2f}" for each in seconds.values())
            print(f"| {rows:,} | {width}-{width} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
