"""A run of which each file is a link into ../blobs, as a hub lays it down. RIGHT: read; or refused with cp -rL."""

import os
import shutil

from common import main, out, refused, run

import ejax


@main
def report():
    folder = run(trainer={"iterations": 1}).run_dir
    for number, file in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        (out() / "blobs").mkdir(exist_ok=True)
        shutil.move(file, blob := out() / "blobs" / str(number))
        file.symlink_to(os.path.relpath(blob, file.parent))
    text = refused(ejax.load, folder)
    return f"{'REFUSED' if 'cp -rL' in text else 'WRONG'} {text[:300]}" if text else "RIGHT"
