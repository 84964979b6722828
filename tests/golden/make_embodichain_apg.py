"""Write embodichain_0_3_apg.npz: gradients and updates of APG by EmbodiChain 0.3.2 under torch 2.13.0, on a CPU.

Usage: python make_embodichain_apg.py STUB.py
    In an environment as for ``make_embodichain_ppo.py``.

Its own collector and APG on its own PointMassEnv, with two things taken from chance: every new episode starts from the
one state ``restart/*``, and the noise of an action is ``noise[row, k]`` at an episode's k-th step, where ``row`` is the
environment in its first episode and N in all others. Keys: ``start/*`` [N, ..]: the first states; ``init/*`` (state
dict); for each case ``<case>/gradient/*`` (of the loss, after its norm was clipped, which ``metric/grad_norm`` has
from before), ``<case>/final/*`` (state dict after one step), ``<case>/metric/*``,
``<case>/terminated`` and ``truncated`` [T, N]; ``cases``: JSON {case: {"trainer": .., "cfg": ..}}; ``network``: JSON.
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import embodichain
import numpy as np
import torch

NUM_ENVS, HORIZON, MAX_EPISODE_STEPS = 8, 8, 6
NETWORK = {"hidden_sizes": [16, 8], "activation": "tanh", "last_activation": "tanh"}
CFG = {"optimizer": {"name": "adam", "learning_rate": 0.01}, "gamma": 0.9, "ent_coef": 0.01, "max_grad_norm": 0.05}
CASES = {
    "deterministic": {"trainer": {"segment_length": 8, "deterministic_actions": True}},
    "sampled": {"trainer": {"segment_length": 8}},
    "segmented": {"trainer": {"segment_length": 4, "update_horizon": 8}},
    "adjoint": {"trainer": {"segment_length": 8, "clip_actions_to_space": True, "action_adjoint_max_norm": 0.002}},
    "complete": {"trainer": {"segment_length": 8, "rollout_mode": "complete"}},
}
RESTART = {0.7: [0.5, -0.4], 0.6: [-0.3, 0.2], 0.8: [[-0.35, 0.3], [0.1, 0.7]]}
"""Goal, start and obstacles, by the scale of the draw that they replace."""
STATE = (
    "position",
    "velocity",
    "goal_position",
    "obstacle_position",
    "obstacle_radius",
    "last_action",
    "episode_step",
    "path_length",
    "collision_count",
)


def main(stub: str) -> None:
    runpy.run_path(stub)
    from make_embodichain_checkpoint import load_point_mass

    load_point_mass()
    rng = np.random.default_rng(0)
    noise = torch.tensor(rng.normal(size=(NUM_ENVS + 1, MAX_EPISODE_STEPS, 2)), dtype=torch.float32)
    start = make_start(rng)
    out = {"noise": noise.numpy()} | {f"start/{name}": x.numpy() for name, x in start.items()}
    restarted = make_env(None)
    out |= {f"restart/{name}": getattr(restarted, name)[0].numpy() for name in STATE}
    out |= {f"init/{name}": x.numpy() for name, x in make_policy().state_dict().items()}
    for case, spec in CASES.items():
        out |= {f"{case}/{name}": x for name, x in run(spec["trainer"], start, noise).items()}
        CASES[case] = {**spec, "cfg": CFG}
    out["cases"], out["network"] = np.array(json.dumps(CASES)), np.array(json.dumps(NETWORK))
    out["versions"] = np.array(f"embodichain {embodichain.__version__}, torch {torch.__version__}")
    np.savez_compressed(Path(__file__).with_name("embodichain_0_3_apg.npz"), **out)


def run(trainer: dict, start: dict[str, torch.Tensor], noise: torch.Tensor) -> dict[str, np.ndarray]:
    from embodichain.learning.rl.algo.apg import APG, APGCfg
    from embodichain.learning.rl.collector import DifferentiableCollector

    env, policy = make_env(start), make_policy()
    algorithm = APG(APGCfg(device="cpu", **CFG), policy)
    options = {k: trainer[k] for k in ("clip_actions_to_space", "action_adjoint_max_norm") if k in trainer}
    collector = DifferentiableCollector(env, policy, torch.device("cpu"), **options)
    collector._observation = env.detach_state()
    complete = trainer.get("rollout_mode") == "complete"
    if complete:
        collector.reset()
    draw = lambda *_, **__: noise[env.row, env.episode_step]  # noqa: E731
    algorithm.begin_update()
    transitions = []
    with patch("torch.distributions.normal._standard_normal", draw):
        for _ in range(HORIZON // trainer["segment_length"]):  # as DifferentiableTrainer does
            rollout = collector.collect(
                trainer["segment_length"], deterministic=trainer.get("deterministic_actions", False)
            )
            (algorithm.accumulate_complete_rollout if complete else algorithm.accumulate_segment)(rollout)
            collector.detach_state()
            transitions += rollout.transitions
    out = {
        name: torch.stack([getattr(each, name) for each in transitions]).numpy() for name in ("terminated", "truncated")
    }
    out |= {f"metric/{name}": np.array(x) for name, x in algorithm.finish_update().items()}
    out |= {f"gradient/{name}": p.grad.numpy() for name, p in policy.named_parameters()}
    return out | {f"final/{name}": x.numpy() for name, x in policy.state_dict().items()}


def make_env(start: dict[str, torch.Tensor] | None) -> Any:
    """PointMassEnv whose new episodes are all the same; ``row`` [N]: whose noise each environment's actions have."""
    from embodichain_tasks.classic_control.point_mass import PointMassEnv

    class Restarting(PointMassEnv):
        row = torch.arange(NUM_ENVS)

        def _reset_ids(self, ids: torch.Tensor) -> None:
            self.row = self.row.clone().index_fill_(0, ids, NUM_ENVS)
            super()._reset_ids(ids)

        def _uniform(self, *shape: int, scale: float) -> torch.Tensor:
            return torch.tensor(RESTART[round(scale, 6)]).expand(shape)

    env = Restarting(NUM_ENVS, max_episode_steps=MAX_EPISODE_STEPS, obstacle_radius_range=(0.1, 0.1))
    env.reset()
    if start is not None:
        env.row = torch.arange(NUM_ENVS)
        for name, x in start.items():
            setattr(env, name, x.clone())
    return env


