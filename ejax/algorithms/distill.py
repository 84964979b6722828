"""Distillation: a student acts, and learns to do what a teacher would have done.

    kl    L = E[KL(π_teacher(· | o) ‖ π_student(· | o'))]
    nll   L = −E[log π_student(a* | o')]
    mse   L = E[‖mode π_student(· | o') − a*‖² / A]

with a* = mode π_teacher(· | o) and the expectation over what the student meets. The two may read different parts of one
observation: o what only a simulator knows, o' what a robot has. With the probability β of the update a row is given a*
in place of the student's sample.

Source: Ross et al. 2011 (DAgger), but as in RSL-RL no data are kept from one update to the next.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from pydantic import Field, PositiveFloat, PositiveInt

from ejax.algorithms.batch import apply_to_batch, make_batch
from ejax.algorithms.options import MINIBATCH_FIELDS, MinibatchOptions
from ejax.algorithms.record import Algorithm, RunShape, Teacher
from ejax.algorithms.sgd import Batch, sgd_epochs
from ejax.algorithms.step import RunState, Step, finish
from ejax.algorithms.taught import TeacherState, imitation_terms, make_teacher_state, seen_by
from ejax.algorithms.teaching import TeachersConfig, teacher_problems
from ejax.losses import weighted_sums
from ejax.optim import bind_schedule, get_learning_rate, step_schedule
from ejax.policies.calls import apply_policy, first_memory, rows_like
from ejax.policies.normalize import update_normalizer
from ejax.rollout import unroll
from ejax.schema.problems import Problem
from ejax.types import Array, Distribution, Env, HostEnv, Key, Metrics, Params, Policy, PyTree, Rollout, TrainState


class DistillConfig(TeachersConfig, MinibatchOptions):  # type: ignore[misc]  # as of StrictModel
    """``algorithm.cfg`` of ``distill``. EmbodiChain has no such algorithm."""

    beta: float = Field(default=0.0, ge=0.0, le=1.0)
    """The probability, at the first update, that the teacher's action is done in place of the student's."""
    beta_updates: PositiveInt | None = None
    """Updates in which it falls to 0, linearly. None: those of the run."""
    n_epochs: PositiveInt = 4
    """Passes over a rollout in one update."""
    batch_size: PositiveInt = 256
    """Rows of one minibatch on each device; the last one of an epoch may be smaller."""
    max_grad_norm: PositiveFloat = Field(default=1.0, allow_inf_nan=True)
    """Infinity: no clipping."""


@partial(jax.jit, static_argnames=("policy", "optimizer", "config"))
def distill_update(
    state: TrainState,
    rollout: Rollout,
    label: Any,
    key: Key,
    *,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    config: DistillConfig,
) -> tuple[TrainState, Metrics]:
    """Make ``n_epochs`` of minibatch steps towards the teacher and one of the schedule, after normalizers saw the
    observations. The new state has ``step`` + 1.

    Args:
        rollout: leaves [T, N, ...]; of any actions.
        label: the teacher's distributions at its observations, leaves [T, N, ...].
    """
    # first: there is no probability ratio, and labels are of these observations
    state = replace(state, params=update_normalizer(policy, state.params, rollout.obs, rollout.valid))
    batch, minibatches = make_batch(policy, rollout, config, label=label)
    loss = partial(distill_loss, policy=policy, config=config)
    state, metrics = sgd_epochs(state, batch, key, loss=loss, optimizer=optimizer, minibatches=minibatches)
    state = step_schedule(state, config.optimizer, config.lr_scheduler)
    return state, metrics | {"learning_rate": get_learning_rate(state.opt_state)}


def distill_loss(params: Params, batch: Batch, *, policy: Policy, config: DistillConfig) -> tuple[Array, Metrics]:
    """Compute the loss of one minibatch (or of a part of it), and metrics, weighted means. ``kl`` needs distributions
    of one kind; ``agreement`` is of choices.

    Args:
        batch: ``obs``, ``label`` with leaves [B, ...]; ``weight`` [B], of sum one over a minibatch; optional
            ``dropout_seed`` [B]. Of a policy with memory: see ``flatten_rollout``.
    """
    distribution, _, batch = apply_to_batch(policy, params, batch)
    terms = imitation_terms(batch["label"], distribution) | {"entropy": distribution.entropy()}
    return weighted_sums(terms, batch["weight"], {config.loss: 1.0})


def make_distill_step(
    policy: Policy,
    env: Env,
    optimizer: optax.GradientTransformation,
    config: DistillConfig,
    *,
    num_steps: int,
    dropout: bool,
    teacher: Teacher,
) -> Step:
    """Collect T steps under the student, apply the teacher, update."""
    actor = _Pair(policy, teacher.policy, teacher.obs, mixes=config.beta > 0.0)

    def step(state: RunState, key: Key) -> tuple[RunState, Metrics]:
        key_collect, key_update = jax.random.split(key)
        own: TeacherState = state.own
        beta = beta_at(state.update, config) if actor.mixes else jnp.zeros(())
        rollout, envs = unroll(
            actor,
            env,
            {"student": state.train.params, "teacher": own.params, "beta": beta},
            replace(state.envs, memory={"student": state.envs.memory, "teacher": own.memory}),
            key_collect,
            num_steps=num_steps,
            dropout=dropout,
        )
        label, _, _ = apply_policy(
            teacher.policy, own.params, seen_by(rollout.obs, teacher.obs), rollout.memory["teacher"]
        )
        train, losses = distill_update(
            state.train,
            replace(rollout, memory=rollout.memory["student"]),
            label,
            key_update,
            policy=policy,
            optimizer=optimizer,
            config=config,
        )
        losses |= {"beta": beta} if actor.mixes else {}
        own = replace(own, memory=envs.memory["teacher"])  # it watches on, whoever acts
        envs = replace(envs, memory=envs.memory["student"])
        return finish(replace(state, train=train, envs=envs, own=own), rollout, losses)

    return step


def beta_at(update: Array, config: DistillConfig) -> Array:
    """Compute β of update number ``update``, float32. Raises ValueError: ``beta_updates`` is open."""
    if config.beta_updates is None:
        raise ValueError("beta_updates is not set; ejax.config.bind sets it to the updates of the run")
    return config.beta * jnp.maximum(0.0, 1.0 - update / config.beta_updates)


@dataclass(frozen=True)
class _Pair:
    """The student, which acts, and the teacher, who may act too. Parameters: ``student``, ``teacher``, ``beta``."""

    student: Policy
    teacher: Policy
    teacher_obs: str | None
    mixes: bool

    def init(self, key: Key, obs: PyTree) -> Params:
        teacher = self.teacher.init(key, seen_by(obs, self.teacher_obs))
        return {"student": self.student.init(key, obs), "teacher": teacher, "beta": jnp.zeros(())}

    def init_memory(self, num_rows: int) -> PyTree:
        return {"student": first_memory(self.student, num_rows), "teacher": first_memory(self.teacher, num_rows)}

    def apply(self, params: Params, obs: PyTree, *, memory: PyTree, **keywords: Any) -> tuple[Any, Array, PyTree]:
        distribution, value, after = apply_policy(self.student, params["student"], obs, memory["student"], **keywords)
        # not computed where nothing comes of it
        theirs, _, known = apply_policy(
            self.teacher, params["teacher"], seen_by(obs, self.teacher_obs), memory["teacher"]
        )
        if self.mixes:
            beta = jnp.broadcast_to(params["beta"], value.shape)
            distribution = _Mixture(distribution, theirs, beta)  # type: ignore[abstract]  # it is sampled from, no more
        return distribution, value, {"student": after, "teacher": known}


@struct.dataclass
class _Mixture(Distribution):
    """The student's distribution, but with the probability ``beta`` [...] the teacher's mode."""

    student: Any
    teacher: Any
    beta: Array

    def sample(self, key: Key) -> Array:
        key_whose, key_action = jax.random.split(key)
        own = self.student.sample(key_action)
        theirs = self.teacher.env_action(self.teacher.mode())
        taught = jax.random.bernoulli(key_whose, self.beta)  # drawn for each row
        return jnp.where(rows_like(taught, own), theirs, own)

    def for_storage(self, action: Array) -> Any:
        del action
        return self.student


def _with_teacher(record: Algorithm, teacher: Teacher) -> Algorithm:
    make_own = partial(make_teacher_state, teacher=teacher, key="algorithm.cfg")
    return replace(record, make_step=partial(make_distill_step, teacher=teacher), make_own=make_own)


def _bind(options: DistillConfig, num_updates: int) -> DistillConfig:
    bound: dict[str, Any] = {"lr_scheduler": bind_schedule(options.lr_scheduler, num_updates)}
    if options.beta > 0.0 and options.beta_updates is None:
        bound["beta_updates"] = num_updates
    return options.model_copy(update=bound)


def _problems(options: DistillConfig, run: RunShape) -> Iterator[Problem]:
    yield from teacher_problems(options, "algorithm.cfg")
    if options.beta == 0.0 and options.beta_updates is not None:
        text = f"got {options.beta_updates}, but beta is 0: the teacher never acts; leave it out, or set beta"
        yield Problem("algorithm.cfg.beta_updates", text)
    yield from options.problems(run)


def _env_problems(options: DistillConfig, env: Env | HostEnv) -> Iterator[Problem]:
    del options
    if isinstance(env, HostEnv):
        text = "got distill with an environment outside JAX; it collects inside its program: use one in JAX"
        yield Problem("algorithm.name", text)


ALGORITHM = Algorithm(
    Config=DistillConfig,
    taught=lambda options: options,
    with_teacher=_with_teacher,
    bind=_bind,
    problems=_problems,
    env_problems=_env_problems,
    **MINIBATCH_FIELDS,
)
