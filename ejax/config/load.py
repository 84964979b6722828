"""From a file or a dictionary, and overrides, to a checked ``RunConfig``; all problems in one error."""

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ejax.config.embodichain import spellings
from ejax.config.embodichain.draft import OVERRIDE, Draft
from ejax.config.environment import action_problems, class_problems, env_problems, event_problems
from ejax.config.explain import explain_errors, keys_of
from ejax.config.files import UnreadableError, is_file, read_file, read_yaml
from ejax.config.models import EnvConfig, EventsConfig, PolicyConfig, TrainerConfig
from ejax.config.run_config import RunConfig
from ejax.runtime.device import device_problem
from ejax.schema.messages import MAX_VALUE_CHARS, short_repr, shorten
from ejax.schema.plain_files import expanded, read_bytes
from ejax.schema.problems import ConfigError, KeyNote, KeyReport, Problem, join_by_key, with_sections
from ejax.schema.trust import trust_strings, trust_words
from ejax.schema.values import MAX_DEPTH, MAX_VALUES, number_problems, plain


def load_config(path: str | Path, overrides: Sequence[str] = (), device: str | None = None) -> RunConfig:
    """Load the run that a train config file describes.

    Args:
        path: JSON or YAML, in any spelling of EmbodiChain's releases; or a shipped config's name, ``push_cube/ppo``.
        overrides: ``section.key=value``, the value in YAML; they win over the file in either spelling. Code that
            they name as ``package.module:Name`` may run; of the file, only what ``ejax.schema.trust`` lets through.
        device: wins over ``trainer.device``.

    Raises ConfigError: everything that is wrong with it.
    """
    from ejax.config.shipped import FOLDER, find_config  # with a command line, which configs in memory do not need

    found = find_config(path)
    config = parse_untrusted(read_file(found), overrides, device, found.parent, str(found))
    if found == Path(path) or FOLDER not in found.parents:
        return config
    read = KeyNote("config", "used", f"{path} is not a file here; read ejax's own, {found}")
    return config.model_copy(update={"notices": (read, *config.notices)})


def parse_config(
    data: Mapping[str, Any], overrides: Sequence[str] = (), device: str | None = None, folder: str | Path | None = None
) -> RunConfig:
    """Parse a program's own config, in memory: code that it names may run (``ejax.schema.trust``). ejax never calls it.

    Args:
        data: sections ``trainer``, ``policy``, ``algorithm``, …, in any spelling.
        overrides, device: as in ``load_config``.
        folder: where a relative ``trainer.gym_config`` is looked up before the working directory.

    Raises ConfigError: as ``load_config``.
    """
    if not isinstance(data, Mapping):
        text = f"got {short_repr(data)}; must be a mapping with trainer, policy and algorithm"
        raise ConfigError([Problem("", text)])
    tree = plain(data)  # refuses one that holds itself
    trust_strings(tree)
    return parse_untrusted(tree, overrides, device, folder)


def parse_untrusted(
    data: dict[str, Any],
    overrides: Sequence[str] = (),
    device: str | None = None,
    folder: str | Path | None = None,
    source: str = "config",
) -> RunConfig:
    """``parse_config`` for a file's content: its code runs only where ``ejax.schema.trust`` lets it."""
    draft = Draft(data, None if folder is None else Path(folder), overrides, device)
    config = read_draft(draft)
    report = draft.report
    if not any(report.refuses(draft.key(key)) for key in ("trainer", "trainer.device")):
        device = draft.get("trainer.device") or "cpu"
        for key, text in device_problems(device):
            draft.problem(key, text)
    if config is None or report.problems:
        raise ConfigError(report.problems, source, report.notes)
    notices = tuple(note._replace(key=shorten(note.key)) for note in report.notices)
    return config.model_copy(update={"notices": notices})


def read_draft(draft: Draft) -> RunConfig | None:
    """Bring a draft to the canonical form; None: it has problems. Missing devices are not a problem yet."""
    for edit in PASSES:
        edit(draft)
    config, problems = _validate(draft.tree)
    if spellings.read_numbers(draft.tree, [problem.key.split(".") for problem in problems]):
        config, problems = _validate(draft.tree)
    none = tuple(f"{section}." for section in draft.no_sections)
    for key, text in join_by_key((problem for problem in problems if not problem.key.startswith(none)), "; "):
        draft.problem(key, text)
    return None if draft.report.problems else config


