"""Every spelling of an EmbodiChain train config, from its first release on, turned into the canonical one.

``canonicalize_keys`` only moves keys; ``ignore_options`` and ``drop_unsupported`` turn what has no effect into notices;
``fill_defaults`` gives the defaults that depend on other keys. Values are judged later, by the models.
"""

import math
import re
from typing import Any

from pydantic import ValidationError

from ejax.algorithms.record import Algorithm
from ejax.config.embodichain.compat import COMPAT, compat_defaults
from ejax.config.embodichain.draft import Draft
from ejax.config.models import MAX_NAME_BYTES, find_algorithm
from ejax.data.engine_config import OF_EMBODICHAIN_ONLY, embodichain_field
from ejax.envs.manager.vocabulary import IGNORED
from ejax.policies.mlp import NetworkConfig
from ejax.schema.messages import short_repr
from ejax.schema.registry import Kind, UnknownNameError, did_you_mean, registered_name
from ejax.types import PHASES, Phase

APG_TRAINER_KEYS = (
    "segment_length",
    "update_horizon",
    "deterministic_actions",
    "rollout_mode",
    "gradient_accumulation_steps",
    "clip_actions_to_space",
    "action_adjoint_max_norm",
)
"""Options of APG that EmbodiChain writes under ``trainer``. SHAC has some of them."""

MOVED: dict[str, str] = {
    "runtime": "trainer",
    "trainer.rollout_steps": "trainer.buffer_size",
    "trainer.learning_env": "env",
    "trainer.env": "env",
    "env.name": "env.id",
    "trainer.normalize_observations": "policy.actor_obs_normalization",
    **{f"trainer.{key}": f"algorithm.cfg.{key}" for key in APG_TRAINER_KEYS},
    "algorithm.cfg.learning_rate": "algorithm.cfg.optimizer.learning_rate",
    **{
        f"policy.{block}.{key}": f"policy.{block}.network_cfg.{key}"
        for block in ("actor", "critic")
        for key in NetworkConfig.model_fields
    },
}
"""Old place -> canonical place."""

WITHOUT_EFFECT: dict[str, str] = {
    **{f"trainer.{key}": IGNORED[""][key] for key in ("headless", "enable_rt", "renderer", "gpu_id")},
    "trainer.torch_deterministic": "no effect: the same seed gives the same bits anyway",
    "trainer.filter_dataset_saving": IGNORED["env.extensions"]["filter_dataset_saving"],
    "trainer.buffer_type": "no effect: the algorithm decides",
    "trainer.import_modules": "not imported: name your own code as package.module:Name on the command line",
    "algorithm.cfg.device": "no effect: trainer.device decides",
    "algorithm.cfg.rollout_time_first": "no effect: rollouts are [T, N, ...]",
    **{
        f"algorithm.cfg.optimizer.kwargs.{key}": "no effect: chooses torch's kernels, not the arithmetic"
        for key in ("foreach", "fused", "capturable", "differentiable")
    },
}
"""Keys that EmbodiChain reads and that change nothing in ejax."""

OF_THE_CRITIC = ("policy.critic", "policy.critic_obs_normalization", "policy.obs_groups.critic")
"""Keys that EmbodiChain ignores under ``actor_only``."""

GYM_DEFAULTS: dict[str, Any] = {
    "exp_name": "generic_exp",
    "num_envs": 1,
    "buffer_size": 2048,
    "num_eval_envs": 4,
    "eval_freq": 10000,
    "save_freq": 50000,
}
"""``trainer`` defaults of the ``gym_config`` path, where they differ from the models'."""

NULL_IS_DEFAULT = (
    "algorithm.cfg",
    "algorithm.cfg.optimizer",
    "algorithm.cfg.lr_scheduler",
    "env.cfg",
    "policy.cfg",
    *(f"policy.{network}.network_cfg.use_layernorm" for network in ("actor", "critic")),
    *("policy.obs_groups", "policy.actor_obs_normalization", "policy.critic_obs_normalization"),
    *("trainer.num_envs", "trainer.enable_eval", "trainer.use_wandb", "trainer.distributed"),
    "trainer.events",
    *(f"trainer.events.{phase}" for phase in PHASES),
)
"""Keys whose null EmbodiChain reads as if they were not given."""

_ACTIVATIONS = ("activation", "last_activation")

RECORDERS = ("record_camera_data_async", "record_camera_data")
"""Functors of trainer events that record videos."""

SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
"""Numbers that PyYAML reads as text."""

