"""Every spelling of an EmbodiChain train config, from its first release on, turned into the canonical one.

``load.PASSES`` has the order. Values are judged later, by the models.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from ejax import algorithms
from ejax.algorithms.record import Algorithm, find_algorithm
from ejax.config.embodichain.draft import Draft
from ejax.config.models import MAX_NAME_BYTES, unwrapped_env
from ejax.data.engine_config import OF_EMBODICHAIN_ONLY, OnlineDataEngineCfg, embodichain_field
from ejax.envs.terms.vocabulary import IGNORED
from ejax.policies.mlp import NetworkConfig
from ejax.schema.messages import did_you_mean, short_repr
from ejax.schema.registry import Kind, UnknownNameError, registered_name
from ejax.schema.tables import tables_beside
from ejax.schema.values import is_positive
from ejax.types import PHASES, Phase

TABLES = tables_beside(__file__)
# the table alone: the options themselves bring the algorithms' code
_OF_OPTIONS = tables_beside(algorithms.__file__.replace("__init__", "options"))
MOVED: dict[str, str] = (
    TABLES["moved"]
    | {f"algorithm.cfg.{old}": f"algorithm.cfg.{new}" for old, new in _OF_OPTIONS["moved"].items()}
    | {
        f"policy.{block}.{key}": f"policy.{block}.network_cfg.{key}"
        for block in ("actor", "critic")
        for key in NetworkConfig.model_fields
    }
    | {
        f"data.{option.name}": f"data.engine.{option.name}"
        for option in dataclasses.fields(OnlineDataEngineCfg)
        if option.name != "seed"
    }
)
"""Old place -> canonical place."""
LOGARITHMS: dict[str, str] = TABLES["logarithms"]  # key of a standard deviation -> that of its logarithm
WITHOUT_EFFECT: dict[str, str] = TABLES["without_effect"] | {
    f"algorithm.cfg.{name}": text for name, text in _OF_OPTIONS["without_effect"].items()
}
GYM_DEFAULTS: dict[str, Any] = TABLES["gym_defaults"]
"""``trainer`` defaults of the ``gym_config`` path, where they differ from the models'."""
COMPAT: dict[str, dict[str, dict[str, Any]]] = TABLES["compat"]
"""Mode -> policy name ("any" for all) -> key -> value: the numbers of one release, where ejax differs."""
OF_THE_CRITIC = ("policy.critic", "policy.critic_obs_normalization", "policy.obs_groups.critic")
RECORDERS = ("record_camera_data_async", "record_camera_data")
_SCIENTIFIC, _GROUPED = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+"), re.compile(r"[+-]?\d{1,3}(_\d{3})+")


def canonical_key(key: str) -> str:
    """Return the canonical place of a dotted key."""
    for old, new in MOVED.items():
        if key == old or key.startswith(f"{old}."):
            return canonical_key(new + key[len(old) :])
    return key


def canonicalize_keys(draft: Draft) -> None:
    """Move every key to its canonical place. A value given in two spellings is a problem."""
    for old, new in MOVED.items():
        if draft.has(old):
            _move(draft, old, new)
    if isinstance(draft.get("env"), str):
        draft.spelled["env.id"] = draft.key("env")
        draft.put("env", {"id": draft.get("env")})
    if draft.has("env"):
        draft.put("env", unwrapped_env(draft.get("env")))
    if draft.has("trainer.cuda"):
        cuda = draft.pop("trainer.cuda")
        if not isinstance(cuda, bool) or draft.has("trainer.device"):
            draft.problem("trainer.cuda", f"got {short_repr(cuda)}; use trainer.device instead, such as cpu or cuda:0")
        else:
            draft.put("trainer.device", "cuda" if cuda else "cpu")
    device = draft.get("trainer.device")
    if isinstance(device, str) and re.fullmatch(r"gpu(:\d+)?", device):
        draft.put("trainer.device", device.replace("gpu", "cuda"))
    _canonicalize_std(draft)
    for key in TABLES["null_is_default"]["keys"]:
        if draft.has(key) and draft.get(key) is None:
            draft.pop(key)


