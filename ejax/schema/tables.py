"""Tables next to the code: data that ejax ships."""

import tomllib
from pathlib import Path
from typing import Any


def tables_beside(module: str) -> dict[str, Any]:
    """Read the TOML next to a module, of the same name, ``tables_beside(__file__)``: data that ejax ships."""
    return tomllib.loads(Path(module).with_suffix(".toml").read_text("utf-8"))
