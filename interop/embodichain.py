"""Move training between EmbodiChain and ejax: checkpoints of one become checkpoints of the other. Needs ejax[torch].

From ejax to EmbodiChain:

    ejax embodichain to-pt RUN --out FILE.pt

    --layout 0.3 (default)  the policy, the optimizer and the schedule, as EmbodiChain 0.3 resumes from:
                            ``embodichain train-rl --config … --resume FILE.pt``. It warns that the file cannot prove
                            that it belongs to this config; with ``--like ITS.pt``, any checkpoint of that config by
                            EmbodiChain itself (such as the one that training came from), it can: schema 2, no warning
    --layout head           what the trainer of 0.2 writes (it cannot resume)
    --layout seed           global_step and policy only: which the policy of every version loads

The policy of each version loads each of these with ``load_state_dict(torch.load(FILE)["policy"], strict=True)``.

From EmbodiChain to ejax, from a file of any version:

    ejax train --config train.yaml --resume FILE.pt
    ejax train --config train.yaml policy.init_from=FILE.pt

The first continues the training: parameters, normalizers, optimizer moments, learning rate, schedule and step count
are the file's. Environments start new episodes, as they do when EmbodiChain resumes, and the search for the best
evaluation starts over. The second takes the parameters alone and starts a new training from them, at step 0.

    ejax embodichain from-pt FILE.pt --config train.yaml --run DIR

makes a run folder with one checkpoint and trains nothing: ``--run DIR --resume latest`` continues it where torch
is missing; ``ejax evaluate`` and ``ejax export`` take it as any other. ``--policy-only`` as ``policy.init_from``.

A checkpoint moves state; what is computed with it is the config's matter: ``compat: embodichain-0.3`` (or ``-0.2``,
``-seed``) at its top makes updates those of that release.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ejax.config import ConfigError, Problem, RunConfig, load_config
from ejax.config.run_config import bind
from ejax.runtime.device import prepare_jax
from ejax.runtime.process_exit import exit_with, refused
from ejax.schema.command_line import CommandParser
from ejax.schema.plain_files import a_folder, a_path, a_target, expanded
from ejax.schema.trust import add_trust_option, trust_words
from ejax.store.checkpoint import CheckpointError, load_checkpoint
from ejax.store.run_dir import RunDirectory, create_run_directory, open_policy_run
from ejax.store.schedule_file import write_schedule
from ejax.training.build import build
from ejax.training.parts import rows_per_update

if TYPE_CHECKING:  # its module needs torch
    from interop.checkpoints.state import PtLayout

_NOT_DISTRIBUTED = (
    "got true: the run's folder depends on how many devices the training machine has; "
    "continue there by ejax train --config … --resume FILE.pt"
)


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    args = _parser().parse_args(argv)
    trust_words(args.trust)
    try:
        if args.command == "to-pt":
            export_pt(
                args.run, args.out, member=args.member, checkpoint=args.checkpoint, layout=args.layout, like=args.like
            )
            print(f"wrote {args.out}")
        else:
            config = load_config(args.config)
            for note in import_pt(args.file, config, args.run, policy_only=args.policy_only):
                print(f"note: {note}")
            print(f"continue with: {RunDirectory(args.run, config.trainer.exp_name).resume_command}")
    except (CheckpointError, OSError, TypeError, ValueError) as error:
        return refused("ejax embodichain", error)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return refused("ejax embodichain", "the files are torch's: pip install -e '.[torch]' in ejax's folder")
    return 0


def export_pt(
    run: Path,
    out: Path,
    *,
    member: int | None = None,
    checkpoint: str = "latest",
    layout: "PtLayout" = "0.3",
    like: Path | None = None,
) -> Path:
    """Write a checkpoint of an ejax run as ``out``, EmbodiChain's file.

    Args:
        member: of a population. None: the best one.
        checkpoint: ``latest``, ``best`` or a path.
        like: a checkpoint that EmbodiChain 0.3 wrote of the same config: the new one is then of schema 2.

    Raises:
        ValueError: EmbodiChain has no such policy or optimizer, or would act otherwise with these parameters.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    from ejax.play.saved_policy import chosen_checkpoint
    from interop.checkpoints.file import write_pt
    from interop.checkpoints.state import pt_payload

    prepare_jax("cpu")
    directory, config = open_policy_run(run, member)
    path = chosen_checkpoint(directory, checkpoint, "ejax embodichain")
    # on as many devices as there were: only the training's state is read, and it is replicated
    trainer = config.trainer.model_copy(update={"distributed": False})
    parts = build(config.model_copy(update={"trainer": trainer}))
    train, meta = load_checkpoint(path, parts.state.train, "train.")
    state = replace(parts.state, train=train)
    return write_pt(out, pt_payload(config, parts, state, meta, layout=layout, like=like))


