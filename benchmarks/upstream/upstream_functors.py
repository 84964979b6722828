"""``embodichain.lab.gym.envs.managers.rewards`` and ``.observations``: ejax's functors, on EmbodiChain's mocks.

A functor of EmbodiChain's reads a simulation of N environments through its objects; ejax's reads a ``World``, which is
one environment. ``Moment`` is such a world, whose numbers are those of one row of the mock.
"""

import copy
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import torch
from upstream_words import translated

from ejax.envs.task.world import World
from ejax.envs.terms.registry import TERMS, find_functor

Camera = RigidObject = object
"""EmbodiChain's classes, which its tests replace by mocks; ejax looks for none."""
_REFUSED = (
    *("compute_semantic_mask", "get_object_uid"),
    *("get_rigid_object_physics_attributes", "get_articulation_joint_drive"),
)
"""Functors that ejax refuses."""


class Moment:
    """One row of a mock environment, as a ``World``; arrays are copied, since mocks change theirs in place."""

    pose = World.pose  # with its refusal of a target that is not there

    def __init__(self, env: Any, row: int, action: Any = None, info: Any = None) -> None:
        sim, robot = env.sim, env.robot
        data = robot.body_data
        objects = {uid: sim.get_rigid_object(uid) for uid in sim.get_rigid_object_uid_list()}
        self.info = info or {}
        self.action = _array(action, row) if torch.is_tensor(action) else jnp.zeros(0)
        self._poses = {uid: _array(each.get_local_pose(to_matrix=True), row) for uid, each in objects.items()}
        velocities = {uid: getattr(each.body_data, "vel", None) for uid, each in objects.items()}
        self._velocities = {uid: _array(x, row) for uid, x in velocities.items() if torch.is_tensor(x)}
        targets = {key: _array(x, row) for key, x in vars(env).items() if key.endswith("_pose") and torch.is_tensor(x)}
        # a place alone is a pose without a turn
        self.kept = {key: jnp.eye(4).at[:3, 3].set(x) if x.shape == (3,) else x for key, x in targets.items()}
        physics = SimpleNamespace(qpos=_array(data.qpos, row), qvel=_array(data.qvel, row))
        self.state = SimpleNamespace(physics=physics, episode_step=1)
        self.limits, self.active = _array(data.qpos_limits, 0), tuple(range(len(physics.qpos)))
        self.scene = SimpleNamespace(
            joints=self.active, limits=self.limits, part=robot.get_joint_ids, camera=lambda uid: _camera(sim, uid, row)
        )
        self._tool = _array(robot.compute_fk(to_matrix=True), row)
        self.before = copy.copy(self)  # an episode starts here, with an action of zeros, as ejax's do
        self.before.action = jnp.zeros_like(self.action)

    def has_object(self, uid: str) -> bool:
        return uid in self._poses

    def object_pose(self, uid: str) -> Any:
        return self._poses[uid]

    def object_velocity(self, uid: str) -> Any:
        return self._velocities[uid]

    def eef_pose(self, part: str | None = None) -> Any:
        return self._tool

    def part_qvel(self, name: str) -> Any:
        return self.state.physics.qvel[jnp.array(self.scene.part(name))]


def reward(name: str) -> Any:
    """Translate a reward functor."""
    functor = find_functor("rewards", name)

    def call(env: Any, obs: Any, action: Any, info: Any, **params: Any) -> torch.Tensor:
        given = next(iter(action.values()), None) if isinstance(action, dict) else action
        facts = [{key: x[i] if torch.is_tensor(x) else x for key, x in info.items()} for i in range(env.num_envs)]
        facts = [{key: bool(x) for key, x in each.items()} for each in facts]
        worlds = [Moment(env, row, given, facts[row]) for row in range(env.num_envs)]
        for row, (world, before) in enumerate(zip(worlds, _before(env, name), strict=True)):
            if before is not None:
                world.before, world.state.episode_step = before, 2
                before.action = _action_before(env, row)
        vars(env).setdefault("_moments", {})[name] = worlds
        with translated({"no target pose": "Target pose"}):
            return _stacked([functor(world, **_entities(params)) for world in worlds])

    return call


def observation(name: str) -> Any:
    """Translate an observation functor that adds or, given data, modifies."""
    functor = TERMS["observations"].get(name)

    def call(env: Any, obs: Any, *given: Any, **params: Any) -> torch.Tensor:
        rows = []
        for row in range(env.num_envs):
            read = _array(obs, row) if torch.is_tensor(obs) else obs
            rows.append(functor(Moment(env, row), read, *given, **_entities(params)))
        return _stacked(rows)

    def refused(*args: Any, **params: Any) -> Any:
        return find_functor("observations", name)  # a config that names it is refused in this way

    return refused if functor is None else call


def _before(env: Any, name: str) -> list[Any]:
    """List the rows as they were a step before; None in the first one of an episode."""
    if name == "action_smoothness_penalty":
        step, buffer = env.current_rollout_step, env.rollout_buffer or {}
        if step == 0 or "done" not in buffer:
            return [None] * env.num_envs
        return [None if buffer["done"][row, step - 1] else Moment(env, row) for row in range(env.num_envs)]
    return vars(env).get("_moments", {}).get(name, [None] * env.num_envs)


def _action_before(env: Any, row: int) -> Any:
    return _array(env.rollout_buffer["action"][row, env.current_rollout_step - 1])


def _camera(sim: Any, uid: str, row: int) -> Any:
    k = sim.get_sensor(uid).get_intrinsics()[row]
    lens = SimpleNamespace(intrinsics=tuple(float(k[i]) for i in ((0, 0), (1, 1), (0, 2), (1, 2))))
    return SimpleNamespace(lens=lambda right: lens)


def _entities(params: dict[str, Any]) -> dict[str, Any]:
    return {name: {"uid": x.uid} if name.endswith("_cfg") else x for name, x in params.items()}


def _array(x: Any, row: int | None = None) -> Any:
    return jnp.array((x if row is None else x[row]).numpy())


def _stacked(rows: list[Any]) -> torch.Tensor:
    return torch.stack([torch.tensor(row.tolist()) for row in rows])


for _kind, _make in (("rewards", reward), ("observations", observation)):
    globals().update({name: _make(name) for name in TERMS[_kind]})
globals().update({name: observation(name) for name in _REFUSED})
