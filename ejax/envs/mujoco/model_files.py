"""The files that an MJCF or URDF names, looked at before MuJoCo opens them: it would wait for a named pipe for ever."""

import os
from pathlib import Path
from xml.etree import ElementTree as ET

from ejax.runtime.plain_files import check_plain, read_text

_MAX_XML = 16 << 20
_MAX_ASSET = 1 << 30
"""Bytes of a mesh, a texture or a height field."""
_FOLDERS = ("meshdir", "texturedir", "assetdir")


def check_model_files(model: Path | str) -> None:
    """Refuse a model that is, or names, something other than regular files of bounded size.

    What is missing and what is no XML is left to MuJoCo, which reports it.

    Args:
        model: the file, or MJCF as text, whose files are looked for from the working directory.

    Raises:
        ValueError: naming the file.
    """
    texts, folders, seen = [model], {Path() if isinstance(model, str) else model.parent}, set[Path]()
    while texts:
        given = texts.pop()
        try:
            root = ET.fromstring(given if isinstance(given, str) else read_text(given, _MAX_XML))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnicodeDecodeError, ET.ParseError):
            continue  # of the places where a file may be, most are not
        except OSError as error:
            raise _refused(error) from None
        folders |= {given.parent} if isinstance(given, Path) else set()
        folders |= {
            folder / each.get(name, "") for folder in folders for each in root.iter("compiler") for name in _FOLDERS
        }
        named = [(each.tag, x) for each in root.iter() for key, x in each.items() if key.startswith("file") and x]
        for tag, name in named:
            for path in {folder / part for folder in folders for part in (name, os.path.basename(name))} - seen:
                seen.add(path)
                if tag in ("include", "model"):
                    texts.append(path)
                else:
                    _check_asset(path)


def _check_asset(path: Path) -> None:
    try:
        check_plain(path, _MAX_ASSET)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return
    except OSError as error:
        raise _refused(error) from None


def _refused(error: OSError) -> ValueError:
    return ValueError(f"the model's file {error.filename} {error.strerror}")
