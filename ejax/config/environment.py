"""Problems of a config with the classes that it names, and with their spaces, that show before a run is built."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import flax.linen as nn
import gymnasium

from ejax.algorithms.record import Algorithm
from ejax.config.embodichain.spellings import RECORDERS
from ejax.config.explain import argument_problems
from ejax.config.models import EnvConfig, EventsConfig, PolicyConfig
from ejax.distributions import action_spec
from ejax.envs.randomization.names import KINDS, split_events
from ejax.envs.wrappers.placing import FIELD, why_none, with_functor_events, wrap
from ejax.schema.frozen import thaw
from ejax.schema.messages import did_you_mean, explain, short_repr
from ejax.schema.paths import leaves, named, within
from ejax.schema.problems import ConfigError, Problem
from ejax.schema.registry import did_you_mean_family, resolve
from ejax.types import PHASES

_REFUSED = (TypeError, ValueError, ArithmeticError, ImportError)  # what a class may raise at wrong arguments
_GIVEN = {
    *PolicyConfig.model_fields.keys() - {"name"},
    *("action_spec", "action_space", "observation_space", "instructions"),
}
"""Arguments of a policy's class that ejax fills."""


def class_problems(policy: PolicyConfig) -> list[Problem]:
    """Find problems of ``policy.cfg``, or a class that is not there."""
    try:
        record = policy.record
        if record.mlps:  # it takes no cfg, as its own rules report
            return []
        linen = isinstance(record.make, type) and issubclass(record.make, nn.Module)
        given = _GIVEN | {"name", "parent"} if linen else _GIVEN
        return argument_problems(record.make, thaw(policy.cfg), "policy.cfg", given)
    except (ImportError, TypeError, ValueError) as error:  # the last two: no class and no function
        return [Problem("policy.name", f"'{policy.name}' cannot be imported: {error}")]


def env_problems(env: EnvConfig) -> list[Problem]:
    """Find arguments that the environment or one of its wrappers does not take, or that it is not there."""
    try:
        make = resolve("env", env.id)
    except (ImportError, TypeError, ValueError) as error:  # the last two: no name, or a relative one
        return [Problem("env.id", f"'{env.id}' cannot be imported: {error}{did_you_mean_family(env.id)}")]
    try:
        cfg, chunk = _arguments(make, env)
        problems = argument_problems(make, thaw(cfg), "env.cfg")
    except (TypeError, ValueError) as error:
        return [Problem("env.id", f"'{env.id}' is neither a class nor a function that makes an environment: {error}")]
    if type(chunk) is not int or chunk < 1:
        problems.append(Problem("env.cfg.action_chunk", f"got {short_repr(chunk)}; must be an integer of at least 1"))
    # another than a dataclass may take long to make, or start a simulator; of wrappers, nothing is known without it
    if dataclasses.is_dataclass(make) or (env.wrappers and not _takes(make, "num_envs")):
        above = "env.cfg.gym_config." if "gym_config" in cfg else "env.cfg."
        problems = problems or _refusals(lambda: make(**cfg), "env.cfg", above)
    return problems or _wrapper_problems(make, cfg, env)


def _wrapper_problems(make: Any, cfg: Mapping[str, Any], env: EnvConfig) -> list[Problem]:
    """Find the first of ``env.wrappers`` that is not there, or refuses its arguments or what it is wrapped around."""
    checks = not _takes(make, "num_envs")  # one outside JAX refuses them when it is built
    for i, (name, options) in enumerate(env.layers):
        key = f"env.wrappers.{name}"
        try:
            around = resolve("wrapper", name)
            inner = next(iter(inspect.signature(around).parameters), "")
            problems = argument_problems(around, thaw(options), key, given=(inner,))
        except (ImportError, TypeError, ValueError) as error:  # the last two: no class and no function
            return [Problem(key, f"'{name}' cannot wrap an environment: {error}")]
        checks &= dataclasses.is_dataclass(around)
        build = functools.partial(_wrapped, make, cfg, env.layers[: i + 1], {})
        if problems := problems or (_refusals(build, key, f"{key}.") if checks else []):
            return problems
    return []


