"""``ejax configs``: the configs that come with ejax, found, listed and copied by name; and the trained policies."""

import os
import re
from pathlib import Path

from ejax.config.files import MAX_BYTES, is_file
from ejax.runtime.process_exit import exit_with, refused
from ejax.schema.command_line import CommandParser
from ejax.schema.messages import did_you_mean
from ejax.schema.plain_files import a_target, expanded, read_json, read_text
from ejax.schema.problems import ConfigError
from ejax.schema.writing import new_file

_PACKAGE = Path(__file__).parents[1]
FOLDER = _PACKAGE / "configs"
"""The shipped configs: in a checkout a link to its own, of which a wheel holds copies."""
POLICIES = _PACKAGE / "shipped"
"""The shipped policies: folders of runs, with the policy alone in their checkpoints, and ``certificate.json``."""
_SCHEMA = re.compile(r"(?<=\$schema=)\S*config\.schema\.json")


def shipped_names() -> list[str]:
    """List the names of the train configs, such as ``push_cube/ppo``; JSON files have their suffix."""
    files = (path for path in FOLDER.rglob("[!.]*") if path.suffix in MAX_BYTES and path.name != "gym_config.json")
    return sorted(path.relative_to(FOLDER).as_posix().removesuffix(".yaml") for path in files)


def shipped_policies() -> dict[str, str]:
    """List the names of the trained policies that come with ejax, such as ``push_cube``, each with its config's."""
    return {file.parent.name: read_json(file)["config"] for file in sorted(POLICIES.glob("*/certificate.json"))}


def find_config(name: str | Path) -> Path:
    """Find a config: a file, or a shipped one by its name, with or without ``configs/`` and ``.yaml``.

    A file wins. What is neither comes back as it is where it looks like a path of the user's own, since reading it
    says best what is wrong. Raises ConfigError: a name that no shipped config has; with the nearest.
    """
    try:
        path = Path(expanded(str(name)))
    except ValueError as error:
        raise ConfigError([], str(error)) from None
    if is_file(path):
        return path
    short = path.as_posix().removeprefix("configs/").removesuffix(".yaml")
    if short in shipped_names():
        return FOLDER / (short if Path(short).suffix else f"{short}.yaml")
    if path.suffix or path.is_absolute():
        return path
    text = f"'{name}' is neither a file nor one of ejax's configs; `ejax configs` lists them"
    raise ConfigError([], text + did_you_mean(short, shipped_names()))


def summary_of(name: str) -> str:
    """Describe a shipped config by the first sentence of its comments; JSON has none."""
    lines = read_text(find_config(name)).splitlines()
    comments = [line.lstrip("# ") for line in lines if line.startswith("# ") and "$schema=" not in line]
    return re.split(r"[.:;] |[.:;]$", " ".join(comments))[0] or "a train config in EmbodiChain's form"


def copy_config(name: str, to: Path | None = None) -> list[Path]:
    """Copy a shipped config, and the gym config next to it that it names, to be edited. Returns the files written.

    Args:
        to: a file or an existing folder. None: the working directory.

    Raises FileExistsError: a file of that name is there; it stays. ConfigError: there is no such config.
    """
    source = find_config(name)
    target = (to or Path()) / source.name if to is None or to.is_dir() else to
    pairs = [(source, target)]
    gym_config = source.with_name("gym_config.json")
    if gym_config.is_file() and '"gym_config"' in read_text(source):
        pairs.append((gym_config, target.with_name(gym_config.name)))
    for _, path in pairs:
        if os.path.lexists(path):
            raise FileExistsError(f"{path} exists; choose another name: ejax configs copy {name} FILE")
    for original, path in pairs:
        # an editor finds the schema of the installed version, wherever the copy lies
        with new_file(path) as file:
            file.write(_SCHEMA.sub(str(_PACKAGE / "config.schema.json"), read_text(original)).encode())
    return [path for _, path in pairs]


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = CommandParser("ejax configs", description="List the configs that come with ejax, or copy one.")
    copy = parser.add_subparsers(dest="command").add_parser("copy", help="copy a config, to edit it")
    copy.add_argument("name")
    copy.add_argument("to", nargs="?", type=a_target, help="a file or a folder (default: here)")
    args = parser.parse_args(argv)
    if args.command == "copy":
        try:
            print("\n".join(map(str, copy_config(args.name, args.to))))
        except (ConfigError, OSError) as error:
            return refused("ejax configs", error)
        return 0
    width = max(map(len, shipped_names()))
    trained = {config: f" (trained: {name})" for name, config in shipped_policies().items()}
    print("\n".join(f"{name:<{width}}  {summary_of(name)}{trained.get(name, '')}" for name in shipped_names()))
    return 0


if __name__ == "__main__":
    exit_with(main)
