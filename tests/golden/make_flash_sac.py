"""Write flash_sac.npz: gradient steps by FlashSAC's own code (github.com/Holiday-Robot/FlashSAC) under torch, on a CPU.

Usage: PYTHONPATH=FlashSAC python make_flash_sac.py
    FlashSAC: a clone of commit 87edc90; in an environment with torch 2.13.0, gymnasium, omegaconf and jax.

Six steps of small networks on given rows; every other one moves the actor. Noise is drawn by JAX, so that ejax can draw
the same. Keys: ``config``: JSON; ``rows/*`` [steps, B, ...]; ``noise/actor``, ``noise/next`` [steps, B, A];
``init/<network>/*``, ``final/<network>/*`` (state dicts); ``adam/<network>/<moment>/*``; ``metric/*`` [steps].
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import jax
import numpy as np
import torch
from flash_rl.agents.flashSAC.network import FlashSACActor, FlashSACDoubleCritic, FlashSACTemperature
from flash_rl.agents.flashSAC.update import update_actor, update_critic, update_target_network, update_temperature
from flash_rl.agents.utils.network import Network

STEPS, ROWS, OBS, ACTIONS = 6, 16, 5, 3
CONFIG = {
    "actor_width": 8,
    "critic_width": 6,
    "num_blocks": 2,
    "num_bins": 11,
    "value_range": 5.0,
    "learning_rate": 3e-4,
    "gamma": 0.97,
    "tau": 0.05,
    "target_std": 0.15,
    "alpha": 0.05,
    "reward_divisor": 2.0,
    "first_key": 100,
}
CPU, SMALL = torch.device("cpu"), {"num_blocks": CONFIG["num_blocks"]}


def make_networks() -> dict[str, Network]:
    """Build them as the agent does, uncompiled, and move every parameter and statistic from where it begins."""
    bins = {"num_bins": CONFIG["num_bins"], "min_v": -CONFIG["value_range"], "max_v": CONFIG["value_range"]}
    critic, target = (
        FlashSACDoubleCritic(**SMALL, **bins, input_dim=OBS + ACTIONS, hidden_dim=CONFIG["critic_width"])
        for _ in range(2)
    )
    modules = {
        "actor": FlashSACActor(**SMALL, input_dim=OBS, hidden_dim=CONFIG["actor_width"], action_dim=ACTIONS),
        "critic": critic,
        "target": target,
        "temperature": FlashSACTemperature(CONFIG["alpha"]),
    }
    networks: dict[str, Network] = {}
    for name, module in modules.items():
        normalizes = {"use_weight_normalization": name != "temperature"}
        if name == "target":
            networks[name] = Network(module, ema_source=networks["critic"], ema_tau=CONFIG["tau"], **normalizes)
        else:
            adam = torch.optim.Adam(module.parameters(), lr=CONFIG["learning_rate"])
            networks[name] = Network(module, optimizer=adam, **normalizes)
    for name in ("actor", "critic", "target"):
        with torch.no_grad():
            for x in networks[name].network.parameters():
                x.add_(0.3 * torch.randn_like(x))
        networks[name].normalize_parameters()
        for buffer, x in networks[name].network.named_buffers():
            if "running" in buffer:
                x.add_(0.3 * torch.rand_like(x))
    return networks


def make_rows() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    obs = 2.0 * rng.normal(size=(STEPS, ROWS, OBS))
    rows = {
        "observation": obs,
        "next_observation": obs + 0.5 * rng.normal(size=obs.shape),
        "action": rng.uniform(-1.0, 1.0, (STEPS, ROWS, ACTIONS)),
        "reward": 3.0 * rng.normal(size=(STEPS, ROWS)),
        "terminated": rng.uniform(size=(STEPS, ROWS)) < 0.2,
    }
    return {name: x.astype(np.float32) for name, x in rows.items()}


def make_noise() -> dict[str, np.ndarray]:
    keys = jax.vmap(lambda i: jax.random.split(jax.random.key(i)))(CONFIG["first_key"] + np.arange(STEPS))
    draw = jax.vmap(lambda key: jax.random.normal(key, (ROWS, ACTIONS)))
    return {"actor": np.asarray(draw(keys[:, 0])), "next": np.asarray(draw(keys[:, 1]))}


def give_noise(noise: Iterator[torch.Tensor]) -> Callable:
    """Make an ``rsample`` that takes its noise from here; of the actor's joint batch the second half is not read."""

    def rsample(self: torch.distributions.Normal) -> torch.Tensor:
        given = next(noise)
        return self.loc + self.scale * given.repeat(len(self.loc) // len(given), 1)

    return rsample


def step(networks: dict[str, Network], rows: dict[str, torch.Tensor], moves_actor: bool) -> dict[str, float]:
    """Follow ``_update_networks`` of their agent."""
    actor, critic, temperature = networks["actor"], networks["critic"], networks["temperature"]
    batch = {**rows, "reward": rows["reward"] / CONFIG["reward_divisor"]}
    batch |= {f"actor_{name}": batch[name] for name in ("observation", "next_observation")}
    full = {"device": CPU, "use_amp": False, "grad_scaler": None}
    metrics = {"actor_loss": math.nan, "temperature_loss": math.nan}
    if moves_actor:
        info = update_actor(actor, critic, temperature, batch, bc_alpha=0.0, **full)
        entropy_target = 0.5 * ACTIONS * math.log(2.0 * math.pi * math.e * CONFIG["target_std"] ** 2)
        of_temperature = update_temperature(temperature, info["actor/entropy"], entropy_target)
        metrics = {"actor_loss": info["actor/loss"], "temperature_loss": of_temperature["temperature/loss"]}
    bins = {"num_bins": CONFIG["num_bins"], "min_v": -CONFIG["value_range"], "max_v": CONFIG["value_range"]}
    given = {**bins, **full, "gamma": CONFIG["gamma"], "n_step": 1}
    info = update_critic(actor, critic, networks["target"], temperature, batch, **given)
    update_target_network(networks["target"])
    return {name: float(x) for name, x in metrics.items()} | {"critic_loss": float(info["critic/loss"])}


def state_dicts(networks: dict[str, Network]) -> dict[str, np.ndarray]:
    return {
        f"{name}/{key}": x.detach().numpy().copy()
        for name, network in networks.items()
        for key, x in network.network.state_dict().items()
    }


def main() -> None:
    torch.manual_seed(0)
    networks, rows, noise = make_networks(), make_rows(), make_noise()
    out = {f"rows/{name}": x for name, x in rows.items()} | {f"noise/{name}": x for name, x in noise.items()}
    out |= {f"init/{name}": x for name, x in state_dicts(networks).items()}
    history = []
    for i in range(STEPS):
        moves_actor = i % 2 == 0
        drawn = [noise["actor"][i], noise["next"][i]] if moves_actor else [noise["next"][i]]
        torch.distributions.Normal.rsample = give_noise(iter(torch.tensor(x) for x in drawn))
        history.append(step(networks, {name: torch.tensor(x[i]) for name, x in rows.items()}, moves_actor))
    out |= {f"final/{name}": x for name, x in state_dicts(networks).items()}
    for name in ("actor", "critic"):
        for key, x in networks[name].network.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                out[f"adam/{name}/{moment}/{key}"] = networks[name].optimizer.state[x][moment].numpy()
    out |= {f"metric/{name}": np.array([metrics[name] for metrics in history]) for name in history[0]}
    out["config"] = np.array(json.dumps(CONFIG))
    out["versions"] = np.array(f"FlashSAC 87edc90, torch {torch.__version__}, jax {jax.__version__}")
    np.savez_compressed(Path(__file__).with_name("flash_sac.npz"), **out)


if __name__ == "__main__":
    main()