OF_THE_PRIVATE_MODEL = ("robot_type", "gripper_open_value", "gripper_closed_value", "action_key_order")
"""Keys of ``policy.vla_config`` that only EmbodiChain's own vision-language-action model reads."""


def canonical_key(key: str) -> str:
    """The canonical place of a dotted key."""
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
    _canonicalize_device(draft)
    _canonicalize_std(draft)
    for key in NULL_IS_DEFAULT:
        if draft.has(key) and draft.get(key) is None:
            draft.pop(key)


def ignore_options(draft: Draft) -> None:
    """Take out the keys without effect, before options are looked into."""
    draft.ignore_all(WITHOUT_EFFECT)
    if algorithm := _algorithm(draft):
        text = f"no effect on {draft.get('algorithm.name')}"
        draft.ignore_all({f"algorithm.cfg.{key}": text for key in algorithm.ignored_options})


def ignore_engine_fields(draft: Draft) -> None:
    """Take out the fields of EmbodiChain's ``OnlineDataEngineCfg`` that ``data`` lacks, each with its reason."""
    for name in (*OF_EMBODICHAIN_ONLY, "lifecycle_event_capacity"):
        key = f"data.{name}"
        if not draft.has(key):
            continue
        status, reason = embodichain_field(name, draft.get(key))
        if status == "without effect":
            draft.ignore(key, reason)
        else:
            draft.problem(
                key, reason or "a run takes no events out of the log; OnlineDataEngineCfg has it, leave it out"
            )
            draft.pop(key)


def resolve_compat(draft: Draft) -> None:
    """``compat`` becomes the keys that it stands for, where they are not given."""
    if not draft.has("compat"):
        return
    mode = draft.pop("compat")
    if not isinstance(mode, str) or mode not in COMPAT:
        allowed = ", ".join(COMPAT)
        draft.problem("compat", f"got {short_repr(mode)}; allowed: {allowed}{did_you_mean(str(mode), COMPAT)}")
        return
    defaults = compat_defaults(mode, _algorithm(draft), _name("policy", draft.get("policy.name")))
    for key, value in defaults.items():
        draft.put_default(key, value)
    draft.note("compat", "sets " + ", ".join(f"{key} {draft.get(key)}" for key in defaults))


def resolve_sizes(draft: Draft) -> None:
    """The steps of an update, where the algorithm decides them itself: APG's ``update_horizon``, SHAC's
    ``segment_length``, the frames of one update of behaviour cloning."""
    algorithm, options = _algorithm(draft), draft.get("algorithm.cfg")
    if algorithm is None or not isinstance(draft.get("trainer"), dict):
        return
    chunk_size = draft.get("data.chunk_size") or 1
    if isinstance(options, dict):  # other keys are reported, or taken out, later
        options = {name: value for name, value in options.items() if name in algorithm.Config.model_fields}
    try:
        chosen = algorithm.Config.model_validate(read_numbers({} if options is None else options))
    except ValidationError:
        return  # reported with its own keys
    if type(chunk_size) is not int:
        return
    for name, count in algorithm.sizes(chosen, chunk_size).items():
        key = f"trainer.{name}"
        given = draft.get(key)
        if given is not None and (isinstance(given, bool) or not isinstance(given, int | float)):
            continue  # what is no number is reported, even where a number would have no effect
        if draft.get(key) not in (None, count):
            text = f"no effect: the options of {draft.get('algorithm.name')} make it {count}"
            draft.note(key, text, "without effect")
        draft.put(key, count)


def _algorithm(draft: Draft) -> Algorithm | None:
    """The algorithm's record. None: there is no such name, which is reported with its own key."""
    try:
        return find_algorithm(str(draft.get("algorithm.name")))
    except (ImportError, ValueError):
        return None


def _move(draft: Draft, old: str, new: str) -> None:
    """Move a key. A value given in both places is a problem, but where EmbodiChain reads the new one."""
    value, written = draft.pop(old), draft.key(old)
    if draft.has(new):
        if old == "trainer.rollout_steps":
            if value != draft.get(new):
                text = f"no effect: {draft.key(new)}, which is given too, is {draft.get(new)}"
                draft.note(written, text, "without effect")
            return
        draft.problem(written, f"means the same as {draft.key(new)}, which is given too; keep one")
        return
    try:
        draft.put(new, value)
    except TypeError as error:
        draft.problem(written, f"belongs to {new}, but {error}")
    draft.spelled[new] = written


