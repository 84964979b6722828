"""Training, acting and saving by one object: ``PPO("actor_critic", env).learn(100_000)``.

A layer over ``ejax.run.train``, ``Trainer`` and ``ejax.load``, for those who come from Stable-Baselines3: the run's
folder is as always, and can be resumed, evaluated and exported.
"""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from numpy.typing import NDArray

from ejax.algorithms import grpo, ppo, sac
from ejax.algorithms.record import find_algorithm
from ejax.collectors.stateful import BaseAlgorithm
from ejax.schema.messages import did_you_mean, short_repr
from ejax.schema.problems import ConfigError, Problem
from ejax.types import PyTree

if TYPE_CHECKING:
    from ejax.config import RunConfig
    from ejax.play.acting import Actor
    from ejax.training.callbacks import Callback, RunResult
    from ejax.training.environments import UserObjects

_NETWORK = {"network_cfg": {"hidden_sizes": [64, 64], "activation": "tanh"}}
"""Networks of actor and critic, unless ``policy_kwargs`` has another."""
_NEEDED = {"actor_q": {"squash_actions": True}}
"""Policy -> keys of its section without which it is refused."""


class Learner:
    """A training with its policy, which acts as after the last update of ``learn``. ``run_dir``: the run's folder.

    Args:
        algorithm: a registered name, such as ``ppo``.
        policy: a registered name, such as ``actor_critic``.
        env: an ``id``, as in a config (``PlanarReachRL``, ``gymnasium:HalfCheetah-v5``), or an object that ``Trainer``
            takes; ``learn`` closes one outside JAX, and cannot go on with it.
        env_kwargs: ``env.cfg`` of an ``id``.
        policy_kwargs: further keys of the config's section ``policy``. Networks have two layers of 64 by default.
        options: of the algorithm (``learning_rate``, ``gamma``, …), and keys of the section ``trainer``: ``num_envs``,
            ``buffer_size``, ``seed``, ``enable_eval``, …

    Raises:
        ConfigError: a config with these values would be refused.
    """

    config: "RunConfig"
    run_dir: Path | None = None
    result: "RunResult | None" = None
    """Result of the last ``learn``."""

    def __init__(
        self,
        algorithm: str,
        policy: str,
        env: Any,
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        policy_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from ejax.config import parse_config
        from ejax.config.models import TrainerConfig
        from ejax.policies.record import find_policy
        from ejax.trainer import Trainer
        from ejax.training.policies import build_policy

        networks = dict.fromkeys(find_policy(policy).mlps, _NETWORK)
        section = {"name": policy, **networks, **_NEEDED.get(policy, {}), **(policy_kwargs or {})}
        own, of_run = find_algorithm(algorithm).Config.model_fields, TrainerConfig.model_fields
        # what is nearly a key of the section is refused there, with that key's name
        near = [key for key in options if key not in own and (key in of_run or did_you_mean(key, of_run, 0.85))]
        trainer = {key: options.pop(key) for key in near}
        self._objects: UserObjects | None = None
        self._steps = 0
        self._actor: Actor | None = None
        if isinstance(env, str):
            of_env = {"id": env, "cfg": env_kwargs or {}}
            sections = {"policy": section, "algorithm": {"name": algorithm, "cfg": options}}
            self.config = parse_config({"trainer": trainer, "env": of_env, **sections})
        elif env_kwargs is not None:
            raise ConfigError([Problem("env_kwargs", "belong to an env that is given by its id; leave them out")])
        else:
            made = Trainer(env, build_policy(section, env), algorithm, options=options, **trainer)
            self.config, self._objects = made.config, made.objects

    def learn(self, total_timesteps: int, callbacks: Iterable["Callback"] = (), **options: Any) -> "Learner":
        """Train for so many environment steps, and again for more. Returns this object.

        Args:
            callbacks: ``ejax.Callback`` objects.
            options: ``run_dir`` (of a new run) and ``on_log`` of ``ejax.run.train``, whose errors it raises.
        """
        from ejax.run import train
        from ejax.trainer import with_total

        if isinstance(total_timesteps, bool) or not hasattr(total_timesteps, "__int__"):
            text = f"got {short_repr(total_timesteps)}; must be a whole number of environment steps, such as 100_000"
            raise ConfigError([Problem("total_timesteps", text)])
        if self.run_dir is not None:
            options |= {"resume": "latest", "run_dir": self.run_dir}
        self.config = with_total(self.config, self._steps + total_timesteps)
        self.result = train(self.config, callbacks=callbacks, objects=self._objects, **options)
        self.run_dir, self._steps, self._actor = self.result.run_dir, self.result.global_step, None
        return self

    def act(self, obs: PyTree, *, deterministic: bool = True, **options: Any) -> NDArray[Any]:
        """Choose actions by the policy after the last update, as ``ejax.load(run).act``."""
        from ejax.play.acting import load

        if self._actor is None:
            self._actor = load(self._run(), checkpoint="latest", device=self.config.trainer.device)
        return self._actor.act(obs, deterministic=deterministic, **options)

    def save(self, path: Path | str) -> Path:
        """Copy the run's folder to ``path``, a new folder. FileExistsError: it is there."""
        return Path(shutil.copytree(self._run(), path))

    @staticmethod
    def load(run: Path | str, *, device: str = "cpu") -> "Learner":
        """Open a run's folder, to act and to learn on in its environment. Errors: as ``ejax.load``."""
        from ejax.play.acting import load
        from ejax.store.checkpoint import verify_checkpoint

        found = Learner.__new__(Learner)
        found._objects, found._actor = None, (actor := load(run, checkpoint="latest", device=device))
        found.config, found.run_dir = actor.config, actor.checkpoint.parents[1]
        found._steps = verify_checkpoint(actor.checkpoint)["global_step"]
        return found

    def _run(self) -> Path:
        if self.run_dir is None:
            raise ValueError("nothing has been learned yet; call learn(total_timesteps) first, or load a run")
        return self.run_dir


class _ByName(BaseAlgorithm):
    """Base of algorithms that are made by names as well."""

    name: str
    load = staticmethod(Learner.load)

    @overload
    def __new__(cls, cfg: str, policy: Any, **options: Any) -> Learner: ...  # type: ignore[misc]  # by names: no state
    @overload
    def __new__(cls, cfg: Any, policy: Any, **options: Any) -> "_ByName": ...
    def __new__(cls, cfg: Any, policy: Any, **options: Any) -> Any:
        return Learner(cls.name, cfg, policy, **options) if isinstance(cfg, str) else super().__new__(cls)


class PPO(_ByName):
    """PPO by names, ``PPO("actor_critic", env)``: a ``Learner``; or with its state, ``PPO(cfg, policy)``."""

    name, record = "ppo", ppo.ALGORITHM


class GRPO(_ByName):
    """GRPO by names, ``GRPO("actor_only", env)``: a ``Learner``; or with its state, ``GRPO(cfg, policy)``."""

    name, record = "grpo", grpo.ALGORITHM


class SAC(_ByName):
    """SAC by names, ``SAC("actor_q", env)``: a ``Learner``."""

    name, record = "sac", sac.ALGORITHM
