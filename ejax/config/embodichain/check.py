"""``python -m ejax.config check FILE``: what becomes of each key of a train config and of the gym config it names.

FILE may be a gym config by itself. Any other file gets one note that names its kind.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from ejax.config.embodichain.draft import OVERRIDE, Draft
from ejax.config.embodichain.gym_config import MANAGER_ENV, env_problems, manager_notes, read_gym_config
from ejax.config.embodichain.other_files import is_gym_config, other_file
from ejax.config.embodichain.spellings import canonical_key
from ejax.config.files import read_file
from ejax.config.load import device_problems, read_draft
from ejax.config.models import EnvConfig
from ejax.schema.messages import MAX_VALUE_CHARS, shorten
from ejax.schema.problems import KeyNote, Status, with_sections
from ejax.schema.registry import is_import_path

_CANONICALIZED = {
    "trainer.cuda": "trainer.device",
    "policy.initial_action_std": "policy.initial_log_std",
    "policy.action_std_range": "policy.log_std_range",
}
"""Values that ``spellings`` rewrites, besides the keys that it moves."""


def check(path: str | Path, overrides: Sequence[str] = ()) -> list[KeyNote]:
    """One note for each key. Unsupported: what keeps the run from starting, and what it silently would not do.

    A device that this machine lacks is reported, but not unsupported: ``--device`` replaces it.

    Args:
        path: JSON or YAML, as for ``load_config``.
        overrides: as for ``load_config``.

    Raises:
        ConfigError: a file that cannot be read.
    """
    path = Path(path)
    data = read_file(path)
    if (what := other_file(data)) is not None:
        return [KeyNote(shorten(path.name, MAX_VALUE_CHARS), "unsupported", what)]
    if is_gym_config(data):
        return _shortened(_check_gym_config(path, data, overrides))
    draft = Draft(read_file(path), path.parent, overrides)
    config = read_draft(draft)
    for key, text in device_problems(config.trainer.device) if config is not None else ():
        draft.note(key, text)
    if config is not None and is_import_path("policy", config.policy.name):
        draft.note("policy.name", "of your own: it trains, evaluates and plays, and interop.export has no form for it")
    known = {  # a note on an override holds for the file's key too, a problem does not
        note.key if note.status == "unsupported" else note.key.removesuffix(OVERRIDE): note
        for note in draft.report.notes
    }
    notes = [_judge(key, known, _CANONICALIZED.get(key, canonical_key(key))) for key in _leaves(data)]
    notes += _gym_notes(draft)
    reported = {key for note in notes for key in with_sections(note.key)}
    notes += [note for note in draft.report.notes if note.status == "unsupported" and note.key not in reported]
    return _shortened(notes)


def _check_gym_config(path: Path, data: dict[str, Any], overrides: Sequence[str]) -> list[KeyNote]:
    """The notes of a gym config that no train config names."""
    draft = Draft({}, folder=path.parent)
    draft.gym_config = path.name, path
    for text in overrides:
        draft.problem(f"override {text!r}", "belongs to a train config; a gym config by itself takes none")
    env = read_gym_config(draft, data, path.name)
    draft.put("env", env)
    if not draft.report.problems:
        for key, text in env_problems(EnvConfig.model_validate(env)):
            draft.problem(key, text)
    notes = list(_gym_notes(draft))
    reported = {key for note in notes for key in with_sections(note.key)}
    return notes + [note for note in draft.report.notes if note.status == "unsupported" and note.key not in reported]


def _shortened(notes: Sequence[KeyNote]) -> list[KeyNote]:
    return [note._replace(key=shorten(note.key, MAX_VALUE_CHARS), text=shorten(note.text)) for note in notes]


def table(notes: Sequence[KeyNote]) -> str:
    """Aligned columns: status, key, reason; the gym config's keys below its name; and a line that counts."""
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
    """The note of a key, from those of the key and of the sections that it is in."""
    found = [known[section] for section in with_sections(key) if section in known]
    for statuses in (("unsupported",), ("renamed", "without effect")):
        for note in found:
            if note.status in statuses:
                return note._replace(key=key)
    if canonical != key:
        return KeyNote(key, "renamed", canonical)
    return KeyNote(key, "used", next((note.text for note in reversed(found) if note.text), ""))


def _gym_notes(draft: Draft) -> Iterator[KeyNote]:
    """Notes on the gym config that the train config names."""
    if draft.gym_config is None:
        return
    (name, path), report = draft.gym_config, draft.report
    if draft.get("env.id") == MANAGER_ENV:
        for note in manager_notes(draft.get("env.cfg.gym_config")):
            key = f"{name}:{note.key}"
            refused = next((section for section in with_sections(key) if report.refuses(section)), None)
            yield (report.by_key[refused] if refused else note)._replace(key=key)
        return
    for key in _leaves(read_file(path)):
        yield _judge(f"{name}:{key}", report.by_key, f"{name}:{key}")


def _leaves(data: Any, above: str = "") -> list[str]:
    """Dotted keys of values that are no sections; a section that was moved as a whole is walked too."""
    if not isinstance(data, Mapping) or not data:
        return [above] if above else []
    return [leaf for name, value in data.items() for leaf in _leaves(value, f"{above}.{name}" if above else str(name))]
