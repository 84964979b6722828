"""``python -m ejax.config check FILE``: what becomes of each key of a train config and of the gym config it names."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ejax.config.embodichain.gym_config import MANAGER_ENV, manager_notes
from ejax.config.embodichain.spellings import Draft, respell_key
from ejax.config.files import read_file
from ejax.config.load import device_problems, read_draft
from ejax.envs.manager.key_report import KeyNote, Status
from ejax.problems import Notice, with_sections
from ejax.shorten import MOST_OF_VALUE, shorten

_RESPELLED = {
    "trainer.cuda": "trainer.device",
    "policy.initial_action_std": "policy.initial_log_std",
    "policy.action_std_range": "policy.log_std_range",
}
"""What ``spellings`` rewrites besides the keys that it moves."""


def check(path: str | Path, overrides: Sequence[str] = ()) -> list[KeyNote]:
    """One note for each key. Unsupported: what keeps the run from starting, and what it silently would not do.

    A device that this machine lacks is told, but not unsupported: ``--device`` replaces it.

    Args:
        path: JSON or YAML, as for ``load_config``.
        overrides: as for ``load_config``.

    Raises:
        ConfigError: a file that cannot be read.
    """
    path = Path(path)
    data = read_file(path)
    draft = Draft(read_file(path), folder=path.parent)
    config = read_draft(draft, overrides, device=None)
    problems = {draft.written(key): text for key, text in draft.problems}
    remarks = {} if config is None else dict(device_problems(config.trainer.device))
    notes = [
        _judge(key, problems, draft.notices, remarks, respell_key(key) if key not in _RESPELLED else _RESPELLED[key])
        for key in _leaves(data)
    ]
    notes += _gym_notes(draft, problems)
    told = {key for note in notes for key in with_sections(note.key)}
    notes += [KeyNote(key, "unsupported", text) for key, text in problems.items() if key not in told]
    return [note._replace(key=shorten(note.key, MOST_OF_VALUE), text=shorten(note.text)) for note in notes]


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
    order: tuple[Status, ...] = ("used", "renamed", "without effect", "unsupported")
    return {status: sum(note.status == status for note in notes) for status in order}


def _judge(
    key: str, problems: Mapping[str, str], notices: Sequence[Notice], remarks: Mapping[str, str], canonical: str
) -> KeyNote:
    sections = with_sections(key)
    for section in sections:
        if section in problems:
            return KeyNote(key, "unsupported", problems[section])
    remark = remarks.get(key, "")
    for notice in notices:
        if notice.key in sections:
            if notice.status != "remark":
                return KeyNote(key, notice.status, notice.text)
            remark = notice.text
    return KeyNote(key, "renamed", canonical) if canonical != key else KeyNote(key, "used", remark)


def _gym_notes(draft: Draft, problems: Mapping[str, str]) -> Iterator[KeyNote]:
    """Of the gym config that the train config names."""
    if draft.gym_config is None:
        return
    name, path = draft.gym_config
    if draft.get("env.id") == MANAGER_ENV:
        for note in manager_notes(draft.get("env.cfg.gym_config")):
            text = problems.get(f"{name}:{note.key}")
            yield KeyNote(f"{name}:{note.key}", "unsupported" if text else note.status, text or note.text)
        return
    for key in _leaves(read_file(path)):
        yield _judge(f"{name}:{key}", problems, draft.notices, {}, f"{name}:{key}")


def _leaves(data: Any, above: str = "") -> list[str]:
    """Dotted keys of values that are no sections; a section that was moved as a whole is walked too."""
    if not isinstance(data, Mapping) or not data:
        return [above] if above else []
    return [leaf for name, value in data.items() for leaf in _leaves(value, f"{above}.{name}" if above else str(name))]