def parse_policy(block: Mapping[str, Any]) -> PolicyConfig:
    """Parse a section ``policy`` alone, in any spelling. Code in it has to be trusted; ConfigError if invalid."""
    draft = Draft({"policy": plain(block)})
    for edit in (spellings.canonicalize_keys, spellings.drop_unsupported, spellings.fill_defaults):
        edit(draft)
    section = draft.get("policy")
    try:
        config = PolicyConfig.model_validate_json(json.dumps(section), strict=True)
    except ValidationError as error:
        problems = [Problem(draft.key(f"policy.{key}"), text) for key, text in explain_errors(error, section)]
        raise ConfigError([*draft.report.problems, *problems]) from error
    if draft.report.problems:
        raise ConfigError(draft.report.problems)
    return config


def apply_overrides(draft: Draft) -> None:
    """Put the values of the command line in the place of the file's."""
    for text in draft.overrides:
        written, equals, value = text.partition("=")
        source = shorten(f"override {text!r}", MAX_VALUE_CHARS)
        written = written.strip()
        names = written.split(".")
        if not equals or not all(names) or len(names) > MAX_DEPTH:
            draft.problem(source, "must read section.key=value, such as trainer.seed=3")
            continue
        trust_words([text])  # who types the name of code knows it
        key = spellings.canonical_key(written)
        if key == "trainer.gym_config" and draft.has("env"):  # one environment replaces the other
            draft.pop("env")
            draft.spelled = {known: text for known, text in draft.spelled.items() if "env" not in with_sections(known)}
        if key == "env" and draft.has("trainer.gym_config"):
            draft.pop("trainer.gym_config")
        if key == "trainer.iterations" and draft.has("trainer.total_timesteps"):  # which would decide
            draft.pop("trainer.total_timesteps")
        try:
            draft.put(key, read_yaml(value))
        except (UnreadableError, TypeError) as error:
            draft.problem(source, str(error))
        draft.spelled[key] = written + OVERRIDE
    if draft.device is not None and isinstance(draft.get("trainer"), dict):
        draft.put("trainer.device", draft.device)


def require_sections(draft: Draft) -> None:
    """Refuse a number or a list where a section belongs, and continue with an empty one."""
    for key in ("trainer", "policy", "algorithm"):
        if draft.has(key) and not isinstance(draft.get(key), dict):
            keys = ", ".join(keys_of(key, "")[0])
            draft.problem(key, f"got {short_repr(draft.get(key))}; must be a section with the keys {keys}")
            draft.put(key, {})
            draft.no_sections.append(key)


def read_trainer_numbers(draft: Draft) -> None:
    """Turn text into numbers where ``trainer`` wants them, for all that decides by them."""
    try:
        TrainerConfig.model_validate_json(json.dumps(draft.get("trainer")), strict=True)
    except ValidationError as error:
        spellings.read_numbers(draft.get("trainer"), [each["loc"] for each in error.errors()])


def _validate(tree: dict[str, Any]) -> tuple[RunConfig | None, list[Problem]]:
    try:
        plain(tree, MAX_VALUES)
    except ConfigError as error:  # what is too large or odd would only be cut in other messages
        return None, list(error.problems)
    config, problems = None, number_problems(tree)
    reported = {key for problem in problems for key in with_sections(problem.key)}
    try:
        config = RunConfig.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        problems += [problem for problem in explain_errors(error, tree) if problem.key not in reported]
    # an environment is made only of arguments that are right by themselves: its own errors would repeat them
    wrong = {problem.key for problem in problems}
    of_class = [] if config is None else class_problems(config.policy)
    problems += of_class
    if any(key == "env" or key.startswith("env.") for key in wrong):
        return config, problems
    env = EnvConfig.model_validate(tree["env"])
    of_env = env_problems(env)
    if not of_env and not any(key == "trainer" or key.startswith("trainer.events") for key in wrong):
        problems += event_problems(env, EventsConfig.model_validate(tree["trainer"].get("events", {})))
    if config is not None and not of_env and not any(problem.key == "policy.name" for problem in of_class):
        problems += action_problems(config.env, config.policy, config.algorithm.record)
    return config, problems + of_env


