"""What has to go into an exported policy and what comes out: names, order, shapes, units, ranges, control rate."""

import dataclasses
import math
from typing import Any

import gymnasium
import numpy as np

from ejax.envs.action_chunk import ActionChunk
from ejax.envs.cart_pole import CartPoleRL
from ejax.envs.mujoco import Physics
from ejax.envs.pick_place import OBSERVATION, PickPlaceRL
from ejax.envs.point_mass import PointMassRL
from ejax.envs.push_cube import PushCubeRL
from ejax.envs.rendered import RenderedEnv
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
        seen: observations of the environment by path, [B, ...] each.
        clipping: why the action is clipped, or is not.
    """
    period = control_period(env)
    task, chunk = _task_of(env)
    known = _FEATURES.get(type(task), {})
    if isinstance(env, RenderedEnv):
        known = {"state" if name == WHOLE else name: features for name, features in known.items()}
    ranges = feature_ranges(seen, env.observation_space, spec)
    observation = [
        _image(name, spec) if name in spec.images else _numbers(name, spec, known.get(name), ranges[name])
        for name in spec.inputs
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
        "call": "every artefact takes the arrays of 'observation' in this order and returns those of 'outputs'; "
        "all have the batch axis: a single observation is a batch of one",
        "env": {
            **env_config,
            "parameters": dataclasses.asdict(task)
            if isinstance(task, PushCubeRL | PickPlaceRL | CartPoleRL | PointMassRL)
            else None,
            "max_episode_steps": env.max_episode_steps,
        },
        "control_rate_hz": None if period is None else round(1.0 / period, 6),
        "observation": observation,
        "outputs": outputs,
        "action": {
            "head": spec.head,
            "features": _features(_in_chunks(known.get("action"), chunk)),
            **_chunk(env.action_space, chunk, period),
            **_action_bounds(env.action_space),
            "clipped": spec.clip is not None,
            "clipping": clipping,
        },
    }


def control_period(env: Env | HostEnv) -> float | None:
    """Seconds between two decisions, None where the environment does not tell."""
    if isinstance(env, ActionChunk):
        period = control_period(env.env)
        return None if period is None else period * env.size
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


def _task_of(env: Env | HostEnv) -> tuple[Env | HostEnv, int]:
    """The environment that the numbers are of, and how many of its actions are one decision."""
    if isinstance(env, ActionChunk):
        task, chunk = _task_of(env.env)
        return task, chunk * env.size
    return (env.drawn, env.action_chunk) if isinstance(env, RenderedEnv) else (env, 1)


def _image(name: str, spec: PolicySpec) -> dict[str, Any]:
    return {
        "name": name,
        "shape": ["batch", *spec.images[name]],
        "dtype": "uint8",
        "meaning": "an image: rows from the top, columns from the left, red, green, blue; taken as it is, not scaled",
        "low": 0,
        "high": 255,
    }


def _numbers(name: str, spec: PolicySpec, known: list[tuple[str, str]] | None, limits: Any) -> dict[str, Any]:
    read = spec.read(name)
    told: dict[str, Any] = {
        "name": name,
        "shape": ["batch", len(read)],
        "dtype": "float32",
        "features": _features(None if known is None else [known[i] for i in read]),
        "low": limits[0][list(read)].tolist(),
        "high": limits[1][list(read)].tolist(),
        "range": "the observation space's bounds; what the policy met in the environment where there are none",
    }
    if name in spec.unread:
        told["entries"] = list(read)
        told["entries_of"] = (
            f"which of the {spec.observation[name]} numbers in training these are; the policy does not read the others"
        )
    return told


def _in_chunks(known: list[tuple[str, str]] | None, chunk: int) -> list[tuple[str, str]] | None:
    """The features of each action of a decision."""
    if known is None or chunk == 1:
        return known
    return [(f"{name}, action {i + 1} of {chunk}", unit) for i in range(chunk) for name, unit in known]


def _chunk(space: gymnasium.Space, chunk: int, period: float | None) -> dict[str, Any]:
    """Nothing for single actions."""
    if chunk == 1 or not isinstance(space, gymnasium.spaces.Box):
        return {}
    return {
        "chunk": {
            "shape": [chunk, space.shape[0] // chunk],
            "meaning": "one decision is a sequence of actions, the first one first: reshape it to this shape",
            "action_rate_hz": None if period is None else round(chunk / period, 6),
        }
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
