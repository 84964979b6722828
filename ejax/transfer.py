"""``ejax transfer RUN``: ``ejax evaluate RUN --engine all``, by its name of one release ago."""

from ejax.runtime.process_exit import exit_on_signal, exit_with

if __name__ == "__main__":
    exit_on_signal()  # before the imports, which take seconds

import sys

from ejax.evaluate import main as evaluate


def main(argv: list[str] | None = None) -> int:
    """Run ``ejax evaluate`` by this command's options. Returns the exit code."""
    words = [word.replace("--engines", "--engine") for word in (sys.argv[1:] if argv is None else argv)]
    print(
        "ejax transfer: use ejax evaluate RUN --engine A,B; this name ends with the next release",
        file=sys.stderr,
    )
    return evaluate(words if any(word.startswith("--engine") for word in words) else ["--engine", "all", *words])


if __name__ == "__main__":
    exit_with(main)
