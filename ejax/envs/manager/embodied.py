"""The manager environment: a task that is written in an EmbodiChain gym config."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict
from flax.traverse_util import flatten_dict, unflatten_dict

from ejax.envs.description import EnvDescription
from ejax.envs.manager.manager_spec import SOURCE, ManagerSpec, read_manager_spec, stored_keys
from ejax.envs.mujoco.engine import Engine, check_physics
from ejax.envs.mujoco.pictures import Renderer, check_renderer_name, picture
from ejax.envs.randomization.physics import Change, base, keep_written, refuse_overlaps
from ejax.envs.task.scene import Scene, SceneWorld
from ejax.envs.task.terms import Added, Outcome, Term, apply_events, as_world, join_outcomes, observe, remember, total
from ejax.envs.task.world import SceneState
from ejax.envs.tasks.physics_task import PhysicsTask
from ejax.envs.terms.events import PhysicsEvent
from ejax.envs.terms.reading import TASK_EVENTS, try_call
from ejax.schema.frozen import freeze
from ejax.schema.problems import KeyReport
from ejax.types import Array, Key

Obs: TypeAlias = dict[str, Any]
Flat: TypeAlias = dict[tuple[str, ...], Array]  # path of a part of an observation -> its numbers


@dataclass(frozen=True)
class EmbodiedEnv(PhysicsTask):
    """A task that is written in an EmbodiChain gym config.

        r = task's reward + Σ weight·term        (a ``replace`` term: r = weight·term so far)

    One step: action terms set the drives' targets → physics → interval events → observation → success, failure, metrics
    → reward. The observation nests ``robot/qpos``, ``robot/qvel``, ``robot/qf``, the values of ``observations``, and
    ``sensor/<uid>/color`` of each camera, uint8 [H, W, 3].

    Differs from EmbodiChain: nothing resets itself, ``interval_step`` counts an episode's steps, and no event reaches
    another environment. ``startup`` events draw the same for all environments, except for physics, which each draws at
    its first start and keeps (``persist``).

    ``functor_events`` are more events, which follow those of ``env.events``. See docs/pictures.md on
    ``renderer``. Raises ConfigError: keys that are not supported, with the reason.
    """

    gym_config: Mapping[str, Any]
    physics: Engine = "auto"
    functor_events: Mapping[str, Any] = FrozenDict()
    renderer: Renderer = "mujoco"

    def __post_init__(self) -> None:
        for name in ("gym_config", TASK_EVENTS):
            object.__setattr__(self, name, freeze(dict(getattr(self, name))))
        check_physics(self.physics, num_substeps=1)
        check_renderer_name(self.renderer)
        _try_functors(self)

    @property
    def spec(self) -> ManagerSpec:
        return read_manager_spec(self.gym_config, self.functor_events, self.default_limit)

    default_limit: ClassVar[int | None] = None
    """Steps of an episode where the gym config does not limit them. None: EmbodiChain's."""
    first_event = 0
    added = Added()  # the config's reader takes ``functor_events``, since its robot may have another name

    @property
    def terms(self) -> tuple[Term, ...]:
        return self.spec.terms

    @property
    def max_episode_steps(self) -> int:
        """0: no limit."""
        return max(0, self.spec.max_episode_steps)

    @property
    def asset(self) -> str:
        return self.spec.scene.xml

    @property
    def control_period(self) -> float:
        return self.spec.timestep * self.spec.num_substeps

    @property
    def description(self) -> EnvDescription:
        return EnvDescription(control_period=self.control_period)  # functors do not name their numbers

    @property
    def observation_space(self) -> gymnasium.spaces.Dict:
        return _as_space(jax.eval_shape(self.reset, jax.random.key(0))[1])

    @property
    def action_space(self) -> gymnasium.spaces.Box:
        low = np.concatenate([term.low for term in self.spec.actions]).astype(np.float32)
        high = np.concatenate([term.high for term in self.spec.actions]).astype(np.float32)
        return gymnasium.spaces.Box(low, high, low.shape, np.float32)

    def key_at_start(self, event: Term, key: Key) -> Key:
        # each row draws the physics of its startup for itself
        return key if isinstance(event.func, PhysicsEvent) else super().key_at_start(event, key)

    def persist(self, ended: SceneState, started: SceneState, obs: Obs) -> tuple[SceneState, Obs]:
        """Keep in the new episode the parameters drawn at startup."""
        for event, change in _changes(self.spec.scene, self.terms):
            if event.mode == "startup":
                started = replace(started, physics=keep_written(change, ended.physics, started.physics))
        return started, obs

    def outcome(self, world: SceneWorld) -> Outcome:
        return join_outcomes(term(world) for term in self.of("terminations"))

    def extras(self, world: SceneWorld) -> dict[str, Array]:
        return {"fail": world.info["fail"], "elapsed_steps": world.state.episode_step}

    @property
    def ends_on_success(self) -> bool:
        return not self.spec.extensions.get("ignore_terminations")

    ends_on_failure = ends_on_success

    def act(self, world: SceneWorld, action: Array) -> SceneWorld:
        """Set the drives' targets, and advance the physics."""
        # once for all terms: a term sets targets, and time passes after the last
        world = self.aim(world, action).advance(self.spec.num_substeps)
        return replace(world, state=replace(world.state, action=action))

    def aim(self, world: SceneWorld, action: Array) -> SceneWorld:
        """Set the drives' targets by the action terms, each from its own numbers."""
        # terms share one action vector, in the config's order
        start = 0
        for term in self.spec.actions:
            world = as_world(world, term.apply(world, action[start : start + term.width]))
            start += term.width
        return world

    def start(self, key: Key) -> SceneState:
        """Put everything where the config does; events draw what differs from it."""
        del key
        spec = self.spec
        start = spec.scene.initial_state()
        # as the events of any mode write them, so that the state has the same leaves from the first step on
        parameters = base(spec.scene.model, [change for _, change in _changes(spec.scene, spec.terms)])
        return replace(
            start,
            physics=replace(start.physics, parameters={name: jnp.asarray(x) for name, x in parameters.items()}),
            action=jnp.zeros(sum(term.width for term in spec.actions)),
            kept={name: jnp.zeros((4, 4)) for term in spec.terms for name in stored_keys(term)},
        )

    def world(self, state: SceneState) -> SceneWorld:
        """Return the world of a state."""
        spec = self.spec
        return SceneWorld(
            asset=spec.scene.xml,
            control_period=self.control_period,
            state=state,
            scene=spec.scene,
            selected=spec.active,
            extensions=spec.extensions,
            max_episode_steps=spec.max_episode_steps,
            engine=self.physics,
        )

    def observe_noisy(self, world: SceneWorld, key: Key) -> SceneWorld:
        obs, history = flatten_dict(self._sensors(world)), {}
        for number, term in enumerate(self.of("observations")):
            obs = _put(obs, term, number, world, key)
            if term.history_length > 1:
                # a start's state has none yet: its first numbers take the place of those before
                obs[term.path] = remember(term, obs[term.path], world.state.history.get(term.name))
                history[term.name] = obs[term.path]
        whole = unflatten_dict(obs)  # of which pictures stay as they are
        numbers = jax.tree.map(lambda x: x if x.dtype == jnp.uint8 else x.reshape(-1).astype(jnp.float32), whole)
        return replace(world, obs=numbers, state=replace(world.state, history=history))

    def _sensors(self, world: SceneWorld) -> Obs:
        seen = world.appearance()
        obs: Obs = {"robot": {"qpos": world.qpos, "qvel": world.qvel, "qf": world.qf}}
        for camera in world.scene.cameras:
            parent = None if camera.parent is None else world.body_pose(camera.parent)
            for lens in camera.lenses if camera.pictures else ():
                view = camera.view(lens) if parent is None else camera.pinhole(lens, parent)
                drawn = picture(seen, self.renderer, view, width=camera.width, height=camera.height)
                obs.setdefault("sensor", {}).setdefault(camera.uid, {})[lens.name] = drawn
        return obs


