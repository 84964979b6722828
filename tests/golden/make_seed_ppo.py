"""Write seed_ppo.npz: one PPO update by the formulas of EmbodiChain's first versions, in plain torch 2.13.0, on a CPU.

Usage: python make_seed_ppo.py     (in an environment with torch; neither EmbodiChain nor ejax is needed)

The code of those versions is not distributed, so this is not a run of it but a loop written from its description:
  * the value after the last step of a rollout counts as zero, a time limit as a termination;
  * advantages are normalized, Â = (A − mean A)/(std A + 1e-8), and what the loss then uses is
    (A − mean Â)/(std Â + 1e-8), which hardly changes A;
  * Adam on the gradient, clipped by its norm over all parameters; old log-probabilities are the collected ones.

Layout [T, N], as those versions had it. Keys: ``rollout/*`` [T, N, ..]; ``advantage`` (as the loss uses it),
``return`` [T, N]; ``init/*``, ``final/*`` (state dicts); ``metric/*``; ``config``: JSON.
"""

import json
from pathlib import Path

import numpy as np
import torch
from torch import nn

T, N, OBS, ACTION = 7, 8, 14, 2
HIDDEN = [16, 8]
CFG = {
    "learning_rate": 0.01,
    "n_epochs": 4,
    "batch_size": T * N,
    "gamma": 0.97,
    "gae_lambda": 0.9,
    "clip_coef": 0.2,
    "ent_coef": 0.01,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
}


def main() -> None:
    torch.manual_seed(0)
    actor, critic, log_std = mlp(ACTION), mlp(1), nn.Parameter(torch.tensor([-0.5, -0.2]))
    named = {"log_std": log_std}
    named |= {f"actor.{name}": p for name, p in actor.named_parameters()}
    named |= {f"critic.{name}": p for name, p in critic.named_parameters()}
    out = {f"init/{name}": p.detach().numpy().copy() for name, p in named.items()}

    obs = torch.randn(T, N, OBS)
    with torch.no_grad():
        policy = torch.distributions.Normal(actor(obs), log_std.exp())
        action = policy.sample()
        logprob, value = policy.log_prob(action).sum(-1), critic(obs)[..., 0]
    reward, terminated, truncated = torch.randn(T, N), torch.rand(T, N) < 0.15, torch.rand(T, N) < 0.15
    rollout = {
        "obs": obs,
        "action": action,
        "log_prob": logprob,
        "value": value,
        "reward": reward,
        "terminated": terminated,
        "truncated": truncated,
    }
    out |= {f"rollout/{name}": x.numpy() for name, x in rollout.items()}

    advantage, target = advantages(reward, value, terminated | truncated)
    once = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    used = (advantage - once.mean()) / (once.std() + 1e-8)
    out |= {"advantage": used.numpy(), "return": target.numpy()}

    optimizer = torch.optim.Adam(named.values(), lr=CFG["learning_rate"])
    history = []
    for _ in range(CFG["n_epochs"]):
        policy = torch.distributions.Normal(actor(obs), log_std.clamp(-5.0, 2.0).exp())
        ratio = (policy.log_prob(action).sum(-1) - logprob).exp()
        clipped = ratio.clamp(1.0 - CFG["clip_coef"], 1.0 + CFG["clip_coef"])
        terms = {
            "actor_loss": -torch.min(ratio * used, clipped * used).mean(),
            "value_loss": (critic(obs)[..., 0] - target).square().mean(),
            "entropy": policy.entropy().sum(-1).mean(),
        }
        loss = terms["actor_loss"] + CFG["vf_coef"] * terms["value_loss"] - CFG["ent_coef"] * terms["entropy"]
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(list(named.values()), CFG["max_grad_norm"])
        optimizer.step()
        history.append({name: x.item() for name, x in terms.items()})
    out |= {f"metric/{name}": np.mean([m[name] for m in history]) for name in history[0]}
    out |= {f"final/{name}": p.detach().numpy() for name, p in named.items()}
    out["config"] = np.array(json.dumps({"hidden_sizes": HIDDEN, "activation": "relu", "cfg": CFG}))
    out["torch_version"] = np.array(torch.__version__)
    np.savez_compressed(Path(__file__).with_name("seed_ppo.npz"), **out)


def advantages(reward: torch.Tensor, value: torch.Tensor, done: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE, and the value targets. [T, N]."""
    advantage = torch.zeros(T, N)
    for n in range(N):
        following_value, following_advantage = 0.0, 0.0
        for t in reversed(range(T)):
            alive = 0.0 if done[t, n] else 1.0
            delta = reward[t, n] + CFG["gamma"] * following_value * alive - value[t, n]
            following_advantage = delta + CFG["gamma"] * CFG["gae_lambda"] * alive * following_advantage
            following_value, advantage[t, n] = value[t, n], following_advantage
    return advantage, advantage + value


def mlp(outputs: int) -> nn.Sequential:
    sizes = [OBS, *HIDDEN]
    layers = [module for i, o in zip(sizes, HIDDEN, strict=False) for module in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(HIDDEN[-1], outputs))


if __name__ == "__main__":
    main()