def action_problems(
    env_config: EnvConfig, policy: PolicyConfig, record: Algorithm, *, builds: bool = False
) -> list[Problem]:
    """Find problems between algorithm, policy and the environment's spaces, where these are known before it is built.
    ``builds``: build one row where they are not."""
    make = resolve("env", env_config.id)
    cfg, chunk = _arguments(make, env_config)
    gym_config = cfg.get("gym_config")
    sees = isinstance(gym_config, Mapping) and bool(gym_config.get("sensor"))
    observed = sees or policy.record.images or policy.obs_groups.actor or policy.obs_groups.critic
    known = all(map(dataclasses.is_dataclass, (make, *(resolve("wrapper", name) for name, _ in env_config.layers))))
    limited = record.actions != Algorithm.actions or policy.squash_actions or policy.action_dim is not None
    if not (observed or limited if known else builds):
        return []
    try:
        made: Any = make(**cfg, **({"num_envs": 1} if _takes(make, "num_envs") else {}))
        env = wrap(made, env_config.layers)
        action_space = getattr(env, "single_action_space", None) or env.action_space  # of a vector's row
        anything = gymnasium.spaces.Box(-1.0, 1.0)
        observation_space = env.observation_space if observed else anything  # of some it takes long
        getattr(env, "close", lambda: None)()
    except Exception as error:  # of any kind: it is the environment's own code
        return [Problem("env", f"cannot be built: {explain(error, typed=True)}")]
    spaces = policy, action_space, observation_space
    return list(record.action_problems(action_space)) or space_problems(*spaces, action_chunk=chunk)


def event_problems(env: EnvConfig, events: EventsConfig) -> list[Problem]:
    """Find events of the trainer that the environment cannot have."""
    problems: list[Problem] = []
    make: Any = resolve("env", env.id)
    checks = dataclasses.is_dataclass(make)  # others refuse when they are built
    for phase in PHASES:
        section = f"trainer.events.{phase}"
        randomizers, specs = split_events(events.of(phase))
        if randomizers and checks:
            cfg = {name: value for name, value in env.cfg.items() if _takes(make, name)}
            build = functools.partial(_wrapped, make, cfg, env.layers, randomizers)
            problems += _refusals(build, section, f"{section}.")
        unknown = _unknown_functors(specs, section) if specs else []
        problems += unknown
        if unknown or not specs:
            continue
        inside = with_functor_events(env.id, _arguments(make, env)[0], specs)
        if inside is None:
            problems += [Problem(f"{section}.{name}", why_none(env.id)) for name in specs]
        elif checks:
            problems += _refusals(functools.partial(make, **inside), section, section, FIELD)
    return problems


def _takes(make: Any, name: str) -> bool:
    return name in inspect.signature(make).parameters


def _arguments(make: Any, env: EnvConfig) -> tuple[dict[str, Any], Any]:
    """Separate ``action_chunk``, which ejax reads for a class that does not, from the class's arguments."""
    cfg = dict(env.cfg)
    return cfg, 1 if _takes(make, "action_chunk") else cfg.pop("action_chunk", 1)


def _wrapped(make: Any, cfg: Mapping[str, Any], layers: Any, events: Mapping[str, Any]) -> Any:
    return wrap(make(**cfg), layers, events)


def _unknown_functors(specs: Mapping[str, Any], section: str) -> list[Problem]:
    from ejax.envs.terms.registry import TERMS  # imports MuJoCo

    problems = []
    allowed = [*dict.fromkeys([*TERMS["events"], *KINDS]), *RECORDERS[:1]]
    for name, spec in specs.items():
        if (func := spec["func"]) not in TERMS["events"] and ":" not in func:
            text = f"no events functor '{func}'; there is {', '.join(allowed)}, or package.module:function"
            problems.append(Problem(f"{section}.{name}.func", text + did_you_mean(func, allowed)))
    return problems


