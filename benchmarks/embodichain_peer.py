"""EmbodiChain's side of the comparisons. Runs in an interpreter with torch, tensordict and the embodichain package.

``figures.py`` and ``point_mass.py`` start it: ``serve`` answers each line on standard input with one timing on
standard output, so that two programs can be timed alternately; ``train`` runs EmbodiChain's own trainer once, and
evaluates the last policy.
"""

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

GAMMA, GAE_LAMBDA = 0.99, 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stub", type=Path, required=True, help="module that makes embodichain importable")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("serve", help='timings of {"gae": [T, N]} or {"update": {shapes}} per line')
    train = commands.add_parser("train", help="EmbodiChain's PointMass config on the CPU; prints its summary")
    train.add_argument("--algorithm", choices=["ppo", "apg"], default="ppo")
    train.add_argument("--iterations", type=int)
    train.add_argument("--seed", type=int)
    args = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # EmbodiChain prints; only answers go to standard output
    stub = _load(args.stub)
    if args.command == "train":
        config = _config(stub, args.algorithm, args.iterations, args.seed)
        summary = _train(config)
        print(json.dumps(summary), file=answers, flush=True)
        print(json.dumps(_evaluate(config, str(summary["latest_checkpoint_path"]))), file=answers)
        return
    ready: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        if line not in ready:
            (what, shapes), *_ = json.loads(line).items()
            ready[line] = (
                _gae(*shapes) if what == "gae" else _product(*shapes) if what == "product" else _update(**shapes)
            )
            ready[line]()
        start = time.perf_counter()
        ready[line]()
        print(time.perf_counter() - start, file=answers, flush=True)


def _product(form: str, rows: int, width: int) -> Callable[[], object]:
    import torch

    left, right = (rows, width), (width, width)
    if form == "xᵀ·dy":
        left, right = (width, rows), (rows, width)
    x, y = torch.ones(left), torch.ones(right)
    return lambda: torch.matmul(x, y)


def _gae(num_steps: int, num_envs: int) -> Callable[[], object]:
    from embodichain.learning.rl.algo.common import compute_gae

    rollout = _rollout(num_steps, num_envs, obs_size=1, action_size=1)
    return lambda: compute_gae(rollout, GAMMA, GAE_LAMBDA)


def _update(
    num_steps: int, num_envs: int, obs_size: int, action_size: int, hidden: list[int], batch_size: int, n_epochs: int
) -> Callable[[], object]:
    import torch
    from embodichain.learning.models import build_mlp_from_cfg
    from embodichain.learning.rl.algo.ppo import PPO, PPOCfg
    from embodichain.learning.rl.policies.actor_critic import ActorCritic

    network = {"type": "mlp", "network_cfg": {"hidden_sizes": hidden, "activation": "relu"}}
    policy = ActorCritic(
        obs_size,
        action_size,
        torch.device("cpu"),
        actor=build_mlp_from_cfg(network, obs_size, action_size),
        critic=build_mlp_from_cfg(network, obs_size, 1),
    )
    algorithm = PPO(PPOCfg(batch_size=batch_size, n_epochs=n_epochs), policy)
    rollout = _rollout(num_steps, num_envs, obs_size, action_size)
    with torch.no_grad():
        view = rollout.reshape(-1)
        answer = policy.evaluate_actions(view)
        for name in ("sample_log_prob", "value", "action_mean", "action_std"):
            rollout[name] = answer[name].reshape(*rollout.batch_size, *answer[name].shape[1:])
    return lambda: algorithm.update(rollout)


def _rollout(num_steps: int, num_envs: int, obs_size: int, action_size: int) -> object:
    """Random data in EmbodiChain's layout [N, T + 1]."""
    import torch
    from tensordict import TensorDict

    torch.manual_seed(0)
    shape = (num_envs, num_steps + 1)
    terminated, truncated = torch.rand(shape) < 0.01, torch.rand(shape) < 0.01
    return TensorDict(
        {
            "obs": torch.randn(*shape, obs_size),
            "action": torch.randn(*shape, action_size),
            "sample_log_prob": torch.zeros(shape),
            "value": torch.randn(shape),
            "reward": torch.randn(shape),
            "terminated": terminated,
            "truncated": truncated,
            "done": terminated | truncated,
        },
        batch_size=shape,
    )


def _config(stub: ModuleType, algorithm: str, iterations: int | None, seed: int | None) -> dict[str, Any]:
    import yaml

    stub.load_task("point_mass.py")
    config: dict[str, Any] = yaml.safe_load(Path(stub.configs() % algorithm).read_text())
    config["trainer"]["device"] = "cpu"
    config["trainer"].update({k: v for k, v in (("iterations", iterations), ("seed", seed)) if v is not None})
    return config


def _train(config: dict[str, Any]) -> dict[str, object]:
    import yaml

    train_from_config = _import_trainer()
    file = Path("embodichain.yaml")
    file.write_text(yaml.safe_dump(config))
    return train_from_config(str(file))


def _evaluate(config: dict[str, Any], checkpoint: str, num_envs: int = 256) -> dict[str, float]:
    """Success in each environment's first episode; and by EmbodiChain's rule, the episodes that end first."""
    import torch
    from embodichain.learning.rl.evaluation import evaluate_episodes, infer_policy_action
    from embodichain.learning.rl.runtime import build_learning_policy_runtime

    runtime = build_learning_policy_runtime(config, num_envs=num_envs, device=torch.device("cpu"))
    runtime.policy.load_state_dict(torch.load(checkpoint, weights_only=False)["policy"])
    runtime.policy.eval()
    seed = config["trainer"]["eval_seed"]
    obs, _ = runtime.env.reset(seed=seed)
    success = torch.zeros(num_envs, dtype=torch.bool)
    for _ in range(runtime.env.max_episode_steps):  # an episode that ends sooner has been a success already
        with torch.no_grad():
            action = infer_policy_action(runtime.policy, obs, device="cpu", num_envs=num_envs)
            obs, _, _, _, info = runtime.env.step(action)
        success |= info["success"]
    own = evaluate_episodes(policy=runtime.policy, env=runtime.env, num_episodes=num_envs, device="cpu", seed=seed)
    return {"success": success.float().mean().item(), "own_success": own["eval/success_rate"]}


def _import_trainer() -> Callable[[str], dict[str, object]]:
    """``train_from_config``, with stand-ins for what it imports besides (progress bars and the like)."""
    while True:
        try:
            from embodichain.learning.rl.train import train_from_config
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] in ("embodichain", "torch", "tensordict"):
                raise
            sys.modules[error.name] = MagicMock()
        else:
            return train_from_config


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("embodichain_stub", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"--stub {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