def _changes(scene: Scene, events: Iterable[Term]) -> list[tuple[Term, Change]]:
    return [
        (each, each.func.change(scene.model, **each.params)) for each in events if isinstance(each.func, PhysicsEvent)
    ]


def _put(obs: Flat, term: Term, number: int, world: SceneWorld, key: Key | None = None) -> Flat:
    path, modifies = term.path, term.mode == "modify"
    there, name = ", ".join(sorted("/".join(each) for each in obs)), "/".join(path)
    if modifies and path not in obs:
        raise ValueError(f"cannot modify observation '{name}'; there is {there}")
    # neither the same name, nor a part of one, nor one with parts
    if not modifies and any(path[: len(each)] == each[: len(path)] for each in obs):
        raise ValueError(f"cannot add observation '{name}': it is there already ({there}); use mode modify")
    return {**obs, path: observe(term, number, world, obs[path] if modifies else unflatten_dict(obs), key)}


def _as_space(obs: Any) -> Any:
    if isinstance(obs, Mapping):
        return gymnasium.spaces.Dict({name: _as_space(value) for name, value in obs.items()})
    if obs.dtype == jnp.uint8:
        return gymnasium.spaces.Box(0, 255, obs.shape, np.uint8)
    return gymnasium.spaces.Box(-np.inf, np.inf, obs.shape, np.float32)


