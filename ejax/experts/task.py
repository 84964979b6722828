"""An expert's actions in a batch of environments, as episodes for ``ejax.data``.

    executed = clip(intended + σ·care·n),    n' = 0.8·n + 0.6·ε,  ε ~ N(0, 1)

Noise drives episodes off and the expert brings them back, so a cloned policy has seen recovery; the intended action is
recorded too. Source: Laskey et al. 2017, "DART: noise injection for robust imitation learning".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeAlias

import gymnasium
import jax
import numpy as np
from numpy.typing import NDArray

from ejax.data.task import Episode, EpisodeSpec, Failure, FieldForm, flatten
from ejax.envs.mujoco.pictures import Renderer
from ejax.envs.wrappers.rendered import WristCamera, check_renderer, draw_state, draw_wrist
from ejax.schema.frozen import freeze
from ejax.schema.tables import tables_beside
from ejax.types import CameraView, PyTree, RenderableEnv

EnvRows = NDArray[Any]
"""One entry per environment of a batch."""

Law: TypeAlias = Callable[[PyTree, PyTree, EnvRows], tuple[EnvRows, EnvRows] | None]
"""(state, observation, segment [N] of the step before) -> actions [N, A] and segments [N]; None: the plan has ended."""


class Actor(Protocol):
    """Acts in the expert's place."""

    def act(self, obs: PyTree, theirs: EnvRows) -> EnvRows:
        """Return actions [N, A] at observations, leaves [N, ...], where the expert's would be ``theirs``."""


INSTRUCTION_BYTES = 96
_NONE: Mapping[str, Any] = MappingProxyType({})
_DRAWN_AT_ONCE = 64
_NEARLY = 0.02  # m: nearer to the middle than this, no side is named
_CARRIED_OVER = 0.8  # part of the noise that carries over to the next step; the variance stays 1


class NoPlanError(RuntimeError):
    """A planner that gave no actions for these starts."""


