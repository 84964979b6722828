"""A run that a Mac had in hand: .DS_Store, ._names. RIGHT: the policy is loaded, or the file to remove is named."""

from common import main, refused, run

import ejax


@main
def report():
    folder = run(trainer={"iterations": 1}).run_dir
    for path in [folder, *(each for each in sorted(folder.rglob("*")) if each.is_dir())]:
        (path / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
        for file in [each for each in sorted(path.iterdir()) if each.is_file() and each.name[0] != "."]:
            file.with_name(f"._{file.name}").write_bytes(b"\0\5\26\7")
    text = refused(ejax.load, folder)
    named = text is not None and (".DS_Store" in text or "._" in text) and "remove" in text
    return f"{'REFUSED' if named else 'WRONG'} {text[:300]}" if text else "RIGHT"
