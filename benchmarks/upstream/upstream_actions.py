"""``embodichain.lab.gym.envs.managers`` with ``.actions`` and ``.cfg``: ejax's action terms, on EmbodiChain's mocks.

``ActionManager`` alone is written here: ejax has none, an environment applies its terms itself.
"""

from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from upstream_words import translated

from ejax.envs.terms.registry import find_functor

_WORDS = {"an end effector's pose has 6 numbers": "EEF pose action must be 6D or 7D"}
_TARGETS = {"qpos": "target", "qvel": "velocity_target", "qf": "effort"}


@dataclass
class FunctorCfg:
    func: Any = None
    params: dict[str, Any] = field(default_factory=dict)
    mode: str = "pre"


ActionTermCfg = FunctorCfg


@dataclass(frozen=True)
class _State:
    """The fields of ejax's state that a term reads and sets."""

    physics: Any
    target: Any
    velocity_target: Any
    effort: Any


class _Term:
    """A term of ejax's, made when it is first used, by the name of EmbodiChain's class."""

    def __init__(self, cfg: FunctorCfg, env: Any) -> None:
        self.cfg, self.env = cfg, env

    @cached_property
    def term(self) -> Any:
        num_joints = len(self.env.active_joint_ids)
        limits = np.tile([-np.inf, np.inf], (num_joints, 1))
        if hasattr(self.env, "body_data"):
            limits = self.env.body_data.qpos_limits[0].numpy()
        scene = SimpleNamespace(limits=limits, drives=SimpleNamespace(max_effort=[np.inf] * num_joints))
        functor = find_functor("actions", type(self).__name__)
        with translated(_WORDS):
            return functor(scene, tuple(self.env.active_joint_ids), **self.cfg.params)

    @property
    def action_dim(self) -> int:
        return self.term.width

    def process_action(self, action: torch.Tensor) -> torch.Tensor:
        term, rows = self.term, []
        for q, a in zip(self.env.get_qpos().numpy(), action.numpy(), strict=True):
            state = _State(SimpleNamespace(qpos=jnp.array(q)), *jnp.zeros((3, len(q))))
            after = term.apply(SimpleNamespace(state=state), jnp.array(a))
            rows.append(torch.tensor(getattr(after, _TARGETS[term.command]).tolist()))
        return torch.stack(rows)


class ActionManager:
    def __init__(self, cfg: dict[str, FunctorCfg], env: Any) -> None:
        self.terms = {name: (each.mode, each.func(each, env)) for name, each in cfg.items()}

    def get_terms_by_mode(self, mode: str) -> list[tuple[str, _Term]]:
        return [(name, term) for name, (each, term) in self.terms.items() if each == mode]

    def get_action_dim_by_mode(self, mode: str) -> int:
        return sum(term.action_dim for _, term in self.get_terms_by_mode(mode))

    def process_action(self, action: torch.Tensor, mode: str = "pre") -> torch.Tensor:
        ((_, term),) = self.get_terms_by_mode(mode)
        return term.process_action(action)


DeltaQposTerm, QposTerm, QposDenormalizedTerm, QposNormalizedTerm, EefPoseTerm, QvelTerm, QfTerm = (
    type(name, (_Term,), {})
    for name in (
        *("DeltaQposTerm", "QposTerm", "QposDenormalizedTerm", "QposNormalizedTerm"),
        *("EefPoseTerm", "QvelTerm", "QfTerm"),
    )
)
