"""What has to go into an exported policy and what comes out: names, order, shapes, units, ranges, control rate."""

import dataclasses
import math
from typing import Any

import gymnasium
import numpy as np

from ejax.envs.cart_pole import CartPoleRL
from ejax.envs.mujoco import Physics
from ejax.envs.pick_place import OBSERVATION, PickPlaceRL
from ejax.envs.point_mass import PointMassRL
from ejax.envs.push_cube import PushCubeRL
from ejax.types import Env, HostEnv, RenderableEnv
from interop.cases import feature_ranges
from interop.parity import Arrays
from interop.policy_spec import WHOLE, PolicySpec

_ARM = ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")
_FEATURES: dict[type, dict[str, list[tuple[str, str]]]] = {
    PushCubeRL: {
        WHOLE: [
            *((f"{joint} angle", "rad") for joint in _ARM),
            *((f"{point} {axis}", "m") for point in ("tool centre point", "cube", "goal") for axis in "xyz"),
        ],
        "action": [(f"{joint} angle change / action_scale", "rad") for joint in _ARM],
    },
    PickPlaceRL: {
        WHOLE: [
            (name, "rad" if name.endswith("angle") else "1" if name == "was lifted" else "m") for name in OBSERVATION
        ],
        "action": [
            *((f"tool centre point {axis} change / action_scale", "m") for axis in "xyz"),
            ("grip, -1 open and 1 closed", "1"),
        ],
    },
    CartPoleRL: {
        WHOLE: [
            ("cart drive force", "N"),
            ("pole drive torque", "N m"),
            *((f"{joint} position / range", "1") for joint in ("cart", "pole")),
            ("cart velocity", "m/s"),
            ("pole velocity", "rad/s"),
        ],
        "action": [("cart position change / action_scale", "m"), ("pole angle change / action_scale", "rad")],
    },
    PointMassRL: {
        WHOLE: [
            *((f"position {axis}", "m") for axis in "xy"),
            *((f"velocity {axis}", "m/s") for axis in "xy"),
            *((f"goal {axis}", "m") for axis in "xy"),
            *((f"previous action {axis}", "1") for axis in "xy"),
            *((f"obstacle {i} {axis}", "m") for i in range(2) for axis in "xy"),
            *((f"obstacle {i} radius", "m") for i in range(2)),
        ],
        "action": [(f"force {axis} / force_scale", "N") for axis in "xy"],
    },
}
"""(name, unit) of each number, for the environments that are known; positions are in the frame of the robot's base."""


def make_contract(
    env_config: dict[str, Any], env: Env | HostEnv, spec: PolicySpec, seen: Arrays, clipping: str
) -> dict[str, Any]:
    """
    Args:
        env_config: ``id`` and ``cfg`` of the environment.
        seen: observations of the environment by path, [B, F] each.
        clipping: why the action is clipped, or is not.
    """
    period = control_period(env)
    known = _FEATURES.get(type(env), {})
    ranges = feature_ranges(seen, env.observation_space)
    observation = [
        {
            "name": name,
            "shape": ["batch", spec.observation[name]],
            "dtype": "float32",
            "features": _features(known.get(name)),
            "low": ranges[name][0].tolist(),
            "high": ranges[name][1].tolist(),
            "range": "the observation space's bounds; what the policy met in the environment where there are none",
        }
        for name in spec.actor.inputs
    ]
    outputs = [
        {
            "name": name,
            "shape": ["batch", *spec.output_shape(name)],
            "dtype": "int32" if name == "action" and not spec.continuous else "float32",
            "meaning": _MEANING[name],
        }
        for name in spec.outputs
    ]
    return {
        "schema_version": 1,
        "call": "every artefact takes the arrays of 'observation' in this order and returns those of 'outputs'",
        "env": {
            **env_config,
            "parameters": dataclasses.asdict(env)
            if isinstance(env, PushCubeRL | PickPlaceRL | CartPoleRL | PointMassRL)
            else None,
            "max_episode_steps": env.max_episode_steps,
        },
        "control_rate_hz": None if period is None else round(1.0 / period, 6),
        "observation": observation,
        "outputs": outputs,
        "action": {
            "head": spec.head,
            "features": _features(known.get("action")),
            **_action_bounds(env.action_space),
            "clipped": spec.clip is not None,
            "clipping": clipping,
        },
    }


def control_period(env: Env | HostEnv) -> float | None:
    """Seconds between two actions, None where the environment does not tell."""
    if isinstance(env, RenderableEnv):
        return env.control_period
    if isinstance(env, PushCubeRL | CartPoleRL):
        asset = "push_cube.xml" if isinstance(env, PushCubeRL) else "cart_pole.xml"
        return env.sim_steps_per_control * float(Physics(asset).model.opt.timestep)
    return env.dt if isinstance(env, PointMassRL) else None


_MEANING = {
    "action": "the most probable action: send this",
    "mean": "of the normal distribution, before tanh and clipping",
    "log_std": "of the normal distribution; log of the standard deviation",
    "logits": "unnormalized log-probabilities of the choices, dimension after dimension",
}


def _features(known: list[tuple[str, str]] | None) -> list[dict[str, str]] | None:
    return None if known is None else [{"name": name, "unit": unit} for name, unit in known]


def _action_bounds(space: gymnasium.Space) -> dict[str, Any]:
    if isinstance(space, gymnasium.spaces.Box):
        bounds = {"low": space.low, "high": space.high}
        return {name: [x if math.isfinite(x) else None for x in b.ravel().tolist()] for name, b in bounds.items()}
    if isinstance(space, gymnasium.spaces.Discrete):
        return {"num_choices": [int(space.n)], "start": [int(space.start)]}
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return {"num_choices": np.ravel(space.nvec).tolist()}
    raise ValueError(f"no contract for the action space {space}")
