"""The pretrained encoders beside torch: largest difference on the real checkpoints, and CPU time of a picture.

Both run on the same cores, ``--cores`` of them, of which all threads' CPU time is counted: the median of the calls, per
picture (and sentence). Needs the checkpoints and torch's encoder: tests/check.sh --torch installs them.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 16
SIZES = (64, 96, 224)
STRIDES = (16, 32)
LAST_BLOCK = {16: 10, 32: 15}
SENTENCES = ["put the red cube in the left zone", "move the purple block over to the zone on the right, please"] * 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, default=1, help="the first so many of this process (default: 1)")
    parser.add_argument("--calls", type=int, default=10, help="that are timed (default: 10)")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])  # before jax counts them

    import jax
    import torch
    from efficientnet_lite_pytorch import EfficientNet

    sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "interop")]
    from test_interop_pretrained import TorchMiniLM, as_torch

    from ejax.policies.pretrained import efficientnet, minilm
    from ejax.policies.pretrained.weights import find_weights, load_weights

    torch.set_num_threads(args.cores)
    torch.set_grad_enabled(False)
    reference = EfficientNet.from_name("efficientnet-lite0").eval()
    reference.load_state_dict(torch.load(find_weights(efficientnet.EFFICIENTNET_WEIGHTS), weights_only=True))
    rng = np.random.default_rng(0)

    def timed(call: Callable[[], Any], rows: int) -> float:
        return _cpu_ms(call, args.calls) / rows

    image = rng.integers(0, 256, (BATCH, 224, 224, 3), np.uint8)
    module, variables = efficientnet.load_classifier()
    got, wanted = np.asarray(jax.jit(module.apply)(variables, image)), reference(as_torch(image)).numpy()
    agree = int((got.argmax(-1) == wanted.argmax(-1)).sum())
    print(f"logits: apart by at most {_apart(got, wanted)}; top-1 {agree}/{BATCH}")

    print(f"\n| picture | stride | features | apart | ejax, ms CPU | torch, ms CPU |\n{'|---' * 6}|")
    for size in SIZES:
        image = rng.integers(0, 256, (BATCH, size, size, 3), np.uint8)
        for stride in STRIDES:
            encoder, variables = efficientnet.load_efficientnet(stride=stride)
            apply = jax.jit(encoder.apply)
            of_torch = _blocks_of(reference, LAST_BLOCK[stride])
            got, wanted = np.asarray(apply(variables, image)), of_torch(as_torch(image)).permute(0, 2, 3, 1).numpy()
            ours = timed(lambda: apply(variables, image).block_until_ready(), BATCH)  # noqa: B023
            theirs = timed(lambda: of_torch(as_torch(image)), BATCH)  # noqa: B023
            shape = " × ".join(map(str, got.shape[1:]))
            cells = (f"{size} × {size}", stride, shape, _apart(got, wanted), f"{ours:.2f}", f"{theirs:.2f}")
            print(f"| {' | '.join(map(str, cells))} |", flush=True)

    sentence, variables, tokenizer = minilm.load_minilm()
    token, valid = tokenizer.batch(SENTENCES)
    bert = TorchMiniLM({name: torch.tensor(x) for name, x in load_weights(minilm.MINILM_WEIGHTS).items()})
    apply = jax.jit(sentence.apply)
    got, wanted = np.asarray(apply(variables, token, valid)), bert(token, valid)
    ours = timed(lambda: apply(variables, token, valid).block_until_ready(), len(SENTENCES))
    theirs = timed(lambda: bert(token, valid), len(SENTENCES))
    print(
        f"\nembeddings, {token.shape[1]} tokens: apart by at most {_apart(got, wanted)}, "
        f"cosine at least 1 - {1 - (got * wanted).sum(-1).min():.0e}; "
        f"{ours:.2f} ms CPU a sentence, torch {theirs:.2f}"
    )

    form = ("NHWC", "HWIO", "NHWC")
    depthwise = efficientnet._Depthwise(3, 1)
    x = rng.normal(size=(8, 48, 48, 96)).astype(np.float32)
    variables = depthwise.init(jax.random.key(0), x)
    shifted = jax.jit(depthwise.apply)
    of_xla = jax.jit(
        lambda kernel, x: jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=form, feature_group_count=96
        )
    )
    ours = timed(lambda: shifted(variables, x).block_until_ready(), 1)
    theirs = timed(lambda: of_xla(variables["params"]["kernel"], x).block_until_ready(), 1)
    print(
        f"\na depthwise convolution, 8 × 48 × 48 × 96, 3 × 3: {ours:.1f} ms CPU as shifted products, XLA's {theirs:.1f}"
    )


def _apart(got: np.ndarray, wanted: np.ndarray) -> str:
    return f"{np.abs(got - wanted).max():.1e} of {np.abs(wanted).max():.2g}"


def _blocks_of(model: Any, last: int) -> Callable[[Any], Any]:
    def features(x: Any) -> Any:
        x = model._swish(model._bn0(model._conv_stem(x)))
        for block in model._blocks[: last + 1]:
            x = block(x)
        return x

    return features


def _cpu_ms(call: Callable[[], Any], calls: int) -> float:
    """Measure all threads' CPU time of a call; the first one compiles."""
    call()
    took = []
    for _ in range(calls):
        before = time.process_time()
        call()
        took.append(time.process_time() - before)
    return 1000 * statistics.median(took)


if __name__ == "__main__":
    main()