def make_start(rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Episodes in full run: some end soon by time, some at the goal; some are inside an obstacle."""
    goal = rng.uniform(-0.5, 0.5, (NUM_ENVS, 2))
    position = goal + rng.choice([-1.0, 1.0], (NUM_ENVS, 2)) * rng.uniform(0.1, 0.4, (NUM_ENVS, 2))
    velocity = rng.normal(0.0, 0.3, (NUM_ENVS, 2))
    velocity[:2] = 3.0 * (goal - position)[:2]  # these two fly through the goal
    position[:2] = goal[:2] - 0.08 * velocity[:2]
    obstacles = rng.uniform(-0.8, 0.8, (NUM_ENVS, 2, 2))
    obstacles[2:4, 0] = position[2:4] + 0.04
    fields = {
        "position": position,
        "velocity": velocity,
        "goal_position": goal,
        "obstacle_position": obstacles,
        "obstacle_radius": np.full((NUM_ENVS, 2), 0.1),
        "last_action": rng.uniform(-1.0, 1.0, (NUM_ENVS, 2)),
        "path_length": np.zeros(NUM_ENVS),
    }
    state = {name: torch.tensor(x, dtype=torch.float32) for name, x in fields.items()}
    counts = {"episode_step": np.array([0, 1, 0, 2, 3, 4, 0, 1]), "collision_count": np.zeros(NUM_ENVS, int)}
    return state | {name: torch.tensor(x) for name, x in counts.items()}


def make_policy() -> Any:
    from embodichain.learning.models import build_mlp_from_cfg
    from embodichain.learning.rl.policies.actor_only import ActorOnly

    torch.manual_seed(0)
    actor = build_mlp_from_cfg({"type": "mlp", "network_cfg": NETWORK}, 14, 2)
    policy = ActorOnly(14, 2, torch.device("cpu"), actor)
    with torch.no_grad():
        policy.log_std.copy_(torch.tensor([-0.7, -0.3]))
    return policy


if __name__ == "__main__":
    main(sys.argv[1])