@dataclass(frozen=True)
class Expert:
    """A plan of segments in a fixed order, and a feedback law for each. Pure except for the generator."""

    env: Any
    variety: float = 1.0
    """Part of each range, about its middle, that is drawn from; 0 is one style: nothing depends on the unseen."""
    judged: ClassVar[bool] = True
    """False: the task states no success, and a plan that was carried out is one."""
    segments: ClassVar[tuple[str, ...]]
    """Names, by ``segment_id``. Empty: they have numbers."""
    care: ClassVar[EnvRows]
    """[segments, A] or [segments, 1], ≤ 1: part of the noise that each segment tolerates; further ones as the last."""
    ranges: ClassVar[Mapping[str, tuple[float, float, int]]]
    """(low, high, D) by name: variation between episodes, such as speeds, heights, offsets."""
    make_env: ClassVar[Callable[..., RenderableEnv]]
    env_fields: ClassVar[Mapping[str, Any]] = {}
    """Default fields of the environment."""

    @property
    def space(self) -> gymnasium.Space[Any]:
        """Space of the actions of ``act``, which the noise is a part of."""
        return self.env.action_space

    def vary(self, rng: np.random.Generator, num_envs: int) -> Mapping[str, EnvRows]:
        """Draw the variation of N plans by name: uniform numbers [N], or [N, D] if D is above 1."""
        drawn = {}
        for name, (low, high, width) in self.ranges.items():
            x, middle = rng.uniform(low, high, (num_envs, width) if width > 1 else num_envs), 0.5 * (low + high)
            drawn[name] = x if self.variety == 1.0 else middle + self.variety * (x - middle)
        return drawn

    def act(self, obs: PyTree, segment: EnvRows, variation: Mapping[str, EnvRows]) -> tuple[EnvRows, EnvRows]:
        """Return actions [N, A], and their segments [N]: the same as before or the next. ``obs`` [N, F] is the
        environment's, by name if it has parts; ``segment`` [N] is of the step before."""
        raise NotImplementedError

    def begin(self, rng: np.random.Generator, state: PyTree, obs: PyTree) -> tuple[list[str], Law]:
        """Return an instruction for each of N episodes, and the law of their actions."""
        instructions, variation = self.instruct(rng, obs), self.vary(rng, len(jax.tree.leaves(obs)[0]))
        return instructions, lambda state, obs, segment: self.act(obs, segment, variation)

    def return_to(self, obs: PyTree, segment: EnvRows) -> EnvRows:
        """Return the segment [N] that the plan goes on from where another one acts, who may have lost the object."""
        del obs
        return segment

    def command(self, state: PyTree, action: EnvRows) -> EnvRows:
        """Turn actions [N, ...] of ``space`` into the environment's."""
        del state
        return action

    def instruct(self, rng: np.random.Generator, obs: PyTree) -> list[str]:
        """Name the goal of each episode in words; ``obs`` are the first observations."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """N attempts side by side, [T, N, ...]; row n counts for its first ``length[n]`` steps."""

    obs: PyTree
    action: EnvRows  # the executed actions
    intended: EnvRows  # the expert's intended actions, without the noise
    reward: EnvRows
    segment: EnvRows
    state: PyTree  # before each step
    length: EnvRows
    success: EnvRows
    terminated: EnvRows  # the last step ended the task, else only the episode
    instruction: list[str]


class ScriptedTask:
    """An expert in ``num_envs`` environments at once: a ``DemonstrationTask``; ``make_task`` of its module is this
    class.

    Frame fields: ``obs/state`` [F] (or ``obs/<part>``, as ``obs/robot/qpos``), ``actions``, ``expert_actions`` [A],
    ``rewards``, and ``obs/image`` [H, W, 3] uint8 with an ``image_size``. Episode fields: ``instruction``, and ``row``,
    the environment in the batch: ``start(seed)`` at that row is where the episode began.

    Args:
        env: fields of the environment, ``physics`` being mujoco by default. None: the expert's ``env_fields``.
        num_envs: episodes per call of ``generate``, stepped together on all cores.
        noise: σ, as a fraction of half the action's range.
        image_size: (height, width) of the pictures; None: none are drawn.
        camera: a view or its fields, as from a file; None: the environment's own.
        renderer: as in ``RenderedEnv``; train a policy with the same.
        wrist: fields of ``WristCamera``: ``obs/wrist`` next to ``obs/image``.
        instruction: of every episode; None: the expert's.

    Values outside their ranges raise ValueError or TypeError.
    """

    def __init__(
        self,
        expert: type[Expert],
        env: Mapping[str, Any] | None = None,
        num_envs: int = 16,
        noise: float = 0.15,
        variety: float = 1.0,
        image_size: Sequence[int] | None = None,
        camera: CameraView | Mapping[str, Any] | None = None,
        renderer: Renderer = "mujoco",
        wrist: Mapping[str, Any] | None = None,
        instruction: str | None = None,
    ) -> None:
        for name, value in {"noise": noise, "variety": variety}.items():
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} must be in [0, 1], got {value}")
        if num_envs < 1:
            raise ValueError(f"num_envs must be >= 1, got {num_envs}")
        if image_size is not None and (len(image_size) != 2 or min(image_size) < 1):
            raise ValueError(f"image_size must be (height, width) in pixels, or None; got {image_size!r}")
        self.env = expert.make_env(**{"physics": "mujoco", **(expert.env_fields if env is None else env)})
        self._expert = expert(self.env, variety)
        space = self._expert.space
        if not isinstance(space, gymnasium.spaces.Box):
            raise TypeError(f"experts act in a gymnasium.spaces.Box, got {space}")
        self._space, self.num_envs, self._noise, self._image_size = space, num_envs, noise, image_size
        self._camera = CameraView(**freeze(camera)) if isinstance(camera, Mapping) else camera
        self._instruction = instruction
        self._renderer, self._wrist = renderer, None if wrist is None else WristCamera(**freeze(wrist))
        check_renderer(self.env, renderer, self._wrist)
        self._reset, self._step = jax.jit(jax.vmap(self.env.reset)), jax.jit(jax.vmap(self.env.step))

    @property
    def control_period(self) -> float:
        """s, between two frames."""
        return self.env.control_period

    def spec(self) -> EpisodeSpec:
        actions: FieldForm = (self.env.action_space.shape or (), "float32")
        image = self._image_size
        spaces = observation_fields(self.env.observation_space)
        frames: dict[str, FieldForm] = {
            **{path: (space.shape, str(space.dtype)) for path, space in spaces.items()},
            "actions": actions,
            "expert_actions": actions,
            "rewards": ((), "float32"),
        }
        if image is not None:
            frames["obs/image"] = ((image[0], image[1], 3), "uint8")
        if self._wrist is not None:
            frames["obs/wrist"] = ((self._wrist.height, self._wrist.width, 3), "uint8")
        size = max(INSTRUCTION_BYTES, len((self._instruction or "").encode()))
        return EpisodeSpec(frames, {"instruction": ((), f"S{size}"), "row": ((), "int64")})

    def generate(self, seed: int) -> list[Episode | Failure]:
        """Return an outcome for each environment; a failed attempt is a Failure that names its last segment."""
        try:
            attempts, outcomes = self.attempt(seed), list[Episode | Failure]()
        except NoPlanError as error:
            return [Failure(str(error))]
        kept = np.flatnonzero(attempts.success).tolist()
        pictures = {path: self._draw(attempts, kept, draw) for path, draw in self._drawn.items()}
        for row, length in enumerate(attempts.length):
            segment = attempts.segment[:length, row]
            if row not in kept:
                names = self._expert.segments
                last = f"'{names[segment[-1]]}'" if names else f"number {segment[-1]}"
                text = f"no success in {length} steps; the last segment was {last}"
                outcomes.append(Failure(f"environment {row}: {text}"))
                continue
            drawn = {path: each[kept.index(row)] for path, each in pictures.items()}
            outcomes.append(self.episode(attempts, row, drawn))
        return outcomes

    def episode(
        self, attempts: Attempts, row: int, pictures: Mapping[str, EnvRows] = _NONE, fields: Mapping[str, Any] = _NONE
    ) -> Episode:
        """Make the episode of an environment from its attempt, with ``pictures`` [T, H, W, 3] and more ``fields``."""
        length = attempts.length[row]
        frames = {
            **{path: values[:length, row] for path, values in observation_fields(attempts.obs).items()},
            "actions": attempts.action[:length, row],
            "expert_actions": attempts.intended[:length, row],
            "rewards": attempts.reward[:length, row],
            **pictures,
        }
        fields = {"instruction": attempts.instruction[row].encode(), "row": row, **fields}
        segment, ended = attempts.segment[:length, row], bool(attempts.terminated[row])
        return Episode(frames, segment_id=segment, fields=fields, terminated=ended)

    def start(self, seed: int) -> tuple[PyTree, EnvRows]:
        """Make states and first observations of the episodes of ``seed``, leaves [N, ...]."""
        return self._reset(jax.random.split(jax.random.key(seed), self.num_envs))

    def attempt(self, seed: int, learner: Actor | None = None) -> Attempts:
        """Let the expert act until every environment has ended, or its plan has. Raises NoPlanError: it has none.
        ``learner`` acts in its place, and knows nothing of its intentions."""
        rng = np.random.default_rng(seed)
        space, keys = self._space, jax.random.split(jax.random.key(seed), self.num_envs)
        state, first = self.start(seed)
        obs = jax.tree.map(np.asarray, first)
        instruction, law = self._expert.begin(rng, state, obs)
        if self._instruction is not None:
            instruction = [self._instruction] * self.num_envs
        segment = np.zeros(self.num_envs, np.int64)
        noise = rng.standard_normal((self.num_envs, *space.shape))
        scale, care = self._noise * 0.5 * (space.high - space.low), self._expert.care
        going = np.ones(self.num_envs, bool)
        length, success = np.zeros(self.num_envs, np.int64), np.zeros(self.num_envs, bool)
        terminated = np.zeros(self.num_envs, bool)
        frames: list[dict[str, PyTree]] = []
        # not by ``ejax.episodes``: a law of whole batches acts, with noise, and its intentions are kept
        while going.any():
            segment = segment if learner is None else self._expert.return_to(obs, segment)
            if (decided := law(state, obs, segment)) is None:
                break
            intended, segment = decided
            intended = np.clip(intended, space.low, space.high).astype(np.float32)
            tolerated = care[np.minimum(segment, len(care) - 1)]
            action = np.clip(intended + scale * tolerated * noise, space.low, space.high)
            action = action.astype(np.float32)
            # noise that lasts some steps drives the arm off its way; white noise would only make it tremble
            noise = _CARRIED_OVER * noise + np.sqrt(1.0 - _CARRIED_OVER**2) * rng.standard_normal(noise.shape)
            intended, action = self._expert.command(state, intended), self._expert.command(state, action)
            action = action if learner is None else learner.act(obs, action)
            now = {"state": jax.device_get(state), "obs": obs, "action": action, "intended": intended}
            state, timestep = self._step(state, action, keys)
            frames.append({**now, "segment": segment, "reward": np.asarray(timestep.reward)})
            obs = jax.tree.map(np.asarray, timestep.obs)
            length += going
            success |= going & np.asarray(timestep.info["success"])
            terminated |= going & np.asarray(timestep.terminated)
            # the batch steps on until all have ended; later steps of a row that ended do not count
            going &= ~np.asarray(timestep.terminated | timestep.truncated)
        if not frames:
            raise NoPlanError("the plan is empty")
        if not self._expert.judged:
            success |= going
        arrays = jax.tree.map(lambda *x: np.stack(x), *frames)
        return Attempts(**arrays, length=length, success=success, terminated=terminated, instruction=instruction)

    @cached_property
    def _drawn(self) -> dict[str, Callable[[PyTree], Any]]:
        drawn: dict[str, Callable[[PyTree], Any]] = {}
        if self._image_size is not None:
            height, width = self._image_size
            draw = self.env.render if self._renderer == "mujoco" else partial(draw_state, self.env)
            drawn["obs/image"] = lambda state: draw(state, width, height, self._camera)
        if (wrist := self._wrist) is not None:
            drawn["obs/wrist"] = lambda state: draw_wrist(self.env, state, wrist)
        return drawn if self._renderer == "mujoco" else {path: jax.jit(jax.vmap(each)) for path, each in drawn.items()}

    def _draw(self, attempts: Attempts, rows: list[int], draw: Callable[[PyTree], Any]) -> list[EnvRows]:
        lengths, ends = attempts.length[rows], np.cumsum(attempts.length[rows])
        which = [(t, row) for row, length in zip(rows, lengths, strict=True) for t in range(length)]
        if self._renderer == "mujoco":
            pictures = [draw(jax.tree.map(lambda x: x[each], attempts.state)) for each in which]  # noqa: B023
        else:  # many at once, in one program
            pictures = []
            for start in range(0, len(which), _DRAWN_AT_ONCE):
                part = which[start : start + _DRAWN_AT_ONCE]
                t, row = np.array(part + part[-1:] * (_DRAWN_AT_ONCE - len(part))).T
                drawn = draw(jax.tree.map(lambda x: x[t, row], attempts.state))  # noqa: B023
                pictures += list(np.asarray(drawn)[: len(part)])
        return [np.stack(pictures[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


def read_plan(module: str) -> Mapping[str, Any]:
    """Read the numbers and words of an expert's plan, from the TOML next to its module; lists become tuples."""
    return freeze(tables_beside(module))