def ignore_options(draft: Draft) -> None:
    """Take out the keys without effect."""
    draft.ignore_all(WITHOUT_EFFECT)
    if algorithm := _algorithm(draft):
        text = f"no effect on {draft.get('algorithm.name')}"
        draft.ignore_all({f"algorithm.cfg.{key}": text for key in algorithm.ignored_options})


def ignore_engine_fields(draft: Draft) -> None:
    """Take out the fields of EmbodiChain's ``OnlineDataEngineCfg`` that ``data.engine`` lacks."""
    engine = draft.get("data.engine")
    if draft.get("data.source") == "recorded" and isinstance(engine, dict):
        for name in list(engine):  # which reject takes out
            draft.reject(f"data.engine.{name}", "source 'recorded' does not read it; leave it out")
        draft.pop("data.engine")
    for section, name in itertools.product(("data", "data.engine"), OF_EMBODICHAIN_ONLY):
        key = f"{section}.{name}"
        status, reason = embodichain_field(name, draft.get(key))
        draft.ignore(key, reason) if status == "without effect" else draft.reject(key, reason)


def resolve_compat(draft: Draft) -> None:
    """Fill in the keys that ``compat`` means, where they are not given."""
    if not draft.has("compat"):
        return
    mode = draft.pop("compat")
    if not isinstance(mode, str) or mode not in COMPAT:
        near = did_you_mean(str(mode), COMPAT)
        draft.problem("compat", f"got {short_repr(mode)}; allowed: {', '.join(COMPAT)}{near}")
        return
    algorithm, by_policy = _algorithm(draft), COMPAT[mode]
    defaults = by_policy["any"] | by_policy.get(_name("policy", draft.get("policy.name")), {})
    options = {} if algorithm is None else algorithm.compat.get(mode, {})
    defaults |= {f"algorithm.cfg.{name}": value for name, value in options.items()}
    for key, value in defaults.items():
        with suppress(TypeError):  # a value stands in a section's place, as is reported later
            if not draft.has(key):
                draft.put(key, value)
    draft.note("compat", "sets " + ", ".join(f"{key} {draft.get(key)}" for key in defaults))


def resolve_sizes(draft: Draft) -> None:
    """Fill in the steps of an update where the algorithm decides them: APG, SHAC, behaviour cloning."""
    algorithm, options = _algorithm(draft), draft.get("algorithm.cfg")
    chunk_size = draft.get("data.chunk_size") or 1
    if algorithm is None or not isinstance(draft.get("trainer"), dict) or type(chunk_size) is not int:
        return
    if isinstance(options, dict):  # other keys are reported, or taken out, later
        options = {name: value for name, value in options.items() if name in algorithm.Config.model_fields}
    try:
        chosen = algorithm.Config.model_validate({} if options is None else options)
    except ValidationError as error:
        if read_numbers(draft.get("algorithm.cfg"), (each["loc"] for each in error.errors())):
            resolve_sizes(draft)
        return  # others are reported with their own keys
    for name, count in algorithm.sizes(chosen, chunk_size).items():
        key = f"trainer.{name}"
        given = draft.get(key)
        if isinstance(given, bool) or not isinstance(given, int | float | None):
            continue  # another value is reported, even where a number would have no effect
        if given not in (None, count):
            text = f"no effect: the options of {draft.get('algorithm.name')} make it {count}"
            draft.note(key, text, "without effect")
        draft.put(key, count)


def _algorithm(draft: Draft) -> Algorithm | None:
    try:
        return find_algorithm(str(draft.get("algorithm.name")))
    except (ImportError, ValueError):
        return None


def _move(draft: Draft, old: str, new: str) -> None:
    """Move a key. A value in both places is a problem, unless EmbodiChain reads the new one."""
    value, written = draft.pop(old), draft.key(old)
    if not draft.has(new):
        try:
            draft.put(new, value)
        except TypeError as error:
            draft.problem(written, f"belongs to {new}, but {error}")
        draft.spelled[new] = written
    elif old != "trainer.rollout_steps":
        draft.problem(written, f"means the same as {draft.key(new)}, which is given too; keep one")
    elif value != draft.get(new):
        text = f"no effect: {draft.key(new)}, which is given too, is {draft.get(new)}"
        draft.note(written, text, "without effect")