def recognize_seed_spelling(draft: Draft) -> None:
    """Recognize the first releases, which wrote ``rollout_steps``, had no ``enable_eval``, and always evaluated."""
    later = {"enable_eval", "buffer_size"}
    draft.seed_spelling = draft.has("trainer.rollout_steps") and not later & draft.get("trainer").keys()


def resolve_evaluation(draft: Draft) -> None:
    """``enable_eval`` where it is not given but ``eval_freq`` is."""
    if draft.has("trainer.enable_eval") or not draft.get("trainer.eval_freq"):
        return
    if draft.seed_spelling:
        draft.put("trainer.enable_eval", True)
        text = "evaluates, as the releases of rollout_steps did; trainer.enable_eval: false switches it off"
    else:
        text = "does not evaluate: trainer.enable_eval is not set (default: false)"
    draft.note("trainer.eval_freq", text)


def resolve_model_type(draft: Draft) -> None:
    """``model_type: vla`` collects in the background, and counts ``buffer_size`` over all environments."""
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
        trainer["buffer_size"] = size // num_envs
        draft.note(
            "trainer.buffer_size", f"{size} transitions of all envs, as model_type vla counts: {size // num_envs} steps"
        )


def drop_unsupported(draft: Draft) -> None:
    """Turn what has no effect, or is not built, into notices."""
    for name in OF_THE_PRIVATE_MODEL:
        if draft.has(f"policy.vla_config.{name}"):
            draft.pop(f"policy.vla_config.{name}")
            draft.problem(
                f"policy.vla_config.{name}", "belongs to EmbodiChain's model, which is not public; leave it out"
            )
    if draft.has("policy.vla"):
        draft.pop("policy.vla")
        draft.problem("policy.vla", "a key of an unreleased EmbodiChain; give policy.vla_config")
    _judge_none(draft)
    algorithm = _algorithm(draft)
    for key in OF_THE_CRITIC if _name("policy", draft.get("policy.name")) == "actor_only" else ():
        if draft.has(key) and draft.pop(key):
            draft.note(key, "no effect: actor_only has no critic", "without effect")
    for key in APG_TRAINER_KEYS:
        if algorithm is None or key in algorithm.Config.model_fields:
            continue
        if draft.key(f"algorithm.cfg.{key}").startswith("trainer."):
            draft.ignore(f"algorithm.cfg.{key}", "no effect: an option of the apg algorithm")
    _canonicalize_events(draft)


def _judge_none(draft: Draft) -> None:
    """``none`` as text is no activation here, and like every name that it does not know ReLU in EmbodiChain."""
    for key in (f"policy.{net}.network_cfg.{name}" for net in ("actor", "critic") for name in _ACTIVATIONS):
        value = draft.get(key)
        if not isinstance(value, str) or value.lower() != "none":
            continue
        if draft.has("compat"):
            text = f"got '{value}', which is ReLU in EmbodiChain, where null is no activation; give relu or null"
            draft.problem(key, text)
        else:
            draft.note(key, f"'{value}' is no activation; it is ReLU in EmbodiChain, unlike null")


def _canonicalize_events(draft: Draft) -> None:
    """Recorders among EmbodiChain's trainer events become ``trainer.cameras``; the other events stay."""
    for phase in PHASES:
        named = draft.get(f"trainer.events.{phase}")
        if not isinstance(named, dict):
            continue
        named = {name: _drop_is_global(draft, phase, name, spec) for name, spec in named.items()}
        videos = {
            name: spec for name, spec in named.items() if isinstance(spec, dict) and spec.get("func") in RECORDERS
        }
        # not in place: a YAML alias can be both sections
        draft.put(f"trainer.events.{phase}", {name: spec for name, spec in named.items() if name not in videos})
        for name, spec in videos.items():
            _canonicalize_video(draft, phase, f"trainer.events.{phase}.{name}", spec)


def _drop_is_global(draft: Draft, phase: Phase, name: str, spec: Any) -> Any:
    """The event without EmbodiChain 0.3's ``is_global``."""
    if not isinstance(spec, dict) or "is_global" not in spec:
        return spec
    key = f"trainer.events.{phase}.{name}.is_global"
    if not isinstance(spec["is_global"], bool):
        draft.problem(key, f"got {short_repr(spec['is_global'])}; must be true or false")
    draft.note(key, IGNORED["env.events"]["is_global"], "without effect")
    return {key: value for key, value in spec.items() if key != "is_global"}