def _refusals(build: Callable[[], Any], section: str, above: str, own: str = "") -> list[Problem]:
    """Find problems of what checks its own values.

    ``section``: the key of what has none. ``above`` comes before a key of the class's, in place of ``own``.
    """
    try:
        build()
    except ConfigError as error:
        return [Problem(above + key.removeprefix(own), text) for key, text in error.problems]
    except _REFUSED as error:
        return [Problem(section, str(error))]
    return []


def space_problems(
    policy: PolicyConfig, action_space: gymnasium.Space, observation_space: gymnasium.Space, *, action_chunk: int = 1
) -> list[Problem]:
    """Find problems of ``action_dim``, ``squash_actions``, ``obs_groups``, and of pictures where an MLP reads them."""
    try:
        problems, key = [*_groups(policy, observation_space)], "env"
    except ValueError as error:
        return [Problem("env", f"the observation has ambiguous names: {error}")]
    parts = [part for _, part in leaves(observation_space)]
    if any(isinstance(part, Mapping) for part in parts) or not any(math.prod(part.shape or ()) for part in parts):
        text = f"an observation space, and each Dict or Tuple in it, needs at least one number, got {observation_space}"
        return [Problem("env", text)]
    try:  # first without squashing: it is the environment's fault if that is refused already
        count = action_spec(action_space).num_actions * action_chunk
        key = "policy.squash_actions"
        action_spec(action_space, squash=policy.squash_actions)
    except ValueError as error:
        return [Problem(key, str(error)), *problems]
    if policy.action_dim not in (None, count):
        text = f"got {policy.action_dim}, but the env's actions have {count}; use {count}, or leave it out"
        problems.insert(0, Problem("policy.action_dim", text))
    return [*problems, *_pictures(policy, observation_space)]


def _groups(policy: PolicyConfig, space: gymnasium.Space) -> Iterator[Problem]:
    there = paths(space)
    for network in ("actor", "critic"):
        for path in getattr(policy.obs_groups, network):
            if path not in there:
                has = f"there is {', '.join(there)}" if there else "which is one array without parts; leave it out"
                text = f"'{path}' is not a part of the observation{';' if there else ','} {has}"
                yield Problem(f"policy.obs_groups.{network}", text + did_you_mean(path, there))


def _pictures(policy: PolicyConfig, space: gymnasium.Space) -> Iterator[Problem]:
    parts, record = named(space), policy.record
    pictures = [path for path, part in parts.items() if len(part.shape or ()) == 3 and path]
    if record.images is not None:
        images = record.images(policy)
        wrong = [name for name in images if name not in pictures] if isinstance(images, tuple) else []
        if wrong or not images:
            given, there = ", ".join(map(short_repr, wrong)), ", ".join(pictures)
            text = f"names {given or 'no picture'}; the observation has {there or 'none'}"
            yield Problem("policy.cfg.images", text + did_you_mean(str(wrong[:1]), pictures))
    for network in record.mlps:
        groups = getattr(policy.obs_groups, network)
        read = [path for path in pictures if path in within(parts, groups)]
        if read and (network == "actor" or groups):
            others = ", ".join(path for path in parts if path not in pictures) or "no vectors"
            text = f"{policy.name} reads vectors, and {', '.join(read)} is a picture; name the others ({others}), or"
            yield Problem(f"policy.obs_groups.{network}", f"{text} use the policy vision, with it in policy.cfg.images")


def paths(space: gymnasium.Space) -> list[str]:
    """Return the dotted paths of a space's parts, sections first; none of a single array's. ValueError: two that one
    name would mean."""
    named(space)
    inside = (accumulate(map(str, path), "{}.{}".format) for path, _ in leaves(space))
    return list(dict.fromkeys(name for names in inside for name in names))
