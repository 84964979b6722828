"""Commands of the command line, called in this process."""

import importlib
from collections.abc import Callable, Sequence
from importlib.util import find_spec


def command_main(module: str) -> Callable[[Sequence[str]], int]:
    """Return the ``main`` that ``python -m MODULE`` runs: of the module, or of the package's ``__main__``."""
    spec = find_spec(module)
    is_package = spec is not None and bool(spec.submodule_search_locations)
    return importlib.import_module(f"{module}.__main__" if is_package else module).main