def device_problems(device: str) -> list[Problem]:
    """Report a device that jax does not have here."""
    if device == "cpu" or not (problem := device_problem(device)):  # for cpu, JAX need not start
        return []
    platform = device.partition(":")[0]
    remedy = f"set trainer.device to cpu (ejax train --device cpu), or install jax for {platform}"
    return [Problem("trainer.device", f"{problem}; {remedy}")]


def fill_env(draft: Draft) -> None:
    """Fill ``env`` from ``trainer.gym_config``, under its own keys, and move ``num_envs`` to its place."""
    if not isinstance(draft.get("trainer"), dict):
        return
    if draft.has("trainer.gym_config") and draft.key("env").startswith("trainer.learning_env"):
        draft.ignore("trainer.gym_config", "no effect: trainer.learning_env is given")
    if draft.has("trainer.gym_config"):
        name = draft.pop("trainer.gym_config")
        if not _may_stand_beside(draft):
            return
        given = (draft.pop("env") if draft.has("env") else None) or {}
        path = _find(draft, name)
        if path is not None:
            given_cfg = dict(given.get("cfg") or {})
            data = _merge(read_file(path), given_cfg.pop("gym_config", None))
            from ejax.config.embodichain.gym_config import read_gym_config  # which few runs need

            env = read_gym_config(draft, data, str(name))
            draft.put("env", {**env, **given, "cfg": {**env.get("cfg", {}), **given_cfg}})
        # EmbodiChain's two ways to an environment have different defaults
        for key, value in spellings.GYM_DEFAULTS.items():
            draft.tree["trainer"].setdefault(key, value)
    elif not draft.has("env"):
        draft.problem("env", "is missing; set trainer.gym_config, trainer.learning_env, or env: {id, cfg}")
    if draft.has("env.cfg.num_envs"):
        num_envs = draft.pop("env.cfg.num_envs")
        if draft.has("trainer.num_envs"):
            draft.note("env.cfg.num_envs", f"not used: trainer.num_envs is {draft.get('trainer.num_envs')}")
        else:
            draft.put("trainer.num_envs", num_envs)


def read_demonstrations_file(draft: Draft) -> None:
    """Put the content of ``data.engine.gym_config`` in the place of its path."""
    name = draft.get("data.engine.gym_config")
    if not isinstance(name, str):
        return
    expected = [folder / name for folder in (draft.folder, Path.cwd()) if folder is not None]
    if file := next(filter(is_file, expected), None):
        draft.put("data.engine.gym_config", read_file(file))
    else:
        looked = " and ".join(str(path.absolute()) for path in expected)
        draft.reject("data.engine.gym_config", f"there is no '{name}'; looked for {looked}")


def _may_stand_beside(draft: Draft) -> bool:
    for key in ("env", "env.cfg", "env.cfg.gym_config"):
        given = draft.get(key)
        if given is not None and not isinstance(given, dict):
            text = f"got {short_repr(given)}; next to trainer.gym_config it must be a section, or be left out"
            draft.problem(key, text)
            return False
    return True


def _find(draft: Draft, name: Any) -> Path | None:
    """Find the gym config's file; on the command line, relative to the working directory. A choice is reported."""
    typed = draft.key("trainer.gym_config").endswith(OVERRIDE)
    draft.spelled["env"] = "trainer.gym_config"
    if not isinstance(name, str):
        draft.problem("env", f"got {short_repr(name)}; must be the path of a gym config")
        return None
    try:
        name = expanded(name)
    except ValueError as error:
        draft.problem("env", str(error))
        return None
    folders = [folder for folder in (draft.folder, Path.cwd()) if folder is not None]
    expected = [folder / name for folder in (reversed(folders) if typed else folders)]
    files = _candidates(draft.folder, name, expected)
    if not files:
        draft.problem("env", f"there is no '{name}'; looked for {' and '.join(str(p.absolute()) for p in expected)}")
        return None
    path, *others = files
    draft.gym_config = name, path
    others = [other for other in others if not _is_same(other, path)]
    if path != expected[0] and others:
        draft.note("trainer.gym_config", f"read {path}, not {others[0]}, which differs")
    elif not any(map(is_file, expected)):
        draft.note("trainer.gym_config", f"there is no '{name}'; read {path} instead")
    return path