def _try_functors(env: EmbodiedEnv) -> None:
    """Trace each functor once. Raises ConfigError: all that they refuse, with their keys."""
    spec = env.spec
    report = KeyReport({note.key: note for note in spec.notes})

    def world(state: SceneState, **given: Any) -> SceneWorld:
        # traced by C MuJoCo, a callback: MJX would be traced at length for every event that advances
        return replace(env.world(state), engine="mujoco", before=env.world(state), **given)

    changes: list[tuple[str, Change]] = []
    for event in env.of("events"):
        try:
            changes += [(event.key, change) for _, change in _changes(spec.scene, [event])]
        except (TypeError, ValueError) as error:
            report.refuse(f"{event.key}.params", str(error))
    refuse_overlaps(changes, report)
    # the renderer reads sizes from the model, not from the state
    for key, change in changes if spec.scene.cameras else ():
        if "geom_size" in change.writes:
            report.refuse(key, "pictures show the sizes of the config; leave out this event, or sensor")
    report.raise_if_refused(SOURCE)
    state, key = jax.eval_shape(lambda: (env.start(jax.random.key(0)), jax.random.key(0)))
    for event in env.of("events"):
        try_call(
            report, event.key, lambda s, k, e=event: apply_events([e], world(s), e.mode, lambda *_: k).state, state, key
        )
    action = jax.ShapeDtypeStruct(env.action_space.shape, jnp.float32)
    try_call(report, "env.actions", lambda s, a: env.aim(world(s), a).state, state, action)
    obs: Flat = try_call(report, "sensor", lambda state: flatten_dict(env._sensors(world(state))), state) or {}
    for each in env.of("observations"):
        # after a refusal the next one is tried on what there was, so that all are reported together
        put = try_call(report, each.key, lambda obs, state, each=each: _put(obs, each, 0, world(state)), obs, state)
        obs = put or obs
    for end in env.of("terminations"):
        try_call(report, end.key, lambda state, end=end: vars(end(world(state))), state)
    info, nested = dict.fromkeys(("success", "fail"), jax.ShapeDtypeStruct((), bool)), unflatten_dict(obs)
    for term in env.of("rewards"):
        try_call(report, term.key, lambda o, s, i, t=term: total([t], world(s, obs=o, info=i)), nested, state, info)
    report.raise_if_refused(SOURCE)