def note_seed_spelling(draft: Draft) -> None:
    """Note a file of the first releases: ``rollout_steps`` and no ``enable_eval``, and it always evaluated."""
    later = ("trainer.enable_eval", "trainer.buffer_size")
    draft.seed_spelling = draft.has("trainer.rollout_steps") and not any(map(draft.has, later))


def resolve_evaluation(draft: Draft) -> None:
    """Evaluate where ``eval_freq`` is given but not ``enable_eval``."""
    if draft.has("trainer.enable_eval") or not draft.get("trainer.eval_freq"):
        return
    text = "does not evaluate: trainer.enable_eval is not set (default: false)"
    if draft.seed_spelling:
        draft.put("trainer.enable_eval", True)
        text = "evaluates, as the releases of rollout_steps did; trainer.enable_eval: false switches it off"
    draft.note("trainer.eval_freq", text)


def resolve_model_type(draft: Draft) -> None:
    """Turn ``model_type: vla`` into collection in the background, with ``buffer_size`` over all environments."""
    if not draft.has("trainer.model_type"):
        return
    model_type, trainer = draft.pop("trainer.model_type"), draft.get("trainer")
    if model_type not in ("standard", "vla"):
        draft.problem("trainer.model_type", f"got {short_repr(model_type)}; allowed: standard, vla")
    if model_type != "vla":
        return
    if not draft.has("trainer.collector.mode"):
        draft.put("trainer.collector.mode", "async")
        draft.note("trainer.model_type", "vla: trainer.collector.mode is async", "renamed")
    size, num_envs = trainer.get("buffer_size"), trainer.get("num_envs", 64)
    if type(size) is int and type(num_envs) is int and num_envs > 0:
        if size % num_envs:
            draft.problem("trainer.buffer_size", f"got {size}; with model_type vla a multiple of num_envs {num_envs}")
        trainer["buffer_size"] = steps = size // num_envs
        draft.note("trainer.buffer_size", f"{size} transitions of all envs, as model_type vla counts: {steps} steps")


def drop_unsupported(draft: Draft) -> None:
    """Turn what has no effect, or is not built, into notices."""
    for key, text in TABLES["refused"].items():
        draft.reject(key, text)
    # EmbodiChain takes the text for ReLU, and null alone for no activation
    for net, name in itertools.product(("actor", "critic"), ("activation", "last_activation")):
        key = f"policy.{net}.network_cfg.{name}"
        value = draft.get(key)
        if isinstance(value, str) and value.lower() == "none":
            if draft.has("compat"):
                text = f"got '{value}', which is ReLU in EmbodiChain, where null means no activation; use relu or null"
                draft.problem(key, text)
            else:
                draft.note(key, f"'{value}' means no activation; it is ReLU in EmbodiChain, unlike null")
    for key in OF_THE_CRITIC if _name("policy", draft.get("policy.name")) == "actor_only" else ():
        if draft.has(key) and draft.pop(key):
            draft.note(key, "no effect: actor_only has no critic", "without effect")
    # EmbodiChain has APG's options under trainer, for any algorithm; SHAC has some of them too
    if algorithm := _algorithm(draft):
        for old, new in MOVED.items():
            of_apg = old.startswith("trainer.") and new.startswith("algorithm.")
            unread = new.rpartition(".")[2] not in algorithm.Config.model_fields
            if of_apg and unread and draft.key(new).startswith("trainer."):
                draft.ignore(new, "no effect: an option of the apg algorithm")
    for phase in PHASES:
        _canonicalize_events(draft, phase)