def _canonicalize_video(draft: Draft, phase: Phase, key: str, spec: dict[str, Any]) -> None:
    params = spec.get("params") or {}
    if spec.keys() - {"func", "mode", "params", "interval_step"} or not isinstance(params, dict):
        draft.problem(key, f"got {short_repr(spec)}; must be {{func, mode: interval, interval_step, params}}")
    elif spec.get("mode", "interval") != "interval":
        draft.problem(f"{key}.mode", f"got {short_repr(spec['mode'])}; a trainer event has mode interval")
    else:
        if "fps" in params:
            text = "no effect: a video plays as fast as what it shows; interval_step says how much of it"
            draft.note(f"{key}.params.fps", text, "without effect")
            params = {name: value for name, value in params.items() if name != "fps"}
        cameras = draft.get("trainer.cameras") or []
        draft.spelled[f"trainer.cameras.{len(cameras)}"] = f"{key}.params"
        draft.spelled[f"trainer.cameras.{len(cameras)}.interval_step"] = f"{key}.interval_step"
        camera = {**params, "phase": phase, "interval_step": spec.get("interval_step", 1)}
        draft.put("trainer.cameras", [*cameras, camera])
        if phase == "eval" and not draft.get("trainer.enable_eval"):
            draft.note(key, "records nothing: trainer.enable_eval is not true", "without effect")


def fill_defaults(draft: Draft) -> None:
    """Defaults that depend on other keys."""
    groups, policy = draft.get("policy.obs_groups"), _name("policy", draft.get("policy.name"))
    if isinstance(groups, dict) and groups.get("critic") is None and "actor" in groups and policy != "actor_only":
        groups["critic"] = groups["actor"]
    trainer = draft.get("trainer")
    if not isinstance(trainer, dict):
        return
    seed = trainer.get("seed", 1)
    if trainer.get("eval_seed") is None:
        trainer["eval_seed"] = seed + 10_000 if type(seed) is int else 0  # a bad seed is reported by itself
    if trainer.get("exp_name") is None:
        names = _name("env", draft.get("env.id")), _name("algorithm", draft.get("algorithm.name"))
        name = re.sub(r"[^\w.-]+", "_", "_".join(names))
        trainer["exp_name"] = name.encode()[:MAX_NAME_BYTES].decode(errors="ignore")
    if trainer.get("enable_eval") is True and not trainer.get("eval_freq"):
        draft.note("trainer.enable_eval", "trainer.eval_freq is 0: no evaluation during training")


def read_numbers(node: Any) -> Any:
    """Strings like ``1e-8`` as numbers: PyYAML reads them as text, for want of a dot."""
    if isinstance(node, dict):
        return {name: read_numbers(value) for name, value in node.items()}
    if isinstance(node, list):
        return [read_numbers(value) for value in node]
    return float(node) if isinstance(node, str) and SCIENTIFIC.fullmatch(node) else node


def _name(kind: Kind, name: Any) -> str:
    try:
        return registered_name(kind, str(name))
    except UnknownNameError:  # reported with its own key
        return str(name)


def _canonicalize_device(draft: Draft) -> None:
    if draft.has("trainer.cuda"):
        cuda = draft.pop("trainer.cuda")
        if not isinstance(cuda, bool) or draft.has("trainer.device"):
            draft.problem("trainer.cuda", f"got {short_repr(cuda)}; give trainer.device instead, such as cpu or cuda:0")
        else:
            draft.put("trainer.device", "cuda" if cuda else "cpu")
    device = draft.get("trainer.device")
    if isinstance(device, str) and re.fullmatch(r"gpu(:\d+)?", device):
        draft.put("trainer.device", device.replace("gpu", "cuda"))


def _canonicalize_std(draft: Draft) -> None:
    """EmbodiChain 0.3 gives standard deviations where the releases before gave their logarithms."""
    for old, new in (
        ("policy.initial_action_std", "policy.initial_log_std"),
        ("policy.action_std_range", "policy.log_std_range"),
    ):
        if not draft.has(old):
            continue
        std = read_numbers(draft.pop(old))
        if draft.has(new):
            draft.problem(old, f"means the same as {new}, which is given too; keep one")
        elif old == "policy.initial_action_std" and _is_positive(std):
            draft.put(new, math.log(std))
        elif (
            old == "policy.action_std_range" and isinstance(std, list) and len(std) == 2 and all(map(_is_positive, std))
        ):
            draft.put(new, [math.log(bound) for bound in std])
        else:
            wanted = "a number above 0" if old == "policy.initial_action_std" else "[lowest, highest], both above 0"
            draft.problem(old, f"got {short_repr(std)}; must be {wanted}")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
