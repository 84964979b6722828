"""A custom demonstration for any environment: EmbodiChain's ``create_demo_action_list`` and
``create_demo_segments``, methods of its tasks there, as functions here:

    create_demo_action_list(env, state, obs, rng, **arguments) -> actions [T, N, A], or None where no plan was found
    create_demo_segments(env, state, obs, rng, **arguments) -> a generator of actions [T, N, A], one segment each

of N started episodes: ``state`` and ``obs`` have leaves [N, ...], ``rng`` is a NumPy generator. A generator gets what
there is after a segment: ``state, obs = yield actions``. Actions are clipped to the action space and carried out
without noise. An episode has to reach the task's success while they are; in a scene without a task, a plan that was
carried out to its end is a success, as in EmbodiChain.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from ejax.envs.manager.embodied import EmbodiedEnv
from ejax.envs.terms.terminations import SCENE_ONLY
from ejax.experts.task import EnvRows, Expert, Law
from ejax.types import PyTree

KEYS = ("create_demo_action_list", "create_demo_segments")


def planned(
    make_env: Callable[..., Any], plan: Callable[..., Any], arguments: Mapping[str, Any], key: str
) -> type[Expert]:
    """Make the expert of a function, which ``key`` of ``KEYS`` names, in environments that ``make_env`` makes."""
    members = {"make_env": staticmethod(make_env), "plan": staticmethod(plan), "arguments": arguments, "key": key}
    return type("Planned", (Planned,), members)


@dataclass(frozen=True)
class Planned(Expert):
    """Expert whose actions a function plans, see ``planned``. Raises ValueError at actions that are not [T, N, A]."""

    plan: ClassVar[Callable[..., Any]]
    arguments: ClassVar[Mapping[str, Any]]
    key: ClassVar[str]
    care: ClassVar[EnvRows] = np.zeros((1, 1))
    segments, ranges = (), {}

    @property
    def judged(self) -> bool:  # type: ignore[override]  # known once there is an environment
        return not (isinstance(self.env, EmbodiedEnv) and self.env.gym_config.get("id") == SCENE_ONLY)

    def begin(self, rng: np.random.Generator, state: PyTree, obs: PyTree) -> tuple[list[str], Law]:
        num_envs = len(jax.tree.leaves(state)[0])
        steps = self._steps(self.plan(self.env, state, obs, rng, **self.arguments), num_envs)
        next(steps)  # to where it takes a situation

        def law(state: PyTree, obs: PyTree, segment: EnvRows) -> tuple[EnvRows, EnvRows] | None:
            del segment
            return steps.send((state, obs))

        return [""] * num_envs, law

    def _steps(self, made: Any, num_envs: int) -> Generator[Any, Any, None]:
        """Yield (actions [N, A], segments [N]) of the step from each situation sent, and None once the plan ends."""
        lazy = isinstance(made, Generator)
        situation = yield None
        parts: Any = made if lazy else iter([] if made is None else [made])
        number = 0
        try:
            actions = next(parts)
            while True:
                shape = (num_envs, *self.env.action_space.shape)
                rows = np.asarray(actions, np.float32)
                if rows.shape[1:] != shape:
                    wanted = f"[T, {', '.join(map(str, shape))}]: steps, environments, numbers of an action"
                    raise ValueError(f"{self.key} gave actions {list(rows.shape)}; they must be {wanted}")
                for row in rows:
                    situation = yield row, np.full(num_envs, number)
                number += 1
                actions = parts.send(situation) if lazy else next(parts)
        except StopIteration:
            while True:
                yield None
