"""Print the JSON Schema of train configs, or report on each key of a config: ejax config schema | check FILE."""

import json

from ejax.runtime.process_exit import exit_with, import_late, refused
from ejax.schema.command_line import CommandParser
from ejax.schema.plain_files import a_path
from ejax.schema.problems import ConfigError
from ejax.schema.trust import add_trust_option, trust_words


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 2 if anything in the file is unsupported."""
    parser = CommandParser(prog="ejax config", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("schema", help="print the JSON Schema")
    checked = commands.add_parser("check", help="list each key as used, renamed, without effect, or unsupported")
    checked.add_argument("file", type=a_path)
    checked.add_argument("overrides", nargs="*", metavar="section.key=value")
    checked.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_trust_option(checked)
    args = parser.parse_args(argv)
    import_late("ejax.config.embodichain.check")
    from ejax.config.embodichain.check import check, count_by_status, verdict_table
    from ejax.config.schema import schema_text

    if args.command == "schema":
        print(schema_text(), end="")
        return 0
    trust_words([*args.trust, *args.overrides])
    try:
        notes = check(args.file, args.overrides)
    except ConfigError as error:
        return refused("ejax config", error)
    counts = count_by_status(notes)
    if args.json:
        keys = [note._asdict() for note in notes]
        print(json.dumps({"file": str(args.file), "counts": counts, "keys": keys}, indent=1))
    else:
        print(verdict_table(notes))
    return 2 if counts["unsupported"] else 0


if __name__ == "__main__":
    exit_with(main)