def limit_length(vector: EnvRows, bound: EnvRows) -> EnvRows:
    """Shorten vectors [N, D] that are longer than ``bound`` [N]."""
    length = np.linalg.norm(vector, axis=-1)
    return vector * np.minimum(1.0, bound / np.maximum(length, 1e-9))[:, None]


def name_place(offset: EnvRows) -> str:
    """Name the place [x, y] m from the middle, as seen from the robot's base looking along −x: −y is the left.

    name_place(np.array([-0.1, -0.1]))  ->  "far left"
    """
    depth = "" if abs(offset[0]) < _NEARLY else "far" if offset[0] < 0 else "near"
    side = "" if abs(offset[1]) < _NEARLY else "left" if offset[1] < 0 else "right"
    return " ".join(word for word in (depth, side) if word) or "middle"


def phrase(rng: np.random.Generator, wordings: Sequence[str], offset: EnvRows) -> list[str]:
    """Draw a wording for each row, with ``{place}`` filled in. ``offset``: [N, 2], m."""
    chosen = rng.integers(len(wordings), size=len(offset))
    return [wordings[i].format(place=name_place(each)) for i, each in zip(chosen, offset, strict=True)]


def observation_fields(obs: Any) -> dict[str, Any]:
    """Map an observation's parts to paths of frame fields; a vector is ``obs/state``."""
    return flatten({"obs": obs}) if isinstance(obs, Mapping) else {"obs/state": obs}
