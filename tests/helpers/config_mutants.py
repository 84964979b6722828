"""Broken train configs, gym configs and overrides: each mutant is a function of a seed and its number alone.

Structure is broken (deleted, replaced, retyped, moved, renamed, grown), values become what no float32 or int32 holds,
YAML and JSON are spliced in that no dumper would write, bytes are flipped and cut, overrides are put beside.
"""

import copy
import itertools
import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ejax.config.schema import allowed_keys

ROOT = Path(__file__).parents[2]
GYM_FILE = "gym_config.json"


@dataclass(frozen=True)
class Mutant:
    """The files of a train config, and what the command line adds."""

    label: str
    files: Mapping[str, bytes]
    """By name; the first is the train config."""
    overrides: tuple[str, ...] = ()


@dataclass
class Base:
    """A config to be broken."""

    name: str
    train: dict[str, Any]
    gym: dict[str, Any] | None = None


@dataclass
class Draft:
    """A mutant under way: trees, and YAML or JSON that no dumper would write, by the placeholder it replaces."""

    base: Base
    overrides: list[str] = field(default_factory=list)
    raw: dict[str, str] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)


def mutant(found: list[Base], seed: int, number: int) -> Mutant:
    """Mutant ``number`` of a seed: one to three changes to one of the bases."""
    rng = random.Random(f"{seed}/{number}")
    draft = Draft(copy.deepcopy(rng.choice(found)))
    for _ in range(rng.choice((1, 1, 1, 1, 1, 1, 2, 3))):
        rng.choices(*zip(*_CHANGES, strict=True))[0](draft, rng, found)
    suffix = rng.choice(("json", "yaml", "yaml"))
    files = {f"train.{suffix}": _dump(draft.base.train, suffix, draft.raw)}
    if draft.base.gym is not None:
        files[GYM_FILE] = _dump(draft.base.gym, "json", draft.raw)
    if rng.random() < 0.2:
        name = rng.choice(list(files))
        files[name] = _damage(files[name], draft, rng)
    return Mutant(f"{number} {draft.base.name}: {'; '.join(draft.told)}", files, tuple(draft.overrides))


def bases() -> list[Base]:
    """List every shipped config, gym configs in both forms, and the spellings of EmbodiChain's releases."""
    found = []
    for path in sorted((ROOT / "configs").rglob("*.*")):
        if path.name == GYM_FILE or path.suffix not in (".json", ".yaml"):
            continue
        train = _read(path)
        gym = _read(path.with_name(GYM_FILE)) if "gym_config" in train["trainer"] else None
        if gym is not None:
            train["trainer"]["gym_config"] = GYM_FILE
        found.append(Base(path.relative_to(ROOT / "configs").as_posix(), train, gym))
    point_mass = _read(ROOT / "configs/point_mass/ppo.yaml")
    for path in sorted((ROOT / "tests/gym_configs").glob("*.json")):
        train = copy.deepcopy(point_mass)
        train.pop("env", None)
        train["trainer"].pop("learning_env", None)
        train["trainer"]["gym_config"] = GYM_FILE
        found.append(Base(f"gym_configs/{path.name}", train, _read(path)))
    return [*found, *(Base(f"release {name}", yaml.safe_load(text)) for name, text in _RELEASES.items())]


def _read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())  # JSON is YAML, as far as these files go


_RELEASES = {
    "seed": """
runtime: {rollout_steps: 64, env: {id: PointMassRL, cfg: {num_envs: 8}}, eval_freq: 1000, cuda: false}
policy:
  name: actor_critic
  obs_groups: {actor: [], critic: []}
  actor: {type: mlp, hidden_sizes: [16, 16], activation: relu}
  critic: {type: mlp, hidden_sizes: [16, 16], activation: relu}
algorithm: {name: PPO, cfg: {learning_rate: 1e-4, batch_size: 64, max_grad_norm: .inf}}
""",
    "0.2": """
compat: embodichain-0.2
trainer:
  learning_env: {name: PlanarReachRL, cfg: {max_episode_steps: 32, link_length: [1.0, 0.8]}}
  num_envs: 16
  buffer_size: 32
  model_type: standard
policy:
  name: actor_critic
  actor: {type: mlp, network_cfg: {hidden_sizes: [16], activation: elu, orthogonal_init: 1.0}}
  critic: {type: mlp, network_cfg: {hidden_sizes: [16], activation: elu}}
algorithm:
  name: ppo
  cfg: {schedule: adaptive, desired_kl: 0.01, minimum_learning_rate: 1.0e-5, maximum_learning_rate: 1.0e-2}
""",
    "0.3": """
compat: embodichain-0.3
trainer:
  learning_env: {name: CartPoleRL, cfg: {max_episode_steps: 100}}
  num_envs: 8
  buffer_size: 32
  total_timesteps: 100000
  events: {train: {}, eval: {}}
policy:
  name: actor_critic
  initial_action_std: 0.5
  action_std_range: [0.01, 2.0]
  actor: {type: mlp, network_cfg: {hidden_sizes: [16], activation: elu}}
  critic: {type: mlp, network_cfg: {hidden_sizes: [16], activation: elu}}
algorithm:
  name: grpo
  cfg:
    optimizer: {name: adamw, learning_rate: 3.0e-4, kwargs: {betas: [0.9, 0.99], weight_decay: 0.01}}
    lr_scheduler: {name: linear, kwargs: {end_factor: 0.1, total_iters: 100}}
    group_size: 4
    batch_size: 64
""",
}


