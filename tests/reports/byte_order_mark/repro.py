"""A config saved on Windows, UTF-8 with a mark at its start.

RIGHT: it is read, in YAML and JSON; or refused by name.
"""

import json

import yaml
from common import config, main, out, refused

from ejax.config import load_config


@main
def report():
    tree, texts = config().to_dict(), []
    for name, write in (("x.json", json.dumps), ("x.yaml", yaml.safe_dump)):
        (out() / name).write_bytes(write(tree).replace("\n", "\r\n").encode("utf-8-sig"))
        texts.append(refused(load_config, out() / name))
    found = all(text is None or "BOM" in text for text in texts)
    return f"{'RIGHT' if not any(texts) else 'REFUSED' if found else 'WRONG'} {texts}"[:400]
