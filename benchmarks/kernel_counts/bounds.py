"""The time that a trip of a loop takes of each of four resources of a card, from counts and data sheets.

    memory: bytes / bandwidth      arithmetic: Σ products / matrix rate + operations / FP32 rate
    launches: kernels · launch + host trips · round trip      links: bytes that leave a card / link rate

All are bounds but launches, an estimate from above where XLA joins kernels into CUDA graphs.
"""

from dataclasses import dataclass

from ejax.preflight.targets import Card

from .cost import Collective, Cost

LAUNCH_S = 2.5e-6
"""Assumed: from the start of one small kernel to that of the next."""
HOST_TRIP_S = 10e-6
"""Assumed: the device stops, the host reads a predicate and launches what follows."""
NETWORK = 50e9
"""Assumed, bytes/s of each card between hosts: 400 Gbit/s."""


@dataclass(frozen=True)
class Bounds:
    """Seconds."""

    memory: float
    arithmetic: float
    launches: float
    links: float

    @property
    def limiting(self) -> str:
        return max(vars(self), key=vars(self).__getitem__)

    @property
    def seconds(self) -> float:
        return max(vars(self).values())


def bounds(cost: Cost, card: Card, *, hosts: int = 1) -> Bounds:
    products = sum(flops / card.matrix.get(name, card.fp32) for name, flops in cost.dot_flops.items())
    # the slowest link bounds a ring
    link = NETWORK if hosts > 1 else card.link
    sent = sum(count * _sent(each) for each, count in cost.collectives.items())
    return Bounds(
        memory=cost.num_bytes / card.bandwidth,
        arithmetic=products + cost.element_ops / card.fp32,
        launches=cost.kernels * LAUNCH_S + cost.host_trips * HOST_TRIP_S,
        links=sent / link if link else 0.0,
    )


def assumptions(card: Card, *, hosts: int = 1) -> list[str]:
    rates = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in card.matrix.items()) or "none known"
    link = f"{NETWORK / 1e9:.3g} GB/s between hosts" if hosts > 1 else ""
    if not link:
        link = f"links {card.link / 1e9:.4g} GB/s" if card.link else "no rate of links known"
    return [
        f"{card.name}: {card.memory / 2**30:.4g} GiB, {card.bandwidth / 1e12:.4g} TB/s, FP32 {card.fp32 / 1e12:.4g} "
        f"TFLOP/s, matrix products {rates} TFLOP/s (f32 is TF32; float32 as it is takes the FP32 rate), {link}",
        f"{LAUNCH_S * 1e6:g} µs per kernel and {HOST_TRIP_S * 1e6:g} µs per host round trip, without CUDA graphs",
        "a loop of unknown length takes one trip; of a conditional's branches the one with more kernels runs",
        "every kernel reads its operands from memory and writes its results to it, nothing stays in the L2 cache",
    ]


def _sent(each: Collective) -> float:
    """Bytes that leave one card in a ring."""
    size = each.group_size or 1
    # an all-reduce is a reduce-scatter and an all-gather; the result of a scatter is one card's part of the array
    rounds = {"all-reduce": 2, "reduce-scatter": size}.get(each.kind, 1)
    return rounds * each.num_bytes * (size - 1) / size