def _is_same(first: Path, second: Path) -> bool:
    try:
        return read_bytes(first) == read_bytes(second)
    except OSError:  # reported when that one is read
        return False


def _candidates(folder: Path | None, name: str, expected: Sequence[Path]) -> list[Path]:
    """Return the files that a train config in ``folder`` can mean by ``name``, the likeliest first.

    The path as it is: from the first of the ``expected`` places, a folder above the train file's (EmbodiChain's files
    name their gym config from its repository's root), the second place. Then the longest tail of the path that lies in
    the train file's folder or above it; the file's name alone counts next to the train file only.
    """
    parts = Path(name).parts
    above = [] if folder is None else [folder.resolve(), *folder.resolve().parents]
    tails = [
        place.joinpath(*parts[start:])
        for start in range(1, len(parts))
        for place in (above if start < len(parts) - 1 else above[:1])
    ]
    files: dict[Path, Path] = {}  # by the real path: a link is not a second file
    for path in (expected[0], *(place / name for place in above[1:]), *expected[1:], *tails):
        if is_file(path):
            files.setdefault(path.resolve(), path)
    return list(files.values())


def _merge(data: dict[str, Any], over: Any) -> dict[str, Any]:
    if not isinstance(over, Mapping):
        return data
    merged = dict(data)
    for name, value in over.items():
        old = merged.get(name)
        merged[name] = _merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged


def note_gym_configs(draft: Draft) -> None:
    """Take over the notices of gym configs' files. This imports the functors that may run."""
    demonstrated = draft.get("data.engine.gym_config")
    if "env.cfg.gym_config" not in draft.spelled and not isinstance(demonstrated, dict):
        return
    from ejax.config.embodichain.gym_config import MANAGER_ENV, is_manager_form, manager_notes

    read = {
        "env.cfg.gym_config": draft.get("env.id") == MANAGER_ENV and "env.cfg.gym_config" in draft.spelled,
        "data.engine.gym_config": isinstance(demonstrated, dict)
        and "id" in demonstrated
        and is_manager_form(demonstrated),
    }
    for key in (key for key, is_read in read.items() if is_read):
        report = KeyReport({note.key: note for note in manager_notes(draft.get(key))})
        for note in report.notices:
            draft.note(f"{key}.{note.key}", note.text, note.status)


def do_without_wandb(draft: Draft) -> None:
    """Train without Weights & Biases where the package is missing."""
    if draft.get("trainer.use_wandb") is True and importlib.util.find_spec("wandb") is None:
        draft.put("trainer.use_wandb", False)
        text = "wandb is not installed: the run continues without it (pip install -e '.[wandb]' in ejax's folder)"
        draft.note("trainer.use_wandb", text, "without effect")


PASSES: tuple[Callable[[Draft], None], ...] = (
    spellings.note_seed_spelling,  # needs the keys as the file spells them
    spellings.canonicalize_keys,  # before overrides, which find a value of the file in its canonical place alone
    apply_overrides,
    spellings.canonicalize_keys,  # again: overrides come in any spelling
    require_sections,  # needs canonical names; all that follow take trainer, policy and algorithm for sections
    read_trainer_numbers,
    spellings.resolve_evaluation,  # needs enable_eval and eval_freq of file and overrides
    spellings.ignore_options,  # before sizes, for which the options have to be valid
    spellings.ignore_engine_fields,
    spellings.resolve_sizes,  # needs the algorithm's options; before the gym config's defaults, which give way to them
    read_demonstrations_file,
    fill_env,  # needs trainer.gym_config; gives env and num_envs
    note_gym_configs,  # needs env
    spellings.resolve_model_type,  # needs the final num_envs and buffer_size
    spellings.drop_unsupported,  # needs to know that compat is given, which the next one takes out
    spellings.resolve_compat,  # fills keys that are not given
    spellings.fill_defaults,  # needs everything above: fills what is still open from other keys
    do_without_wandb,
)
"""Edits of a draft in their order."""
