"""``ejax distill --config FILE teacher=RUN``: teach a policy what another one does, or continue such a run.

The loop is that of ``ejax train``, and so are all options; ``teacher`` means ``algorithm.cfg.teacher``.
"""

from ejax.runtime.process_exit import exit_on_signal, exit_with

if __name__ == "__main__":
    exit_on_signal()  # before the imports below, which take seconds

import sys

from ejax.train import main as train

_TEACHER = "teacher="


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code, as ``ejax train``'s does."""
    words = sys.argv[1:] if argv is None else argv
    # the one key that every such command has
    spelt = [f"algorithm.cfg.{word}" if word.startswith(_TEACHER) else word for word in words]
    return train(spelt, "distill")


if __name__ == "__main__":
    exit_with(main)
