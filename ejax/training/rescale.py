"""A run that goes on with another number of devices: the same environments and minibatches, shared out anew."""

from pathlib import Path

from ejax.config import ConfigError, Problem, RunConfig, parse_config
from ejax.training.facts import read_facts
from ejax.training.run_dir import RunMeta


def share_out(config: RunConfig, checkpoint: Path, num_devices: int) -> tuple[RunConfig, tuple[str, ...]]:
    """The config for this number of devices that computes what the checkpoint's did, and a note if they differ.

    Options that are meant for one device (``num_envs``, ``batch_size``) grow as the devices get fewer; minibatches keep
    the strata of the devices that the run was begun on.

    Raises:
        ConfigError: the environments, or the rows of a minibatch, cannot be shared by so many.
    """
    meta = read_facts(checkpoint / "meta.json", RunMeta)
    was = meta.get("num_devices")
    if was is None:  # an older checkpoint
        return config, ()
    before = meta["config"]["trainer"]["num_envs"]
    if (was, before) == (num_devices, config.trainer.num_envs):
        return config, ()
    if rest := (was * before) % num_devices:
        text = f"the run has {was} x {before} environments, of which {num_devices} devices would leave {rest}"
        raise ConfigError([Problem("trainer.num_envs", f"{text}; give a number of devices that divides them")])
    num_envs = was * before // num_devices
    saved = parse_config(meta["config"]).algorithm.cfg
    options = config.algorithm.record.share_out(saved, was, num_devices)
    trainer = config.trainer.model_copy(update={"num_envs": num_envs})
    algorithm = config.algorithm.model_copy(update={"cfg": options})
    note = f"{num_devices} devices, {num_envs} environments on each; the checkpoint was made on {was} with {before}"
    return config.model_copy(update={"trainer": trainer, "algorithm": algorithm}), (note,) if was != num_devices else ()
