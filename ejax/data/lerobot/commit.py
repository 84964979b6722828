"""Replace files of a recording so that a crash at any instant leaves the episodes before, or the new one too.

New versions are written under ``.staging`` and forced to the disk. Then they are renamed into place: the list of
digests first, which has both versions of each, ``meta/info.json`` last. Its count of episodes is what holds: files that
are ahead of it have more rows or frames at their end, which no reader uses and the next writer removes.
"""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Self

import ejax.data.lerobot.format as fmt
from ejax.data.lerobot.files import DIGESTS, Digests, digests_file, inside, open_inside
from ejax.schema.plain_files import sha256
from ejax.schema.writing import make_folder, move, replace_file, sync

STAGING = ".staging"


class Change:
    """New versions of files of ``folder``. A context manager: leaving it removes those not put in place."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._staging = folder, folder / STAGING

    def write(self, name: str, data: bytes) -> None:
        """Write the new version of file ``name``, relative to the folder."""
        replace_file(self.path(name), data)

    def path(self, name: str) -> Path:
        """Return the path to which another program writes the new version of ``name``."""
        return make_folder((self._staging / name).parent, self.folder) / Path(name).name

    def commit(self, before: Digests) -> Digests:
        """Put the new versions in place; from the digests ``before`` return those of the files now. OSError: the disk
        is full, or fails; if that came late, the folder is as after a crash."""
        names = [path.relative_to(self._staging).as_posix() for path in self._staging.rglob("*") if path.is_file()]
        listed = dict(before)
        for name in names:
            inside(self.folder, name)
            with open_inside(self._staging, name) as file:
                # every version that may be there until the rename, so that readers take none of them for damage
                listed[name] = tuple(dict.fromkeys((sha256(file), *before.get(name, ()))))
        self.write(DIGESTS, digests_file(listed))
        for name in (*names, DIGESTS):
            sync(self._staging / name)
        for group in ([DIGESTS], sorted({*names} - {fmt.INFO}), [fmt.INFO]):
            self._put_in_place(group)
        return {name: digests[:1] for name, digests in listed.items()}

    def _put_in_place(self, names: list[str]) -> None:
        for name in names:  # each on the disk: a loss of power could else bring the next group there, and not this one
            move(self._staging / name, self.folder / name, self.folder)

    def __enter__(self) -> Self:
        self._staging.mkdir()
        return self

    def __exit__(self, *raised: object) -> None:
        with suppress(OSError):  # an exception under way says more; the next writer removes it too
            shutil.rmtree(self._staging)


def remove_leftovers(folder: Path) -> bool:
    """Remove what a writer that was cut off has staged; True if there were files. ValueError: it is a link."""
    staging = folder / STAGING
    if staging.is_symlink():
        raise ValueError(f"{staging} is a link, and must be a folder that a recording made; remove it")
    if not staging.exists():
        return False
    had_files = any(not path.is_dir() for path in staging.rglob("*"))
    shutil.rmtree(staging)
    return had_files
