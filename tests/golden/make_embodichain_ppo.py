"""Write embodichain_0_3_ppo.npz: PPO updates by EmbodiChain 0.3.2 under torch 2.13.0, on a CPU.

Usage: python make_embodichain_ppo.py STUB.py
    In an environment with torch, tensordict and ``embodichain==0.3.2`` (installed without its simulator); STUB.py is
    run first and must make ``import embodichain.learning.rl`` possible there, by replacing the simulator's modules.

Every epoch is one minibatch of the whole rollout, so that no shuffle matters. Keys: ``rollout/*`` [N, T + 1], shared by
all cases; ``init/*``, the state dict that all start from; for each case ``<case>/final/*`` (state dict),
``<case>/metric/*`` [updates]; ``cases``: JSON {case: {"cfg": .., "policy": .., "updates": ..}}.
"""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import torch

NUM_ENVS, NUM_STEPS, OBS, ACTION = 6, 5, 4, 2
CASES = {
    "loss_terms": {"cfg": {"n_epochs": 3, "use_clipped_value_loss": True, "vf_coef": 1.0, "action_bound_coef": 0.5}},
    "per_mini_batch": {"cfg": {"n_epochs": 2, "normalize_advantage_per_mini_batch": True, "num_mini_batches": 1}},
    "adaptive": {  # rates: up to the maximum, the same, down to the minimum
        "cfg": {
            "n_epochs": 8,
            "schedule": "adaptive",
            "desired_kl": 0.01,
            "minimum_learning_rate": 0.002,
            "maximum_learning_rate": 0.012,
        }
    },
    "normalization": {
        "cfg": {"n_epochs": 2},
        "policy": {"actor_obs_normalization": True, "critic_obs_normalization": True},
        "updates": 2,
    },
}


def main(stub: str) -> None:
    runpy.run_path(stub)
    from embodichain.learning.models import MLP
    from embodichain.learning.rl.algo.ppo import PPO, PPOCfg
    from embodichain.learning.rl.policies.actor_critic import ActorCritic
    from tensordict import TensorDict

    def make_policy(**options: bool) -> ActorCritic:
        torch.manual_seed(0)
        actor, critic = MLP(OBS, ACTION, [8], "tanh"), MLP(OBS, 1, [8], "tanh")
        return ActorCritic(OBS, ACTION, torch.device("cpu"), actor, critic, **options)

    rng = np.random.default_rng(0)
    policy = make_policy()
    with torch.no_grad():
        policy.log_std.copy_(torch.tensor([-0.7, -0.3]))
        policy.actor[-1].bias.copy_(torch.tensor([0.8, -0.8]))  # means reach past ±1
    init = {name: x.clone() for name, x in policy.state_dict().items()}

    batch = (NUM_ENVS, NUM_STEPS + 1)
    obs = torch.tensor(2.0 * rng.normal(size=(*batch, OBS)) + 0.5, dtype=torch.float32)
    # the acting policy is a little off the updated one, so that the first epoch's KL is not zero
    with torch.no_grad():
        flat = policy.actor(obs.reshape(-1, OBS)).reshape(*batch, ACTION)
        value = policy.critic(obs.reshape(-1, OBS)).reshape(batch) + 0.3 * torch.tensor(rng.normal(size=batch))
    mean = flat + 0.02 * torch.tensor(rng.normal(size=flat.shape))
    std = policy.log_std.detach().exp().expand_as(mean) * 1.01
    action = mean + std * torch.tensor(rng.normal(size=mean.shape))
    log_prob = torch.distributions.Normal(mean, std).log_prob(action).sum(-1)
    terminated = torch.tensor(rng.random(batch) < 0.15)
    truncated = torch.tensor(rng.random(batch) < 0.2)
    fields = {
        "obs": obs,
        "action": action,
        "action_mean": mean,
        "action_std": std,
        "sample_log_prob": log_prob,
        "value": value,
        "reward": torch.tensor(rng.normal(size=batch)),
    }
    fields = {name: x.float() for name, x in fields.items()}
    fields |= {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
    rollout = TensorDict(fields, batch_size=batch)

    out = {f"rollout/{name}": x.numpy() for name, x in fields.items()}
    out |= {f"init/{name}": x.numpy() for name, x in init.items()}
    for case, spec in CASES.items():
        policy = make_policy(**spec.get("policy", {}))
        policy.load_state_dict(init, strict=False)
        cfg = {"optimizer": {"name": "adam", "learning_rate": 0.01}, "batch_size": 4096, "gamma": 0.97, **spec["cfg"]}
        algorithm = PPO(PPOCfg(device="cpu", **cfg), policy)
        history = [algorithm.update(rollout.clone()) for _ in range(spec.get("updates", 1))]
        out |= {f"{case}/final/{name}": x.numpy() for name, x in policy.state_dict().items()}
        out |= {f"{case}/metric/{name}": np.array([m[name] for m in history]) for name in history[0]}
        CASES[case] = {**spec, "cfg": cfg}
    out["cases"] = np.array(json.dumps(CASES))
    out["torch_version"] = np.array(torch.__version__)
    np.savez_compressed(Path(__file__).with_name("embodichain_0_3_ppo.npz"), **out)


if __name__ == "__main__":
    main(sys.argv[1])
