"""Networks and samples of soft actors in NumPy: SAC's and REPPO's MLPs, and FlashSAC's networks in float64."""

from typing import Any

import jax
import numpy as np


def part(tree: Any, k: int) -> Any:
    """Take critic k of stacked leaves."""
    return jax.tree.map(lambda x: np.asarray(x)[k], tree)


def mlp(params: Any, x: Any) -> np.ndarray:
    """Evaluate an MLP of one hidden layer of tanh."""
    one, two = (jax.tree.map(np.asarray, params[f"linear_{i}"]) for i in range(2))
    return np.asarray(np.tanh(x @ one["kernel"] + one["bias"]) @ two["kernel"] + two["bias"])


def mlp_critics(params: Any, obs: Any, unit_action: Any) -> np.ndarray:
    """Evaluate stacked critics that are such MLPs: [critics, B, outputs]."""
    x = np.concatenate([obs, unit_action], axis=-1)
    return np.stack([mlp(part(params, k), x) for k in range(len(params["linear_0"]["bias"]))])


def mlp_moments(params: Any, obs: Any) -> list[np.ndarray]:
    """Return mean and log-deviation of an actor that is such an MLP."""
    return np.split(mlp(params["actor"], np.asarray(obs)), 2, axis=-1)


def batch_norm(params: Any, stats: Any, x: np.ndarray) -> np.ndarray:
    """Normalize rows x by running statistics, or by their own where ``stats`` is None."""
    mean = x.mean(0) if stats is None else np.asarray(stats["mean"], float)
    variance = ((x - mean) ** 2).mean(0) if stats is None else np.asarray(stats["variance"], float)
    unit = (x - mean) / np.sqrt(variance + 1e-5)
    return np.asarray(unit * np.asarray(params["scale"], float) + np.asarray(params["bias"], float))


def network(params: Any, stats: Any, x: Any) -> np.ndarray:
    """Evaluate ``ejax.policies.flash``'s network; ``stats`` None: normalized by the rows of x."""
    of = lambda *names: None if stats is None else _at(stats, names)  # noqa: E731
    kernel = lambda *names: np.asarray(_at(params, names)["kernel"], float)  # noqa: E731
    h = batch_norm(params["norm"], of("norm"), np.asarray(x, float)) @ kernel("embed")
    for name in sorted(key for key in params if key.startswith("block_")):
        inner = h @ kernel(name, "linear_0")
        inner = np.maximum(batch_norm(params[name]["norm_0"], of(name, "norm_0"), inner), 0) @ kernel(name, "linear_1")
        h = h + np.maximum(batch_norm(params[name]["norm_1"], of(name, "norm_1"), inner), 0)
    if "post_norm" in params:
        rms = np.sqrt((h**2).mean(-1, keepdims=True) + 1e-6)
        h = h / rms * np.asarray(params["post_norm"]["scale"], float)
    return np.asarray(h @ kernel("output") + np.asarray(params["output"]["bias"], float))


def actor(params: Any, stats: Any, obs: Any, log_std_range: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and log-deviation."""
    mean, raw = np.split(network(params["actor"], stats, obs), 2, axis=-1)
    low, high = log_std_range
    return mean, low + (high - low) / 2 * (1 + np.tanh(raw))


def critics(params: Any, stats: Any, obs: Any, unit_action: Any, num_critics: int = 2) -> np.ndarray:
    """Return logits [critics, B, bins]."""
    x = np.concatenate([obs, unit_action], axis=-1)
    each = [
        network(part(params["critic"], k), None if stats is None else part(stats, k), x) for k in range(num_critics)
    ]
    return np.stack(each)


def draw(mean: np.ndarray, log_std: np.ndarray, noise: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the sample in [-1, 1] and its log-density there."""
    noise = np.asarray(noise, float)
    u = mean + np.exp(log_std) * noise
    log_normal = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)
    return np.tanh(u), (log_normal - np.log(1 - np.tanh(u) ** 2)).sum(-1)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def _at(tree: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        tree = tree[name]
    return tree
