"""``ejax config check FILE``: what becomes of the keys of a train config and its gym config, or of one."""

import copy
import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from ejax.config.embodichain.draft import OVERRIDE, Draft
from ejax.config.embodichain.gym_config import MANAGER_ENV, manager_notes, read_gym_config
from ejax.config.embodichain.spellings import LOGARITHMS, canonical_key
from ejax.config.environment import action_problems, env_problems
from ejax.config.files import read_file
from ejax.config.load import device_problems, read_draft
from ejax.config.models import EnvConfig
from ejax.config.shipped import find_config
from ejax.schema.messages import MAX_VALUE_CHARS, shorten
from ejax.schema.paths import leaves, part_names
from ejax.schema.problems import KeyNote, Status, with_sections

_CANONICALIZED = {"trainer.cuda": "trainer.device", **LOGARITHMS}
_SECTIONS = ("trainer", "policy", "algorithm")


def check(path: str | Path, overrides: Sequence[str] = ()) -> list[KeyNote]:
    """Return a note for each key. Unsupported: what keeps the run from starting, and what it silently would not do.

    A device that this machine lacks is reported, but not unsupported: ``--device`` replaces it. Arguments
    are as for ``load_config``. Raises ConfigError: a file that cannot be read.
    """
    path = find_config(path)
    data = read_file(path)
    if (what := _other_file(data)) is not None:
        return [KeyNote(shorten(path.name, MAX_VALUE_CHARS), "unsupported", what)]
    # a gym config alone, as EmbodiChain's environments are started with
    alone = "id" in data and isinstance(data.get("env"), Mapping) and not any(name in data for name in _SECTIONS)
    draft = Draft({} if alone else copy.deepcopy(data), path.parent, overrides)
    notes = [] if alone else _check_train_config(draft, data)
    if alone:
        draft.gym_config = path.name, path
        for text in overrides:
            draft.problem(f"override {text!r}", "belongs to a train config; a gym config alone takes none")
        env = read_gym_config(draft, data, path.name)
        draft.put("env", env)
        if not draft.report.problems:
            for key, text in env_problems(EnvConfig.model_validate(env)):
                draft.problem(key, text)
    notes += _gym_notes(draft)
    # what no key of the files has: overrides, and keys that are missing
    reported = {key for note in notes for key in with_sections(note.key)}
    notes += [note for note in draft.report.notes if note.status == "unsupported" and note.key not in reported]
    return [note._replace(key=shorten(note.key, MAX_VALUE_CHARS), text=shorten(note.text)) for note in notes]


def _check_train_config(draft: Draft, data: dict[str, Any]) -> list[KeyNote]:
    if (config := read_draft(draft)) is not None:
        for key, text in device_problems(config.trainer.device):
            draft.note(key, text)
        for key, text in action_problems(config.env, config.policy, config.algorithm.record, builds=True):
            draft.problem(key, text)
        policy, vla = config.policy, config.policy.vla_config
        if vla is not None and vla.model_path is not None and vla.model_class is None:
            from ejax.policies.pretrained.weights import WeightsError, find_weights  # here: most configs have none
            from ejax.policies.vla.lerobot_folder import Kind, folder_kind, read_spec

            try:
                kind = next((name for name in get_args(Kind) if name == policy.name), folder_kind(vla.model_path))
                find_weights(vla.model_path) if kind is None else read_spec(kind, vla.model_path)
            except (WeightsError, OSError) as error:
                draft.problem("policy.vla_config.model_path", str(error))
        draft.note("policy.name", f"ejax export writes {policy.record.exported_to}")
    known = {  # a note on an override holds for the file's key too, a problem does not
        note.key if note.status == "unsupported" else note.key.removesuffix(OVERRIDE): note
        for note in draft.report.notes
    }
    keys = part_names(path for path, _ in leaves(data))
    return [_judge(key, known, _CANONICALIZED.get(key, canonical_key(key))) for key in keys if key]


def verdict_table(notes: Sequence[KeyNote]) -> str:
    """Align columns of status, key and reason, the gym config's keys below its name, and end with a line of counts."""
    rows = [(note.status, *note.key.rpartition(":")[::2], note.text) for note in notes]
    width = max((len(key) for _, _, key, _ in rows), default=0)
    lines: list[str] = []
    for file, group in itertools.groupby(rows, key=lambda row: row[1]):
        lines += [f"\n{file}:"] if file else []
        lines += [f"{status:<14}  {key:<{width}}  {text}".rstrip() for status, _, key, text in group]
    counts = ", ".join(f"{count} {status}" for status, count in count_by_status(notes).items())
    return "\n".join([*lines, "", counts])


def count_by_status(notes: Sequence[KeyNote]) -> dict[Status, int]:
    return {status: sum(note.status == status for note in notes) for status in get_args(Status)}


def _judge(key: str, known: Mapping[str, KeyNote], canonical: str) -> KeyNote:
    # a section that is refused or ignored decides for all in it
    found = [known[section] for section in with_sections(key) if section in known]
    for statuses in (("unsupported",), ("renamed", "without effect")):
        for note in found:
            if note.status in statuses:
                return note._replace(key=key)
    if canonical != key:
        return KeyNote(key, "renamed", canonical)
    return KeyNote(key, "used", next((note.text for note in reversed(found) if note.text), ""))


def _gym_notes(draft: Draft) -> Iterator[KeyNote]:
    if draft.gym_config is None:
        return
    (name, path), report = draft.gym_config, draft.report
    if draft.get("env.id") == MANAGER_ENV:
        # the task's own reading has a note for each key; the draft knows what else was wrong
        for note in manager_notes(draft.get("env.cfg.gym_config")):
            key = f"{name}:{note.key}"
            refused = next((section for section in with_sections(key) if report.refuses(section)), None)
            yield (report.by_key[refused] if refused else note)._replace(key=key)
        return
    for key in part_names(each for each, _ in leaves(read_file(path))):
        yield _judge(f"{name}:{key}", report.by_key, f"{name}:{key}")


def _other_file(data: Mapping[str, Any]) -> str | None:
    """Name the kind of another file; None: a train or gym config, perhaps with mistakes."""
    if all(name in data for name in _SECTIONS):
        return None
    for kind in tomllib.loads(Path(__file__).with_name("other_files.toml").read_text())["kinds"]:
        if all(key in data for key in kind["keys"]):
            return str(kind["text"])
    if not data or {*_SECTIONS, "env", "data", "compat"} & set(data):
        return None
    sections = ", ".join(_SECTIONS)
    return f"not a config: it has none of the sections {sections}, and is not a gym config, which has id and env"