def import_pt(file: Path, config: RunConfig, run: Path, *, policy_only: bool = False) -> list[str]:
    """Make the folder ``run`` of an ejax run that continues from EmbodiChain's ``file``.

    Args:
        policy_only: leave the optimizer's state out.

    Returns:
        Notes on what could not be taken over, or only in part.

    Raises:
        ValueError: not a checkpoint of the config's policy and optimizer. FileExistsError: ``run`` is a run already.
        ConfigError: ``trainer.distributed``.
    """
    from interop.checkpoints.state import read_state

    if config.trainer.distributed:
        raise ConfigError([Problem("trainer.distributed", _NOT_DISTRIBUTED)])
    prepare_jax("cpu")
    parts = build(config)
    state, notes = read_state(file, config, parts, policy_only=policy_only)
    directory = create_run_directory(config, run)
    num_updates = int(state.update)
    if parts.stepper.versions() is not None:  # of the rollouts made there, each by the newest parameters
        write_schedule(directory.path, 0, range(num_updates))
    meta = {
        "global_step": num_updates * rows_per_update(config, parts),
        "num_updates": num_updates,
        "best_eval_value": None,  # the file does not hold the policy that it belongs to
        "last_eval_metrics": {},
        "config": bind(config).to_dict(),
        "imported_from": str(file),
    }
    directory.save(state, meta, keep=config.trainer.keep_checkpoints)
    return notes


def _parser() -> CommandParser:
    parser = CommandParser("ejax embodichain", description="Convert checkpoints to and from EmbodiChain's format.")
    commands = parser.add_subparsers(dest="command", required=True)
    to_pt = commands.add_parser("to-pt", help="convert a run of ejax to EmbodiChain's .pt file")
    to_pt.add_argument("run", type=a_path, metavar="RUN", help="the run's folder")
    to_pt.add_argument("--out", type=a_target, required=True, metavar="FILE.pt")
    to_pt.add_argument("--member", type=int, metavar="I", help="of a population (default: the best)")
    to_pt.add_argument("--checkpoint", type=expanded, default="latest", metavar="latest|best|PATH")
    to_pt.add_argument("--layout", default="0.3", choices=("0.3", "head", "seed"), help="version of EmbodiChain")
    to_pt.add_argument("--like", type=a_path, metavar="FILE.pt", help="a checkpoint of EmbodiChain 0.3, same config")
    from_pt = commands.add_parser("from-pt", help="convert EmbodiChain's .pt file to a run of ejax")
    from_pt.add_argument("file", type=a_path, metavar="FILE.pt")
    from_pt.add_argument(
        "--config", type=a_path, required=True, metavar="FILE", help="the training config, JSON or YAML"
    )
    from_pt.add_argument("--run", type=a_folder, required=True, metavar="DIR", help="folder of the new run")
    from_pt.add_argument("--policy-only", action="store_true", help="use only the parameters, in a new training")
    for command in (to_pt, from_pt):
        add_trust_option(command)
    return parser


if __name__ == "__main__":
    exit_with(main)
