"""From a file, a dictionary and overrides to a checked ``RunConfig``. All problems are reported together."""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import yaml
from pydantic import ValidationError

from ejax.config.errors import ConfigError, Problem
from ejax.config.gym_config import env_problems, read_gym_config
from ejax.config.models import RunConfig
from ejax.config.schema import allowed_keys
from ejax.config.spellings import (
    GYM_DEFAULTS,
    Draft,
    fill_defaults,
    read_numbers,
    respell,
    respell_key,
    seed_evaluates,
    take_out,
)
from ejax.optim import OPTIMIZER_KWARGS, SCHEDULE_KWARGS
from ejax.registry import did_you_mean, is_import_path

SUFFIXES = (".json", ".yaml", ".yml")


def load_config(path: str | Path, overrides: Sequence[str] = (), device: str | None = None) -> RunConfig:
    """The run that a train config file describes.

    Args:
        path: JSON or YAML, in any spelling of EmbodiChain's releases.
        overrides: ``section.key=value``, the value in YAML; they win over the file, whatever its spelling.
        device: wins over ``trainer.device``.

    Raises:
        ConfigError: everything that is wrong with it.
    """
    path = Path(path)
    data = read_file(path)
    draft = Draft(data, folder=path.parent)
    respell(draft)
    overridden = {respell_key(text.partition("=")[0].strip()) for text in overrides}
    foreign = [
        Problem(
            key,
            f"'{name}' is code outside ejax, which a file alone may not start; add {key}={name} to the command line",
        )
        for kind, key in (("env", "env.id"), ("policy", "policy.name"), ("algorithm", "algorithm.name"))
        if isinstance(name := draft.get(key), str) and is_import_path(kind, name) and key not in overridden  # type: ignore[arg-type]  # a literal above
    ]
    if foreign:
        raise ConfigError(foreign, str(path))
    return _parse(read_file(path), overrides, device, path.parent, str(path))


def parse_config(
    data: Mapping[str, Any],
    overrides: Sequence[str] = (),
    device: str | None = None,
    folder: str | Path | None = None,
) -> RunConfig:
    """``load_config`` for a config that is in memory.

    Args:
        folder: where a relative ``trainer.gym_config`` is looked up before the working directory.
    """
    return _parse(copy.deepcopy(dict(data)), overrides, device, folder, "config")


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a JSON or YAML file.

    Raises:
        ConfigError: another suffix, no file, a syntax error or a key given twice (with its line), no mapping.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            [Problem("", f"'{path.suffix}' is not a config's suffix; allowed: {', '.join(SUFFIXES)}")],
            str(path),
        )
    try:
        text = path.read_text(encoding="utf-8")
        data = (
            json.loads(text, object_pairs_hook=_unique)
            if path.suffix == ".json"
            else yaml.load(text, _Loader)
        )
    except FileNotFoundError:
        raise ConfigError(
            [Problem("", f"there is no such file (looked in {Path.cwd()})")], str(path)
        ) from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            [Problem("", f"{error.msg} in column {error.colno}")], f"{path}:{error.lineno}"
        ) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError([Problem("", f"{error.problem}")], f"{path}:{line}") from None
    except (OSError, UnicodeDecodeError, _DuplicateKeyError, yaml.YAMLError) as error:
        raise ConfigError([Problem("", str(error))], str(path)) from None
    if not isinstance(data, dict):
        kind = "empty" if data is None else f"a {type(data).__name__}"
        raise ConfigError(
            [Problem("", f"is {kind}; must be a mapping with trainer, policy and algorithm")], str(path)
        )
    return data


def _parse(
    data: dict[str, Any], overrides: Sequence[str], device: str | None, folder: str | Path | None, source: str
) -> RunConfig:
    draft = Draft(data, folder=None if folder is None else Path(folder))
    seed_evaluates(draft)
    respell(draft)
    for text in overrides:
        _override(draft, text)
    if device is not None:
        draft.put("trainer.device", device)
    respell(draft)
    _fill_env(draft)
    take_out(draft)
    fill_defaults(draft)
    for section in ("algorithm", "policy", "env"):
        if draft.has(section):
            draft.put(section, read_numbers(draft.get(section)))
    config = _validate(draft)
    if config is not None:
        draft.problems += env_problems(config.env)
        draft.problems += device_problems(config.trainer.device)
    if draft.problems or config is None:
        raise ConfigError(
            [problem._replace(key=_as_written(draft, problem.key)) for problem in draft.problems], source
        )
    return config.model_copy(update={"notices": tuple(draft.notices)})


def device_problems(device: str) -> list[Problem]:
    """A device that jax does not have here."""
    platform, _, index = device.partition(":")
    if device == "cpu":
        return []
    try:
        devices = jax.devices(platform)
    except RuntimeError:
        devices = []
    if int(index or 0) < len(devices):
        return []
    here = ", ".join(f"{each.platform}:{each.id}" for each in jax.devices())
    return [
        Problem(
            "trainer.device",
            f"got '{device}', but jax has {here}; run with --device cpu, or install jax for {platform}",
        )
    ]


def _override(draft: Draft, text: str) -> None:
    written, equals, value = text.partition("=")
    written = written.strip()
    if not equals or not all(written.split(".")):
        draft.problem("", f"override '{text}': must read section.key=value, such as trainer.seed=3")
        return
    key = respell_key(written)
    if key == "trainer.gym_config" and draft.has("env"):
        draft.pop("env")
    if key == "env" and draft.has("trainer.gym_config"):
        draft.pop("trainer.gym_config")
    try:
        draft.put(key, yaml.load(value, _Loader))
    except (yaml.YAMLError, TypeError) as error:
        draft.problem("", f"override '{text}': {str(error).splitlines()[0]}")
    draft.spelled[key] = f"{written} (override)"


