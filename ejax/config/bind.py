"""Values that a config leaves open until the run is known: bound once, and from then on part of the config."""

from ejax.config.run_config import RunConfig


def bind(config: RunConfig, num_updates: int | None = None) -> RunConfig:
    """The config with nothing left open: what an update sees, and what ``resolved.json`` holds. Idempotent.

    Args:
        num_updates: horizon of a learning-rate schedule that has none of its own; of a resumed run, the updates that
            it was started for. None: ``trainer.num_updates``.
    """
    algorithm = config.algorithm
    options = algorithm.record.bind(algorithm.cfg, num_updates or config.trainer.num_updates)
    return config.model_copy(update={"algorithm": algorithm.model_copy(update={"cfg": options})})
