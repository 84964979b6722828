"""``python -m ejax.config schema``: print the JSON Schema of a train config."""

import argparse

from ejax.config.schema import schema_text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ejax.config", description=__doc__)
    parser.add_argument("what", choices=["schema"])
    parser.parse_args()
    print(schema_text(), end="")


if __name__ == "__main__":
    main()
