"""The base of every task: a frozen dataclass whose fields are its config, and hooks, which are functions of a world:
``Snapshot``, or with MuJoCo ``ejax.envs.task.world.World``."""

import operator
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any, ClassVar, Literal, get_args, get_origin

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict

from ejax.envs.description import WHOLE, EnvDescription, Feature
from ejax.envs.task.terms import Added, Outcome, Snapshot, Term, TermKind, apply_events, join_outcomes, total
from ejax.numerics.finite import all_finite
from ejax.schema.frozen import freeze_fields, thaw
from ejax.schema.paths import unique
from ejax.types import Array, Key, PyTree, Timestep


class Task:
    """A task with ``episode_step`` in its state: control steps done, int32. Hooks are called in
    ``ejax.envs.task.terms``'s order. Terminated: success or failure. Truncated: after ``max_episode_steps``, where
    ``truncates`` is true, or when something is not finite, which is not a success either."""

    obs_features: ClassVar[tuple[Feature, ...]] = ()
    """The numbers of an observation that is one vector."""
    action_features: ClassVar[Any] = ()
    """The numbers of an action, ``Feature``s."""
    clips_actions: ClassVar[bool] = False
    """Actions are clipped to ±1."""
    action_bound: ClassVar[str] = ""
    """The field that actions are within ± of. Empty: they are within ±1."""
    weighted: ClassVar[tuple[str, ...]] = ()
    """Those of ``reward_terms`` whose weight is a field, ``<term>_weight``."""
    positive: ClassVar[tuple[str, ...]] = ()
    """Fields that must be above 0."""
    not_negative: ClassVar[tuple[str, ...]] = ()
    terms: Any = ()
    """``Term``s in addition to the methods below: rewards, terminations and events of ``ejax.envs.terms``."""
    functor_events: Any = FrozenDict()
    """A field that a task need not have: functors of ``trainer.events``, name: {func, mode, interval_step, params}."""
    reward_field: ClassVar[str] = "rewards"
    """The field, of a task that has it, by which a config changes the reward: name of one of ``reward_terms`` ->
    {weight}, or a new name -> {func, weight, mode, params}, as in a gym config."""
    first_event: ClassVar[int] = 0x5EE70000
    """Folded into a key, with an event's place: apart from the keys that ``start`` and ``update`` may split it into."""
    has_model: ClassVar[bool] = False
    """Its worlds have a MuJoCo model, which ejax's own events change."""
    ends_on_success: Any = True
    ends_on_failure: Any = True
    episode_length: int
    """A field that a task need not have: see ``max_episode_steps``."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # the hook's former name, which the field would hide without a word
        if cls.reward_field == "rewards" and callable(vars(cls).get("rewards")):
            text = "is the field by which a config changes the reward; name the method reward_terms, without weights"
            raise TypeError(f"{cls.__name__}.rewards {text}")

    def __post_init__(self) -> None:
        # a file gives dicts and lists, which have no hash, as a static argument needs
        freeze_fields(self, *(name for name, value in vars(self).items() if isinstance(value, dict | list)))
        try:
            self.check_fields()
        except ValueError as error:
            name, text = f"{type(self).__name__}: ", str(error)
            raise ValueError(text if text.startswith(name) else name + text) from error
        if self.added.events or self.added.rewards:
            from ejax.envs.terms.reading import try_added

            try_added(self)

    def check_fields(self) -> None:
        """Check the fields, before anything is traced. Raises ValueError, to which the class's name is added."""
        for names, bound, fits in ((self.positive, "> 0", operator.gt), (self.not_negative, ">= 0", operator.ge)):
            for name in names:
                if not fits(getattr(self, name), 0):
                    raise ValueError(f"{name} must be {bound}, got {getattr(self, name)}")
        # a config gives strings: nothing else checks what a Literal allows
        for each in fields(self):  # type: ignore[arg-type]  # every task is a dataclass
            if get_origin(each.type) is Literal and getattr(self, each.name) not in (allowed := get_args(each.type)):
                listed = " or ".join(filter(None, [", ".join(map(repr, allowed[:-1])), repr(allowed[-1])]))
                raise ValueError(f"{each.name} must be {listed}, got {getattr(self, each.name)!r}")

    def start(self, key: Key) -> Any:
        """Draw the state that an episode starts in."""
        raise NotImplementedError

    def advance(self, world: Any, action: Array) -> Any:
        """Compute the state one control step later; ``episode_step`` is counted elsewhere."""
        raise NotImplementedError

    def update(self, key: Key, world: Any, before: Any) -> Any:
        """Change the world further, after the physics. Default: nothing changes."""
        del key, before
        return world

    def observe(self, world: Any) -> Any:
        """Compute the observation."""
        raise NotImplementedError

    def fails(self, world: Any) -> Array:
        """End the episode here without a success? bool. Default: never."""
        del world
        return jnp.zeros((), bool)

    def succeeds(self, world: Any) -> Array:
        """Is the task done? bool. Without it nothing is logged as a success."""
        del world
        return jnp.zeros((), bool)

    def truncates(self, world: Any) -> Array | None:
        """Cut the episode short, with a value after it? bool. Default: never."""
        del world
        return None

    def metrics(self, world: Any) -> Mapping[str, Array]:
        """Scalars by name, logged as ``metrics/<name>``. Default: none."""
        del world
        return {}

    def base_reward(self, world: Any) -> Array | None:
        """Compute the part of the reward that has no terms. Default: 0."""
        del world
        return None

    def reward_terms(self, world: Any, before: Any) -> Mapping[str, Array]:
        """Compute the task's terms of the reward, each before its weight: scalars by name. Default: none."""
        del world, before
        return {}

    @property
    def own_weights(self) -> Mapping[str, float]:
        """Name of each of ``reward_terms`` -> its weight."""
        return {name: getattr(self, f"{name}_weight") for name in self.weighted}

    def total(self, world: Any, outcome: Outcome) -> tuple[Array, dict[str, Array], dict[str, Array]]:
        """Compute the reward, its weighted terms, logged as ``rewards/<name>``, and the terms before their weights,
        logged as ``terms/<name>``."""
        own, weights = self.reward_terms(world, world.before), {**self.own_weights, **self.added.weights}
        return total(self.of("rewards"), world, own=own, weights=weights, start=outcome.reward)

    def of(self, kind: TermKind) -> tuple[Term, ...]:
        """List the terms of a kind, in their order, those of a config last."""
        added = {"events": self.added.events, "rewards": self.added.rewards}.get(kind, ())
        return tuple(each for each in self.terms if each.kind == kind) + added

    @property
    def reward_names(self) -> tuple[str, ...] | None:
        """The reward's terms. None: known only where ``reward_terms`` is traced."""
        return (*self.own_weights, *(each.name for each in self.terms if each.kind == "rewards"))

    @property
    def added(self) -> Added:
        """The terms that a config adds, and the weights that it changes. Raises ConfigError: an entry is wrong."""
        rewards = vars(self).get(self.reward_field) or FrozenDict()
        if not (self.functor_events or rewards):
            return Added()
        from ejax.envs.terms.reading import read_added  # it has all functors, which few tasks need

        return read_added(self.functor_events, rewards, self.reward_field, self.reward_names)

    def apply_start_events(self, key: Key, world: Any) -> Any:
        """Apply the events of an episode's start: ``startup``, then ``reset``."""
        return self.apply_events("reset", key, self.apply_events("startup", key, world))

    def apply_events(self, mode: str, key: Key, world: Any) -> Any:
        """Apply one mode's events, of ``interval`` those that are due."""

        def own_key(i: int, event: Term) -> Key:
            return jax.random.fold_in(self.key_at_start(event, key), self.first_event + i)

        return apply_events(self.of("events"), world, mode, own_key)

    def key_at_start(self, event: Term, key: Key) -> Key:
        # what happened once lasts: the same draws at the start of every episode
        return jax.random.key(0) if event.mode == "startup" else key

    def clip_action(self, action: Array) -> Array:
        return jnp.clip(action, -1.0, 1.0) if self.clips_actions else action

    def world(self, state: Any) -> Any:
        return Snapshot(state=state)

    @property
    def max_episode_steps(self) -> int:
        """Control steps: the field ``episode_length``, unless the task has its own."""
        return self.episode_length

    @property
    def text(self) -> Mapping[str, int]:
        """Part of the observation that is text -> its bytes, zeros after it included."""
        return {}

    @property
    def parts(self) -> Mapping[str, tuple[Feature, ...]]:
        """The numbers of each part of an observation."""
        return {WHOLE: self.obs_features}

    @property
    def description(self) -> EnvDescription:
        return EnvDescription(
            observation=self.parts,
            text=tuple(self.text),
            action=self.action_features,
            clips_actions=self.clips_actions,
            parameters=thaw(asdict(self)),  # type: ignore[call-overload]  # every task is a dataclass
        )

    @property
    def observation_space(self) -> gymnasium.Space[Any]:
        boxes: dict[str, gymnasium.Space[Any]] = {
            path: gymnasium.spaces.Box(-np.inf, np.inf, (len(each),), np.float32) for path, each in self.parts.items()
        }
        boxes |= {path: gymnasium.spaces.Box(0, 255, (length,), np.uint8) for path, length in self.text.items()}
        return boxes[WHOLE] if WHOLE in boxes else gymnasium.spaces.Dict(boxes)

    @property
    def action_space(self) -> gymnasium.spaces.Box:
        # bounds of the space only: whether actions are clipped is the task's own affair
        bound = getattr(self, self.action_bound) if self.action_bound else 1.0
        return gymnasium.spaces.Box(-bound, bound, (len(self.action_features),), np.float32)

    def first_world(self, key: Key) -> Any:
        """Draw the world that an episode starts in, before any event."""
        return self.world(self.start(key))

    def reset(self, key: Key) -> tuple[Any, PyTree]:
        world = self.observe_noisy(self.apply_start_events(key, self.first_world(key)), key)
        return world.state, world.obs

    def step(self, state: Any, action: Array, key: Key) -> tuple[Any, Timestep]:
        """Make one control step of one environment by the hooks. Raises ValueError: an action that is not [A].
        ``info`` has ``rewards`` and ``terms``, and ``success`` and ``metrics`` of a task with such."""
        if action.shape != (shape := self.action_space.shape):
            raise ValueError(f"{type(self).__name__}.step takes an action of shape {shape}, got {action.shape}")
        # what a term compares with: the world that the action was chosen in
        before = self.world(state)
        return self.judge(key, before, self.act(before, action))

    def judge(self, key: Key, before: Any, world: Any) -> tuple[Any, Timestep]:
        """Do what follows the physics of a step: ``update``, events, the observation, ends and the reward."""
        # counted before anything reads it, so that "after each third step" means the same to events and time limits
        counted = replace(world.state, episode_step=before.state.episode_step + 1)
        world = self.update(key, replace(world, state=counted, before=before), before)
        world = self.observe_noisy(self.apply_events("interval", key, world), key)

        # after the observation, which terms may read in place of computing it again
        outcome = self.outcome(world)
        # a simulation that broke proves neither a success nor a fall: it is cut off
        finite = all_finite(world.state)
        fail = (jnp.zeros((), bool) if outcome.fail is None else outcome.fail) & finite
        success = None if outcome.success is None else outcome.success & finite
        info: dict[str, Any] = {} if success is None else {"success": success}
        # rewards may pay for an end, so ends are known before them
        world = replace(world, info={**info, "fail": fail})
        reward, rewards, terms = self.total(world, outcome)
        info |= {"rewards": rewards, "terms": terms, **({"metrics": outcome.metrics} if outcome.metrics else {})}
        info = unique((*info.items(), *self.extras(world).items()), "entries of info")

        terminated = fail if self.ends_on_failure else jnp.zeros((), bool)
        if success is not None and self.ends_on_success:
            terminated |= success
        truncated = ~finite
        # 0: no limit
        if self.max_episode_steps > 0:
            truncated |= world.state.episode_step >= self.max_episode_steps
        if outcome.truncated is not None:
            truncated |= outcome.truncated
        return world.state, Timestep(
            obs=world.obs, reward=reward, terminated=terminated, truncated=truncated, info=info
        )

    def state_of(self, obs: Array) -> Any:
        """Reconstruct the state of an observation [O] that has all of it but ``episode_step``, which is then 0. Numbers
        may be a model's, so quaternions of any length. Default: observations do not have it."""
        raise NotImplementedError(f"{type(self).__name__} has no state_of")

    @property
    def judges(self) -> bool:
        # events change what no observation shows
        return type(self).state_of is not Task.state_of and not self.of("events")

    def judge_prediction(self, obs: Array, action: Array, next_obs: Array) -> Timestep:
        """Judge a step between two observations [O] as ``step`` judges its own, but for the time limit."""
        before = self.world(self.state_of(obs))
        world = replace(before, state=self.state_of(next_obs), executed=self.clip_action(action))
        return self.judge(jax.random.key(0), before, world)[1]

    def act(self, world: Any, action: Array) -> Any:
        # rewards see the action that was done, not the one that was given
        action = self.clip_action(action)
        return replace(world, state=self.advance(world, action), executed=action)

    def observe_noisy(self, world: Any, key: Key) -> Any:
        """Return the world with its observation, with noise in tasks that have it."""
        del key
        return replace(world, obs=self.observe(world))

    def outcome(self, world: Any) -> Outcome:
        kind = type(self).__name__
        fail, success = as_truth(f"{kind}.fails", self.fails(world)), None
        if type(self).succeeds is not Task.succeeds:
            success = as_truth(f"{kind}.succeeds", self.succeeds(world))
            # what fails and succeeds together has failed
            success = success if type(self).fails is Task.fails else success & ~fail
        own = Outcome(
            success=success,
            fail=fail,
            truncated=self.truncates(world),
            reward=self.base_reward(world),
            metrics=dict(self.metrics(world)),
        )
        return join_outcomes((own, *(term(world) for term in self.of("terminations"))))

    def extras(self, world: Any) -> dict[str, Array]:
        """Further entries of ``info``."""
        del world
        return {}


def as_truth(what: str, given: Any) -> Array:
    """Check the answer of a hook that ends episodes. Raises ValueError: it is neither true nor false."""
    x = jnp.asarray(given)
    if x.shape or x.dtype != bool:
        raise ValueError(
            f"{what} must be true or false, got {x.dtype}{list(x.shape)}; compare numbers, "
            "and reduce several by .any() or .all()"
        )
    return x


def clip_with_gradient(action: Array) -> Array:
    """Clip to ±1. Unlike ``jnp.clip`` it does not halve the gradient on the bounds, where clipped actions lie."""
    # a select passes the whole gradient at ±1, and none beyond
    return jnp.where(jnp.abs(action) > 1.0, jnp.sign(action), action)