def _each(words: str) -> list[str]:
    """Split a line of words: a list of short texts takes a line each."""
    return words.split()


def _numbers() -> tuple[Any, ...]:
    large = (2**31 - 1, 2**31, 2**32, 2**33, 2**53, 2**63 - 1, 2**63, 10**30, 10**300)
    floats = (math.nan, math.inf, -math.inf, 1e308, 1e39, 3.4e38, 1e-320, 1e30, 0.1, -0.0, 1.5, 4e18, 1e10)
    return (0, 1, 2, -1, 3, 1000, *large, *(-each for each in large), *floats)


_TEXTS = (
    *_each(
        "none null 1 1e5 1e999 -1e-8 .inf nan NaN Infinity true 1_000 0x1F ../.. / /dev/null /dev/zero ~ {} ${HOME}"
    ),
    *_each("%s%n a.b.c os:system playgound:CartpoleBalance gymnax: : torch:a:b PointMasRL ppoo Actor_Critic cpu:0"),
    *_each("cuda:99999999999999999999 embodichain-0.3 relu async eval/metrics/x linear (a+)+$ [ é مرحبا a\u0301"),
    *("", " ", "🤖" * 50, "\u202eabc", "\ud800", "a\x00b", "a\nb", "a\tb", "\ufeff", "\x1b[31m", "\u2028"),
    *("x" * 300, "a/" * 200, "a" * 5000),
)
_HUGE = (10**5, 10**6, 10**7)
"""Lengths of texts and lists; the larger ones rarely."""
_RAW = (
    *_each("2024-01-01 2024-13-45 2024-02-30 99999-01-01 12:30:45 1:99 0o17 0b1 = << on yes ~ .NAN -.INF 1__0 +1"),
    *_each("*nowhere NaN Infinity -Infinity 1e400 [NaN] {} [] [[]] [{}] ' \" [ { ] } @ ` % | >"),
    *(f"!!{tag}" for tag in ("int abc", "bool abc", "map x", "seq x", "float x", "null x", "timestamp x", "binary =")),
    *(f"!!{tag}" for tag in ("binary aGk=", "set {a, b}", "omap [a: 1]", "pairs [a: 1]", "str [1]", "int [1]")),
    *("!!timestamp 2024-13-45", "!!python/object/apply:os.system [true]", "!!python/name:os.system ''"),
    *("!custom x", "! x", "!<tag:x> y", "2024-01-01 10:00:00", "? ", "- ", "{a: {}}", "[1, [2, [3]]]", "&a 1"),
    *("&a [*a]", "&a {b: *a}", "{<<: 1}", "{<<: [1]}", "{<<: {a: 1}}", "&a {<<: *a}", "{? [1] : 2}"),
    *("{1: 2}", "{null: 1}", "{true: 1}", "{1.5: 1}", "{=: 1}"),
    *('"\\ud800"', '"\\0"', '"\\UFFFFFFFF"', '"\\x"'),
    *("9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000, "1." + "9" * 5000, "1:" * 3000 + "1", "1e" + "9" * 400),
    *("[" * 200 + "]" * 200, "[" * 5000 + "]" * 5000, "{a: " * 3000 + "1" + "}" * 3000, "[" * 100_000),
    "[" + ", ".join(["1"] * 3000) + "]",
    "{" + ", ".join(f"k{i}: {i}" for i in range(3000)) + "}",
    *(
        f"[&a {first}, "
        + ", ".join(f"&{b} {step.format(','.join([f'*{a}'] * 9))}" for a, b in itertools.pairwise("abcdefghi"))
        + "]"
        for first, step in (("[x,x,x,x,x,x,x,x,x]", "[{}]"), ("{k: 1}", "{{<<: [{}]}}"))
    ),
)

_SECTIONS = (
    *("trainer", "trainer.collector", "policy", "policy.actor.network_cfg", "policy.obs_groups", "env", "data"),
    *("algorithm.cfg", "algorithm.cfg", "algorithm.cfg.optimizer", "algorithm.cfg.lr_scheduler"),
)
_WORDS = (
    *_each(
        "adaptive fixed free async host device auto mse nll vtrace exact max min linear cosine step exponential adam"
    ),
    *_each("sgd tanh gelu none PointMassRL CartPoleRL actor_only vision ppo grpo apg shac bc recorded complete x"),
    "eval/success_rate",
)

Path_ = tuple[str | int, ...]


def _paths(node: Any, above: Path_ = ()) -> list[Path_]:
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path for name, value in pairs for path in ((*above, name), *_paths(value, (*above, name)))]


