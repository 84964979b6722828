"""Certify torch policies of Stable-Baselines3 and rsl_rl by docs/certificate.md, and verify what was written.

Stable-Baselines3's PPO has trained for 1,024 steps; rsl_rl's actor has its first weights.

pip install torch stable-baselines3 rsl-rl-lib onnx onnxscript onnxruntime
python benchmarks/certify_others.py --to DIR
"""

import argparse
import copy
import json
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from interop.artefacts.parity import allowed_error, save_cases
from interop.standalone_verify import Case, sha256
from interop.standalone_verify import main as verify

_EPSILON = 2.0**-22


def certify(actor: torch.nn.Module, observations: dict[str, np.ndarray], to: Path, library: str, steps: int) -> None:
    """Write ``actor``, [B, F] -> actions [B, A], with its own answers to the observations of each case."""
    to.mkdir(parents=True)
    actor = actor.eval()
    cases = [Case(name, {"obs": x}, *_answers(actor, x)) for name, x in observations.items()]
    save_cases(to / "observations.npz", cases)
    example = torch.from_numpy(observations["environment"][:3])
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    names: Any = {"input_names": ["obs"], "output_names": ["action"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's, of torch's own parts
        made: Any = torch.onnx.export(actor, (example,), dynamo=True, dynamic_shapes=shapes, verbose=False, **names)
    (to / "policy.onnx").write_bytes(made.model_proto.SerializeToString())
    features = {"obs": cases[0].observation["obs"], "action": cases[0].expected["action"]}
    entries = {
        name: [{"name": name, "shape": ["batch", x.shape[1]], "dtype": "float32"}] for name, x in features.items()
    }
    contract = {
        "schema_version": 1,
        "env": {"id": "Pendulum-v1", "max_episode_steps": None},
        "action": {"head": "deterministic"},
    }
    contract |= {"observation": entries["obs"], "outputs": entries["action"]}
    (to / "contract.json").write_text(json.dumps(contract, indent=2))
    report = {
        "schema_version": 1,
        "checkpoint": library,
        "global_step": steps,
        "clipping": "as the exported module does",
        "rows": {case.name: len(case.expected["action"]) for case in cases},
        "largest_allowed": {case.name: {"action": float(np.nanmax(case.allowed["action"]))} for case in cases},
        "versions": {name: version(name) for name in (library, "torch", "numpy")},
        "artefacts": {"onnx": {"file": "policy.onnx"}},
        "sha256": {file.name: sha256(file) for file in sorted(to.iterdir())},
    }
    (to / "parity.json").write_text(json.dumps(report, indent=2))


def _answers(actor: torch.nn.Module, obs: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Answer in float32, and allow what the specification's rule does."""
    rng = np.random.default_rng(1)
    with torch.no_grad():
        answer = actor(torch.from_numpy(obs)).numpy()
        exact = copy.deepcopy(actor).double()
        wanted = exact(torch.from_numpy(obs).double()).numpy()
        others = [answer]
        for _ in range(8):
            moved = copy.deepcopy(exact)
            for x in (*moved.parameters(), *moved.buffers()):
                if x.is_floating_point():
                    x.mul_(1.0 + torch.from_numpy(rng.choice((-_EPSILON, _EPSILON), tuple(x.shape))))
            signs = rng.choice((-_EPSILON, _EPSILON), obs.shape)
            others.append(moved(torch.from_numpy(obs * (1.0 + signs))).numpy())
    sensitivity = np.abs(np.stack(others) - wanted).max(axis=0)
    return {"action": answer}, {"action": allowed_error(answer, sensitivity)}


def _cases(env: gymnasium.Env[Any, Any]) -> dict[str, np.ndarray]:
    env.action_space.seed(0)
    seen = [env.reset(seed=0)[0]]
    while len(seen) < 1100:
        obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
        seen.append(env.reset()[0] if terminated or truncated else obs)
    rows = np.stack(seen).astype(np.float32)
    huge = np.random.default_rng(0).normal(size=(256, rows.shape[1])) * 1e4
    return {"environment": rows, "zeros": np.zeros_like(rows[:1]), "huge": huge.astype(np.float32)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Certify policies of Stable-Baselines3 and rsl_rl.")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="a new folder")
    to: Path = parser.parse_args().to
    from rsl_rl.models import MLPModel
    from stable_baselines3 import PPO
    from tensordict import TensorDict

    env = gymnasium.make("Pendulum-v1")
    cases = _cases(env)
    policy = PPO("MlpPolicy", "Pendulum-v1", n_steps=512, device="cpu", seed=0).learn(1024).policy
    actor = torch.nn.Sequential(policy.mlp_extractor.policy_net, policy.action_net)
    certify(actor, cases, to / "sb3", "stable-baselines3", 1024)
    obs = TensorDict({"policy": torch.zeros(1, 3)}, [1])
    model: Any = MLPModel(obs, {"actor": ["policy"]}, "actor", 1, (64, 64), "elu", True)
    certify(model.as_onnx(False), cases, to / "rsl_rl", "rsl-rl-lib", 0)
    raise SystemExit(max(verify([str(to / name)]) for name in ("sb3", "rsl_rl")))


if __name__ == "__main__":
    main()
