"""The parser of every command line."""

import argparse
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """A parser that refuses an option given twice, of which argparse keeps the last one without a word."""

    def _parse_known_args(self, *args: Any, **options: Any) -> Any:
        self._given: set[argparse.Action] = set()
        return super()._parse_known_args(*args, **options)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:  # of each option that is given
        if action in self._given:
            raise argparse.ArgumentError(action, "given twice; pass it once")
        several = isinstance(action, argparse._AppendAction | argparse._StoreConstAction)  # the latter say the same
        if action.option_strings and not several:
            self._given.add(action)
        return super()._get_values(action, arg_strings)