def _pick(draft: Draft, rng: random.Random) -> tuple[Any, Path_]:
    """Pick a tree of the draft and a place in it; the gym config half of the time."""
    tree: Any = draft.base.gym if draft.base.gym is not None and rng.random() < 0.5 else draft.base.train
    places = _paths(tree)
    return (tree, rng.choice(places)) if places else (tree, ())


def _holder(tree: Any, path: Path_) -> Any:
    for name in path[:-1]:
        tree = tree[name]
    return tree


def _set(draft: Draft, tree: Any, path: Path_, value: Any, what: str) -> None:
    if path:
        _holder(tree, path)[path[-1]] = value
        draft.told.append(f"{'.'.join(map(str, path))} {what}")


def _value(rng: random.Random) -> Any:
    odd = (None, True, False, [], {}, [1], {"a": 1})
    return rng.choice((rng.choice(_numbers()), rng.choice(_TEXTS), rng.choice(odd)))


def _delete(draft: Draft, rng: random.Random, found: list[Base]) -> None:
    tree, path = _pick(draft, rng)
    if path:
        del _holder(tree, path)[path[-1]]
        draft.told.append(f"{'.'.join(map(str, path))} deleted")


def _replace(draft: Draft, rng: random.Random, found: list[Base]) -> None:
    value = _value(rng)
    _set(draft, *_pick(draft, rng), value, f"= {value!r:.40}")


def _retype(draft: Draft, rng: random.Random, found: list[Base]) -> None:
    tree, path = _pick(draft, rng)
    old = _holder(tree, path)[path[-1]] if path else None
    changes: list[Callable[[Any], Any]] = [str, lambda x: [x], lambda x: {"a": x}, lambda x: [x, x], bool, repr]
    changes += [lambda x: float(x) if isinstance(x, int) else x, lambda x: list(x) if isinstance(x, dict) else x]
    changes += [lambda x: -x if isinstance(x, int | float) else None, lambda x: x[:-1] if isinstance(x, list) else 0]
    _set(draft, tree, path, rng.choice(changes)(old), "retyped")


def _move(draft: Draft, rng: random.Random, found: list[Base]) -> None:
    """Move or copy a value to where it does not belong; also from another config."""
    tree, path = _pick(draft, rng)
    source = draft.base.train if rng.random() < 0.5 else rng.choice(found).train
    taken = rng.choice(_paths(source))
    value = copy.deepcopy(_holder(source, taken)[taken[-1]])
    name = rng.choice((path[-1] if path else "x", taken[-1]))
    holder = _holder(tree, path) if path else tree
    if isinstance(holder, dict):
        holder[str(name)] = value
    else:
        holder.append(value)
    draft.told.append(f"{'.'.join(map(str, taken))} copied next to {'.'.join(map(str, path))}")


def _rename(draft: Draft, rng: random.Random, found: list[Base]) -> None:
    tree, path = _pick(draft, rng)
    holder = _holder(tree, path) if path else tree
    if path and isinstance(holder, dict):
        old = str(path[-1])
        name = rng.choice((old.upper(), old + "s", old[:-1], old.replace("_", "-"), rng.choice(_TEXTS), f"{old}.x"))
        holder[name] = holder.pop(path[-1])
        draft.told.append(f"{'.'.join(map(str, path))} renamed {name!r:.40}")


