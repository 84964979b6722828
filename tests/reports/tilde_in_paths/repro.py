"""output_dir: ~/runs. RIGHT: it is below the home folder; or refused. WRONG: a folder named "~" where one stands."""

import os

from common import config, main, out, refused

from ejax.run import train


@main
def report():
    before, home = os.getcwd(), os.environ.get("HOME")
    (out() / "home").mkdir()
    os.environ["HOME"] = str(out() / "home")
    os.chdir(out())
    try:
        text = refused(lambda: train(config(trainer={"output_dir": "~/runs", "iterations": 1})))
    finally:
        os.chdir(before)
        os.environ.pop("HOME") if home is None else os.environ.update(HOME=home)
    if text or (out() / "~").exists():
        return f"{'REFUSED' if text and '~' in text else 'WRONG'} {text or 'a folder named ~'}"
    return "RIGHT" if list((out() / "home" / "runs").glob("report_*")) else "WRONG the run is elsewhere"
