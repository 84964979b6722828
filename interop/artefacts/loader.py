"""``loader.zip`` of an export: the modules of interop that run its policy, for machines without ejax.

    sys.path.insert(0, "exported/loader.zip")       # Python imports from a zip
    from interop.policy import load_policy          # by torch; or interop.onnx_policy, by ONNX Runtime

They need torch and numpy, or onnxruntime and numpy.
"""

import ast
import io
import zipfile
from pathlib import Path

from ejax.schema.writing import replace_file

FILE = "loader.zip"
_FIRST = ("interop.policy", "interop.onnx_policy")
_ROOT = Path(__file__).parents[2]
_TIME = (1980, 1, 1, 0, 0, 0)
"""Time of each member: the same modules make the same bytes."""


def write_loader(folder: Path) -> None:
    """Write the zip into the folder of an export."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for source in sorted(needed_files()):
            member = zipfile.ZipInfo(str(source.relative_to(_ROOT)), _TIME)
            file.writestr(member, source.read_bytes(), zipfile.ZIP_DEFLATED)
    replace_file(folder / FILE, content.getvalue())


def needed_files() -> set[Path]:
    """Find the modules of interop that loading imports at its start, and the packages that they are in."""
    found: set[Path] = set()
    waiting = [*_FIRST]
    while waiting:
        parts = waiting.pop().split(".")
        files = [_ROOT.joinpath(*parts[:depth], "__init__.py") for depth in range(1, len(parts))]
        own = _ROOT.joinpath(*parts).with_suffix(".py")
        if own in found or not own.is_file():
            continue
        found |= {*files, own}
        tree = ast.parse(own.read_text(encoding="utf-8"))
        imported = [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
        waiting += [name for name in imported if name.startswith("interop.")]
    return found