def _canonicalize_events(draft: Draft, phase: Phase) -> None:
    section = f"trainer.events.{phase}"
    named = draft.get(section)
    if not isinstance(named, dict):
        return
    events: dict[str, Any] = {}
    videos: dict[str, dict[str, Any]] = {}
    for name, spec in named.items():
        if isinstance(spec, dict) and "is_global" in spec:  # EmbodiChain 0.3's
            key = f"{section}.{name}.is_global"
            if not isinstance(spec["is_global"], bool):
                draft.problem(key, f"got {short_repr(spec['is_global'])}; must be true or false")
            draft.note(key, IGNORED["env.events"]["is_global"], "without effect")
            spec = {key: value for key, value in spec.items() if key != "is_global"}
        (videos if isinstance(spec, dict) and spec.get("func") in RECORDERS else events)[name] = spec
    draft.put(section, events)  # not in place: a YAML alias can be both sections
    for name, spec in videos.items():
        key, params = f"{section}.{name}", spec.get("params") or {}
        known = not spec.keys() - {"func", "mode", "params", "interval_step"} and isinstance(params, dict)
        if not known or spec.get("mode", "interval") != "interval":
            draft.problem(key, f"got {short_repr(spec)}; must be {{func, mode: interval, interval_step, params}}")
            continue
        if "fps" in params:
            text = "no effect: a video plays as fast as what it shows; interval_step says how much of it"
            draft.note(f"{key}.params.fps", text, "without effect")
            params = {name: value for name, value in params.items() if name != "fps"}
        cameras = draft.get("trainer.cameras") or []
        camera = f"trainer.cameras.{len(cameras)}"
        draft.spelled |= {camera: f"{key}.params", f"{camera}.interval_step": f"{key}.interval_step"}
        made = {**params, "phase": phase, "interval_step": spec.get("interval_step", 1)}
        draft.put("trainer.cameras", [*cameras, made])
        if phase == "eval" and not draft.get("trainer.enable_eval"):
            draft.note(key, "records nothing: trainer.enable_eval is not true", "without effect")


def fill_defaults(draft: Draft) -> None:
    """Fill in defaults that depend on other keys."""
    groups, policy = draft.get("policy.obs_groups"), _name("policy", draft.get("policy.name"))
    if isinstance(groups, dict) and groups.get("critic") is None and "actor" in groups and policy != "actor_only":
        groups["critic"] = groups["actor"]
    if not isinstance(trainer := draft.get("trainer"), dict):
        return
    seed = trainer.get("seed", 1)
    if trainer.get("eval_seed") is None:
        trainer["eval_seed"] = seed + 10_000 if type(seed) is int else 0  # a bad seed is reported with its key
    if trainer.get("exp_name") is None:
        names = _name("env", draft.get("env.id")), _name("algorithm", draft.get("algorithm.name"))
        name = re.sub(r"[^\w.-]+", "_", "_".join(names))
        trainer["exp_name"] = name.encode()[:MAX_NAME_BYTES].decode(errors="ignore")
    if trainer.get("enable_eval") is True and not trainer.get("eval_freq"):
        draft.note("trainer.enable_eval", "trainer.eval_freq is 0: no evaluation during training")


def read_numbers(tree: Any, refused: Iterable[Sequence[int | str]]) -> bool:
    """Turn text like ``1e-8`` and ``65_536`` into numbers at these places, which refused it: YAML 1.2 takes the second
    for text, and PyYAML, by which a program may have read its config, the first. Return True if there was any."""
    found = False
    for location in refused:
        node = tree
        with suppress(LookupError, TypeError, ValueError):  # a place that only pydantic knows, such as a union's branch
            *above, last = (int(part) if str(part).isdecimal() else part for part in location)
            for part in above:
                node = node[part]
            for read, pattern in ((float, _SCIENTIFIC), (int, _GROUPED)):
                if isinstance(node[last], str) and pattern.fullmatch(node[last]):
                    node[last], found = read(node[last]), True
    return found


def _name(kind: Kind, name: Any) -> str:
    try:
        return registered_name(kind, str(name))
    except UnknownNameError:  # reported with its own key
        return str(name)


def _canonicalize_std(draft: Draft) -> None:
    """Take logarithms of standard deviations, which EmbodiChain 0.3 gives itself."""
    for old, new in LOGARITHMS.items():
        if not draft.has(old):
            continue
        std, is_range = draft.pop(old), old.endswith("_range")
        bounds = std if is_range else [std]
        if draft.has(new):
            draft.problem(old, f"means the same as {new}, which is given too; keep one")
        elif isinstance(bounds, list) and len(bounds) == 1 + is_range and all(map(is_positive, bounds)):
            logs = [math.log(bound) for bound in bounds]
            draft.put(new, logs if is_range else logs[0])
        else:
            wanted = "[lowest, highest], both above 0" if is_range else "a number above 0"
            draft.problem(old, f"got {short_repr(std)}; must be {wanted}")