def _fill_env(draft: Draft) -> None:
    """``env`` from ``trainer.gym_config``, under what ``env`` says itself; ``num_envs`` to its place."""
    if draft.has("trainer.gym_config"):
        name = draft.pop("trainer.gym_config")
        path = _find(draft, name)
        if path is not None:
            env, num_envs, notices, problems = read_gym_config(read_file(path), str(name))
            draft.notices += notices
            draft.problems += problems
            given = draft.get("env")
            given = given if isinstance(given, dict) else {}
            env = {**env, **given, "cfg": {**env.get("cfg", {}), **(given.get("cfg") or {})}}
            draft.put("env", env)
            if num_envs is not None:
                draft.tree["trainer"].setdefault("num_envs", num_envs)
        for key, value in GYM_DEFAULTS.items():
            draft.tree["trainer"].setdefault(key, value)
    if draft.has("env.cfg.num_envs"):
        num_envs = draft.pop("env.cfg.num_envs")
        if draft.has("trainer.num_envs"):
            draft.notice("env.cfg.num_envs", f"not used: trainer.num_envs is {draft.get('trainer.num_envs')}")
        else:
            draft.put("trainer.num_envs", num_envs)
    if not draft.has("env") and not draft.problems:
        draft.problem("env", "is missing; give trainer.gym_config, trainer.learning_env, or env: {id, cfg}")


def _find(draft: Draft, name: Any) -> Path | None:
    if not isinstance(name, str):
        draft.problem("trainer.gym_config", f"got {name!r}; must be the path of a gym config")
        return None
    folders = [folder for folder in (draft.folder, Path.cwd()) if folder is not None]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    looked = " and ".join(str((folder / name).absolute()) for folder in folders)
    draft.problem("trainer.gym_config", f"there is no '{name}'; looked for {looked}")
    return None


def _validate(draft: Draft) -> RunConfig | None:
    try:
        return RunConfig.model_validate_json(json.dumps(draft.tree, default=str), strict=True)
    except ValidationError as error:
        already = {problem.key for problem in draft.problems}
        for problem in _problems(error, draft.tree):
            if problem.key not in already:
                draft.problems.append(problem)
        return None


def _problems(error: ValidationError, tree: Any) -> list[Problem]:
    """pydantic's errors, with one problem for each key."""
    texts: dict[str, list[str]] = {}
    for each in error.errors():
        nested = each.get("ctx", {}).get("error")
        if isinstance(nested, ConfigError):
            for problem in nested.problems:
                texts.setdefault(problem.key, []).append(problem.text)
            continue
        key = _key(each["loc"], tree, missing=each["type"] == "missing")
        texts.setdefault(key, []).append(_text(each, key, tree))
    return [Problem(key, " or ".join(dict.fromkeys(each))) for key, each in texts.items()]


def _key(location: tuple[int | str, ...], tree: Any, *, missing: bool) -> str:
    """pydantic's location without the names of union members, which are no keys."""
    names, node = [], tree
    for part in location:
        if (isinstance(node, dict) and part in node) or (isinstance(node, list) and isinstance(part, int)):
            node = node[part]  # type: ignore[index]
            names.append(str(part))
    if missing:
        names.append(str(location[-1]))
    return ".".join(names)


def _text(error: Any, key: str, tree: Any) -> str:
    given = error["input"]
    if error["type"] == "missing":
        return "is missing"
    if error["type"] == "extra_forbidden":
        allowed = _allowed(key, tree)
        return f"unknown key; allowed: {', '.join(sorted(allowed))}{did_you_mean(key.rpartition('.')[2], allowed)}"
    if error["type"] == "literal_error":
        allowed = [name.strip(" '") for name in error["ctx"]["expected"].replace(" or ", ",").split(",")]
        return f"got {given!r}; allowed: {', '.join(allowed)}{did_you_mean(str(given), allowed)}"
    if error["type"] == "value_error":
        return error["msg"].removeprefix("Value error, ")
    if error["type"] == "model_type":
        return (
            f"got {given!r}; must be a section with the keys {', '.join(sorted(_allowed(f'{key}.', tree)))}"
        )
    return f"got {given!r}; {error['msg'].replace('Input should', 'must')}"


def _allowed(key: str, tree: Any) -> list[str]:
    section = key.rpartition(".")[0]
    for kind, table in (("optimizer", OPTIMIZER_KWARGS), ("lr_scheduler", SCHEDULE_KWARGS)):
        if section == f"algorithm.cfg.{kind}.kwargs":
            name = tree["algorithm"]["cfg"][kind].get("name") or "adam"
            return list(table[name].model_fields)
    return allowed_keys(section)


def _as_written(draft: Draft, key: str) -> str:
    """The key as the user spelled it."""
    for canonical, written in draft.spelled.items():
        if key == canonical or key.startswith(f"{canonical}."):
            return (
                written
                if key == canonical
                else f"{written.removesuffix(' (override)')}{key[len(canonical) :]}"
            )
    return key


class _DuplicateKeyError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise _DuplicateKeyError(f"the key '{key}' is given twice in one section")
        seen[key] = value
    return seen


class _Loader(yaml.SafeLoader):
    """YAML's safe subset; a key given twice in one mapping is an error, with its line."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for position, (key, _) in enumerate(node.value):
            if isinstance(key, yaml.ScalarNode) and key.value != "<<" and key.value in keys[:position]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key.value}' is given twice in one section", key.start_mark
                )
        return super().construct_mapping(node, deep)