def _grow(draft: Draft, rng: random.Random, found: list[Base]) -> None:
    size = rng.choices(_HUGE, (90, 9, 1))[0]
    value = rng.choice(("x" * size, [0] * (size // 10), {f"k{i}": i for i in range(size // 100)}, "é" * (size // 2)))
    _set(draft, *_pick(draft, rng), value, f"of {size}")


def _tweak(draft: Draft, rng: random.Random, found: list[Base]) -> None:
    """Replace a value by another of its kind."""
    tree, path = _pick(draft, rng)
    old = _holder(tree, path)[path[-1]] if path else None
    _set(draft, tree, path, new := _like(old, rng), f"= {new!r:.40}")


def _like(old: Any, rng: random.Random) -> Any:
    numbers = [each for each in _numbers() if type(each) is type(old)]
    if isinstance(old, bool):
        return not old
    if isinstance(old, int | float):
        return rng.choice([*numbers, old * 2, old + 1, old, old, type(old)(old / 2)])
    if isinstance(old, list) and old:
        return rng.choice((old * 2, old[:1], [*old, old[0]], [_like(old[0], rng)] * len(old)))
    return rng.choice((*_WORDS, old, old))


def _add(draft: Draft, rng: random.Random, found: list[Base]) -> None:
    """Add a key that exists, with a value that often fits."""
    section = rng.choice(_SECTIONS)
    algorithm = draft.base.train.get("algorithm") or {}
    name = str(algorithm.get("name") if isinstance(algorithm, dict) else "").lower()
    holder: Any = draft.base.train
    for part in section.split("."):
        holder = holder.setdefault(part, {}) if isinstance(holder, dict) else None
    keys = [key for each in allowed_keys(section, name) for key in each]
    if isinstance(holder, dict) and keys:
        key = rng.choice(keys)
        likely = rng.choice((0, 1, 2, 8, 0.5, 1e-3, True, False, None, [], ["robot"]))
        value = rng.choice((likely, _value(rng), rng.choice(_WORDS)))
        holder[key] = value
        draft.told.append(f"{section}.{key} added = {value!r:.40}")


def _splice(draft: Draft, rng: random.Random, found: list[Base]) -> None:
    """Text of YAML or JSON that no dumper would write."""
    snippet = rng.choice(_RAW)
    mark = f"SPLICE{len(draft.raw)}X"
    draft.raw[mark] = snippet
    _set(draft, *_pick(draft, rng), mark, f"<- {snippet:.40}")


def _override(draft: Draft, rng: random.Random, found: list[Base]) -> None:
    path = rng.choice(_paths(rng.choice((draft.base.train, rng.choice(found).train))))
    key = ".".join(map(str, path[: rng.randint(1, len(path))]))
    value = rng.choice((rng.choice(_RAW), rng.choice(_TEXTS), str(rng.choice(_numbers())), "x" * 10**5))
    value = value.replace("\x00", "")
    odd = (value, f"{key}={value}={value}", f"={value}", f"{key}.={value}", f".{key}={value}", "a." * 3000 + "b=1", "")
    text = f"{key}={value}" if rng.random() < 0.85 else rng.choice(odd)
    draft.overrides.append(text)
    draft.told.append(f"override {text:.60}")


_CHANGES = [
    *((_delete, 10), (_replace, 30), (_retype, 12), (_move, 12), (_rename, 6), (_tweak, 30), (_add, 20)),
    *((_grow, 3), (_splice, 22), (_override, 12)),
]


def _dump(tree: Any, suffix: str, raw: Mapping[str, str]) -> bytes:
    if suffix == "json":
        text = json.dumps(tree, indent=1, skipkeys=True)
        for mark, snippet in raw.items():
            text = text.replace(f'"{mark}"', snippet)
    else:
        text = yaml.safe_dump(tree, allow_unicode=True, width=10**9)
        for mark, snippet in raw.items():
            text = text.replace(mark, snippet)
    return text.encode("utf-8", "surrogatepass")


def _damage(data: bytes, draft: Draft, rng: random.Random) -> bytes:
    """Bytes flipped, cut, repeated or put in."""
    place, length = rng.randrange(max(1, len(data))), rng.choice((1, 1, 2, 8, 64))
    lines = data.splitlines(keepends=True) or [b""]
    line = rng.randrange(len(lines))
    kinds = {
        "flipped": data[:place]
        + bytes(b ^ (1 << rng.randrange(8)) for b in data[place : place + 1])
        + data[place + 1 :],
        "cut": data[:place],
        "without a piece": data[:place] + data[place + length :],
        "repeated": data[:place] + data[place : place + length] * 2 + data[place + length :],
        "with noise": data[:place] + rng.randbytes(length) + data[place:],
        "with a line twice": b"".join([*lines[: line + 1], *lines[line:]]),
        "with tabs": data.replace(b"  ", b"\t"),
    }
    kind = rng.choice(list(kinds))
    draft.told.append(f"bytes {kind} at {place}")
    return kinds[kind]
