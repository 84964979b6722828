"""``ejax pretrain --config FILE``: clone the behaviour of demonstrations, or continue such a run.

The loop is that of ``ejax train``, and so are all options; steps are frames of demonstrations.
"""

from ejax.runtime.process_exit import exit_on_signal, exit_with

if __name__ == "__main__":
    exit_on_signal()  # before the imports below, which take seconds

from ejax.train import main as train


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code, as ``ejax train``'s does."""
    return train(argv, "pretrain")


if __name__ == "__main__":
    exit_with(main)
