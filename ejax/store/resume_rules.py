"""Changes of the config that a resumed run may make, and their record in the run's folder."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt

from ejax.config import RunConfig, TrainerConfig
from ejax.logs.json_records import FactsError, read_facts
from ejax.optim import STRETCHABLE
from ejax.schema.configclass import RESUMABLE
from ejax.schema.frozen import with_value
from ejax.schema.plain_files import read_bytes, read_json, sha256, to_json
from ejax.schema.writing import move, replace_file
from ejax.store.checkpoint import CheckpointError
from ejax.store.digests import LISTING, render_digests
from ejax.store.run_dir import CHANGES, NEXT_LISTING, VERSIONS

M = TypeVar("M", bound=BaseModel)
_OF_ONE_CALL = ("device", "distributed", "shard_parameters", "profile")
"""Keys of ``trainer`` for this call alone; the record keeps those of the start."""


class ChangedOption(BaseModel):
    """One change that a resume made."""

    step: NonNegativeInt
    updates: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]
    """Those of the whole run, before and after it."""


class Changes(BaseModel):
    """The form of ``configs/changes.json``."""

    changes: list[ChangedOption]


def check_same_run(config: RunConfig, saved: RunConfig) -> None:
    """Raise a CheckpointError with each key that differs and may not."""
    differ = [
        f"{key} is {json.dumps(there)} in the run and {json.dumps(here)} now"
        for key, there, here in differences(saved.to_dict(), config.to_dict(), "")
        if not may_change(config, key)
    ]
    if differ:
        raise CheckpointError("this config is not the one that the run was started with: " + "; ".join(differ))


def may_change(config: BaseModel, key: str) -> bool:
    """Return whether a dotted key is marked ``MayChange``, is in a section that is, or stretches a schedule."""
    if key.endswith(STRETCHABLE):
        return True
    section: Any = config
    for name in key.split("."):
        marks = _marks(section, name)
        if marks is None or RESUMABLE in marks:
            return marks is not None
        section = getattr(section, name)
    return False


def _marks(section: Any, name: str) -> Sequence[Any] | None:
    """Return what annotates a field of a section; None: there is no such field."""
    if isinstance(section, BaseModel):
        field = type(section).model_fields.get(name)
        return None if field is None else field.metadata
    known = getattr(section, "__dataclass_fields__", {}).get(name)
    return None if known is None else getattr(known.type, "__metadata__", ())


def with_changes(saved: M, config: BaseModel) -> M:
    """Return a checkpoint's section with those values of this config that may change."""
    for key, _, here in differences(saved.model_dump(mode="json"), config.model_dump(mode="json"), ""):
        saved = with_value(saved, key, here) if may_change(config, key) else saved
    return saved


def differences(a: Any, b: Any, path: str) -> list[tuple[str, Any, Any]]:
    """List ``(dotted key, in a, in b)`` of the values that differ in two nested mappings."""
    if isinstance(a, dict) and isinstance(b, dict):
        names = sorted(a.keys() | b.keys())
        return [d for name in names for d in differences(a.get(name), b.get(name), f"{path}.{name}".lstrip("."))]
    return [] if a == b else [(path, a, b)]


def record_changes(config_file: Path, config: RunConfig, step: int) -> None:
    """Write a resumed run's config into ``resolved.json``, and what it replaces into ``changes.json``.

    A kill leaves the former configs or the new ones. ``config`` is bound, before it is rescaled for its devices.
    """
    now = config.to_dict()
    before = read_json(config_file)
    now["trainer"] |= {name: before["trainer"].get(name, now["trainer"][name]) for name in _OF_ONE_CALL}
    changed = {key: [there, here] for key, there, here in differences(before, now, "")}
    if not changed or not config_file.with_name(LISTING).exists():  # a lost seal is reported, not made again
        return
    # its number of updates is derived from several keys
    trainer = TrainerConfig.model_validate_json(json.dumps(before["trainer"]), strict=True)
    try:
        changes = read_facts(config_file.with_name(CHANGES), Changes)["changes"]
    except FactsError:
        changes = []
    updates = [trainer.num_updates, config.trainer.num_updates]
    changes.append({"step": step, "time": time.time(), "updates": updates, "changed": changed})
    run = config_file.parents[1]
    replace_file(config_file.with_name(CHANGES), to_json({"changes": changes}, indent=2), run)
    text = to_json(now, indent=2)
    versions = config_file.with_name(VERSIONS)
    digests = {config_file.name: sha256(text.encode()), VERSIONS: sha256(read_bytes(versions))}
    listing = config_file.with_name(NEXT_LISTING)
    replace_file(listing, render_digests(digests), run)  # in reserve, until the config that it seals is there
    replace_file(config_file, text, run)
    move(listing, config_file.with_name(LISTING), run)
