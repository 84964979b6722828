"""A run that goes on with another number of devices: the same environments and minibatches, shared out anew."""

import json
from pathlib import Path
from typing import Any

from ejax.config import ConfigError, Problem, RunConfig
from ejax.logs.json_records import read_facts
from ejax.schema.messages import short_repr
from ejax.store.checkpoint import CheckpointError
from ejax.store.run_dir import RunMeta


def rescale_for_devices(config: RunConfig, checkpoint: Path, num_devices: int) -> tuple[RunConfig, tuple[str, ...]]:
    """The config for this number of devices that computes what the checkpoint's did, and a note if they differ.

    Options that are meant for one device (``num_envs``, ``batch_size``) grow as the devices get fewer; minibatches keep
    the strata of the devices that the run was begun on.

    Raises:
        ConfigError: the environments, or the rows of a minibatch, cannot be shared by so many.
        CheckpointError: the checkpoint's config is no config of this run.
    """
    meta = read_facts(checkpoint / "meta.json", RunMeta)
    was = meta.get("num_devices")
    if was is None:  # an older checkpoint
        return config, ()
    before, saved = _saved_options(config, checkpoint, meta["config"])
    if (was, before) == (num_devices, config.trainer.num_envs):
        return config, ()
    if rest := (was * before) % num_devices:
        text = f"the run has {was} x {before} environments, of which {num_devices} devices would leave {rest}"
        raise ConfigError([Problem("trainer.num_envs", f"{text}; give a number of devices that divides them")])
    num_envs = was * before // num_devices
    options = config.algorithm.record.rescale_for_devices(saved, was, num_devices)
    trainer = config.trainer.model_copy(update={"num_envs": num_envs})
    algorithm = config.algorithm.model_copy(update={"cfg": options})
    note = f"{num_devices} devices, {num_envs} environments on each; the checkpoint was made on {was} with {before}"
    return config.model_copy(update={"trainer": trainer, "algorithm": algorithm}), (note,) if was != num_devices else ()


def _saved_options(config: RunConfig, checkpoint: Path, saved: dict[str, Any]) -> tuple[int, Any]:
    """Read ``num_envs`` and the algorithm's options of a checkpoint. Names in it are compared, never resolved."""
    try:
        num_envs, algorithm = saved["trainer"]["num_envs"], saved["algorithm"]
        if algorithm["name"] != config.algorithm.name:
            raise ValueError(
                f"it names the algorithm {short_repr(algorithm['name'])}, the run's is {config.algorithm.name}"
            )
        if type(num_envs) is not int or num_envs < 1:
            raise ValueError(f"trainer.num_envs is {short_repr(num_envs)}")
        return num_envs, type(config.algorithm.cfg).model_validate_json(json.dumps(algorithm["cfg"]), strict=True)
    except (KeyError, TypeError, ValueError) as error:  # pydantic's is a ValueError
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
        raise CheckpointError(f"the config in {checkpoint / 'meta.json'} is no config of this run: {reason}") from error
