"""``ejax export RUN --to DIR``: a trained policy for use outside ejax, with proof that it is the same.

<DIR>/
    policy.{pt,safetensors,pt2,onnx,torchscript,stablehlo}     as chosen by --formats
    policy.json         the policy's structure (``interop.twin.spec``) or its program (``interop.twin.program``); makes
                        the torch twin with policy.pt
    contract.json       inputs and outputs (``interop.artefacts.contract``)
    episode.json        an episode to replay: its start, its return (``interop.artefacts.episode``); missing where
                        the environment is outside JAX, has no end, or is given clipped actions that it does not clip
    observations.npz    the observations it was checked on, with JAX's answers
    tokenizer.json      words to tokens, of a policy that reads text (``interop.twin.text``), or with minilm.npz,
                        a frozen MiniLM, to the states of tokens (``interop.twin.sentences``)
    texts.json          texts that it was checked on, with JAX's tokens
    leapp.{yaml,onnx}   with --leapp a bundle for runtimes of robots (``interop.artefacts.leapp_bundle``)
    loader.zip          modules that load policy.pt and policy.onnx without ejax (``interop.artefacts.loader``)
    parity.json         the errors of each artefact, what was allowed, SHA-256 of each file, versions

``ejax verify DIR`` repeats the check, without jax if need be.
"""

import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
from pydantic import BaseModel, ConfigDict, PositiveInt

from ejax.envs.actions import action_form
from ejax.envs.check import clips_actions
from ejax.envs.host.calls import HostEnvError, closing
from ejax.logs.console import working
from ejax.logs.json_records import FactsError, read_facts
from ejax.play.saved_policy import chosen_checkpoint, restore_policy
from ejax.policies.normalize import acting_statistics
from ejax.runtime.device import prepare_jax
from ejax.runtime.process_exit import exit_with, refused
from ejax.schema.command_line import CommandParser
from ejax.schema.plain_files import a_folder, a_path, to_json
from ejax.schema.trust import add_trust_option, trust_words
from ejax.schema.values import add_policy_options
from ejax.schema.writing import make_folder, move, replace_file, sync
from ejax.store.checkpoint import CheckpointError, verify_checkpoint
from ejax.store.run_dir import RunDirectory, open_policy_run
from ejax.training.environments import build_env
from ejax.training.evaluators import read_fresh
from ejax.training.watchdog import guarded_calls
from ejax.types import Env, HostEnv, Params, Policy
from interop.artefacts import leapp_bundle, loader
from interop.artefacts.cases import observe_env
from interop.artefacts.contract import make_contract
from interop.artefacts.episode import reference_episode
from interop.artefacts.formats import FORMATS, JAX_FORMAT, Trained, installed_versions
from interop.artefacts.parity import ConversionError, save_cases, without_ties
from interop.artefacts.texts import check_texts
from interop.checkpoints.weights import state_dict_from_params
from interop.exporters.record import actor_function, described, exporter_of_any, observed
from interop.standalone_verify import SCHEMA_VERSION, Case, ParityError, raise_on_problems, sha256
from interop.twin.kinds import Spec, spec_to_json
from interop.twin.spec import MEMORY, NEXT_MEMORY, ProgramSpec
from interop.verify import check_artefacts, check_bundle, format_table

Clipping = Literal["auto", "space", "none"]
_UNBOUNDED = ("normal", "flow", "own")
"""Heads whose actions may be beyond their space."""
LEROBOT = "lerobot"
"""The one format that is not checked by ``ejax verify``: a folder for LeRobot, of pi0 and smolvla."""
_NUM_ENVS = 16
"""Rows of an environment outside JAX."""


class MissingPackageError(RuntimeError):
    """A requested format's packages are not installed."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, 1 for a mismatch, 2 for anything that cannot be exported."""
    args = _parser().parse_args(argv)
    trust_words(args.trust)
    try:
        options = {name: getattr(args, name) for name in ("member", "checkpoint", "leapp")}
        with working(f"exporting {args.run} to {args.to}"):
            formats = None if args.formats is None else args.formats.split(",")
            report = export_run(args.run, args.to, formats, clipping=args.clip, **options)
    except ParityError as error:
        print("FAIL")
        return refused("ejax export", error, 1)
    except (CheckpointError, HostEnvError, MissingPackageError, OSError, ValueError) as error:
        return refused("ejax export", error)
    if args.formats == LEROBOT:
        print(f"{args.to}: {report['weights']:,} weights as LeRobot names them, read back the same")
        return 0
    shown = report["artefacts"] | ({"leapp": report["leapp"]} if args.leapp else {})
    print(format_table(shown, args.to, verbose=args.verbose))
    for name in report["artefacts"]:
        if notice := FORMATS[name].deprecated:
            print(f"ejax export: {name} is deprecated: {notice}", file=sys.stderr)
    for name, reason in report.get("left_out", {}).items():
        print(f"ejax export: {name} is left out: {reason}", file=sys.stderr)
    print(f"action clipping: {report['clipping']}")
    for kind, facts in report.get("evaluated", {}).items():
        reached = f"success {facts['eval/success_rate']:.3f}, " if "eval/success_rate" in facts else ""
        print(f"by its {kind}: {reached}return {facts['eval/avg_reward']:.4g} in {facts['episodes']:,} episodes")
    print(f"{args.to / 'parity.json'}  sha256 {sha256(args.to / 'parity.json')}")
    return 0


def export_run(
    run: Path,
    to: Path,
    formats: Sequence[str] | None = None,
    *,
    member: int | None = None,
    checkpoint: str | None = None,
    clipping: Clipping = "auto",
    leapp: bool = False,
) -> dict[str, Any]:
    """Export a checkpoint of a run into the new folder ``to``, see ``export_policy``.

    Args:
        member: of a population. None: the best one.
        checkpoint: ``best``, ``latest`` or a path. None: the best one, or else the latest.

    Raises:
        As ``export_policy``, and of the format lerobot as ``export_lerobot``. FileNotFoundError: ``run`` is not a run.
        CheckpointError: no such checkpoint, or damaged.
    """
    _check_names(formats)
    directory, config = open_policy_run(run, member)
    prepare_jax("cpu")
    path = chosen_checkpoint(directory, checkpoint, "ejax export")
    meta = verify_checkpoint(path)
    with tempfile.TemporaryDirectory() as scratch, guarded_calls(config.env.id, config.trainer.collector):
        env = build_env(config, num_envs=_NUM_ENVS, quarantine=Path(scratch))
        with closing(env) if isinstance(env, HostEnv) else nullcontext():
            policy, params = restore_policy(config, env, path)
            if formats is not None and [*formats] == [LEROBOT]:
                from interop.exporters.lerobot import export_lerobot  # of pi0 and smolvla alone

                return export_lerobot(policy, params, env, to)
            origin = {
                "checkpoint": path.name,
                "global_step": meta["global_step"],
                "env": config.to_dict()["env"],
                "matmul_precision": config.trainer.matmul_precision,
                "evaluated": evaluations_of(directory, path, meta["global_step"]),
            }
            seed = config.trainer.eval_seed
            options: Any = {"origin": origin, "clipping": clipping, "seed": seed, "leapp": leapp}
            return export_policy(policy, params, env, to, formats, **options)


def evaluations_of(run: RunDirectory, checkpoint: Path, step: int) -> dict[str, dict[str, Any]]:
    """Read what a run's folder says of a checkpoint's success and return: ``mode`` (fresh episodes of the training's
    end, the certificate of a policy that ships, or ``ejax evaluate``, whichever are most) and ``samples``; without what
    nobody evaluated."""
    found = {"mode": [x for x in read_fresh(run.path).values() if x["step"] == step]}
    for kind, ending in {"mode": "", "samples": "_samples"}.items():
        with suppress(FactsError):
            certificate = read_facts(run.path / "certificate.json", _Evaluated)
            found.setdefault(kind, []).append(certificate[kind] | {"episodes": certificate["episodes"]})
        with suppress(FactsError):
            facts = read_facts(run.path / "evaluations" / f"{checkpoint.name}{ending}.json", _Evaluated)
            found.setdefault(kind, []).append(facts)
    most = {kind: max(each, key=lambda facts: facts["episodes"]) for kind, each in found.items() if each}
    return {
        kind: {name: x for name, x in facts.items() if name == "episodes" or name.startswith("eval/")}
        for kind, facts in most.items()
    }


class _Evaluated(BaseModel):
    """The form of what ``ejax evaluate`` writes; its other keys are tags."""

    model_config = ConfigDict(extra="allow")
    episodes: PositiveInt


def export_policy(
    policy: Policy,
    params: Params,
    env: Env | HostEnv,
    to: Path,
    formats: Sequence[str] | None,
    *,
    origin: Mapping[str, Any],
    clipping: Clipping = "auto",
    seed: int | None = None,
    leapp: bool = False,
) -> dict[str, Any]:
    """Export a policy into the new folder ``to``, which appears only if every artefact passed.

    Args:
        env: where the policy was trained; the observations that it is checked on come from there.
        formats: None: all; of a policy that torch cannot run those that can be made, the others under ``left_out``.
        origin: ``checkpoint`` (a name), ``global_step``, ``env`` {``id``, ``cfg``} and, if they are known, the
            ``matmul_precision`` of the training and what was ``evaluated``: written down as they are. The proof itself
            is for float32.
        clipping: of a normal's actions to the env's action space. ``auto``: only if the env itself clips to it, so that
            the exported policy does what was trained.
        seed: of the start of the episode in ``episode.json``. None: there is no such file.
        leapp: with a LEAPP bundle, which is made of the format onnx.

    Returns:
        The content of ``parity.json``.

    Raises:
        ParityError: an artefact does not answer as JAX does.
        MissingPackageError: a package that one of the formats needs is not installed.
        ValueError: an unknown format, or a ConversionError: one that needs torch, which cannot run the policy.
        FileExistsError: ``to`` holds files already.
    """
    _check_names(formats)
    if to.is_symlink() or (to.exists() and any(to.iterdir())):
        there = "is a link" if to.is_symlink() else f"holds files already, such as {min(to.iterdir()).name}"
        raise FileExistsError(f"{to} {there}; choose a new folder")
    with tempfile.TemporaryFile(dir=make_folder(to.parent)):
        pass  # now: what cannot be written is not computed
    exporter, written = exporter_of_any(policy), _written_formats(formats)
    exported, spec = described(exporter, policy, env)
    taken = {MEMORY, NEXT_MEMORY} & observed(env).keys()
    if taken := taken | {*spec.reads} & {*(spec.outputs if "onnx" in written else ())}:  # ONNX has one name for one
        raise ValueError(f"an export reserves the names {', '.join(sorted(taken))}; rename the observation's")
    for name, mean, std in acting_statistics(params):
        text = "hardly varied in training: what differs is divided by 0.01, and not clipped"
        for i in np.flatnonzero(std < 1e-3):
            print(f"ejax export: {name}[{i}], {mean[i]:.4g} ± {std[i]:.2g}, {text}", file=sys.stderr)
    params = exporter.exported_params(policy, params)
    if leapp and (spec.text is not None or "onnx" not in written):
        reason = "this policy reads text" if spec.text is not None else "onnx is not chosen"
        raise ValueError(f"--leapp needs the format onnx of a policy that reads no text; {reason}")
    env_clips = clips_actions(env)
    clips, reason = _decide_clipping(clipping, env.action_space, env_clips, spec)
    form = action_form(env.action_space, clips=clips)
    shape = None if form.action_shape == spec.output_shape("action") else form.action_shape
    spec = replace(spec, clip=form.clip, whole=form.whole, start=form.start, action_shape=shape)
    # the actions that the run itself gives, so that an artefact of others fails
    own = action_form(env.action_space, clips=bool(env_clips) if clipping == "auto" else clips)._replace(dtype=None)
    seen = observe_env(exported, env, params, spec)
    cases = exporter.draw_cases(exported, params, spec, seen, env.observation_space, own)
    cases = [case for case in map(without_ties, cases) if len(case.expected["action"])] if own.whole else cases
    documents = exporter.documents(exported, seen)
    acting, left_out = exporter_of_any(exported), dict[str, str]()
    function = actor_function(acting, exported, params, spec)
    tensors = (acting.state_dict or state_dict_from_params)(exported, params)
    if isinstance(spec, ProgramSpec) and written != [JAX_FORMAT]:
        from interop.exporters.program import with_program  # here: it needs torch

        try:
            spec = with_program(spec, function)
        except ConversionError as error:
            if formats or JAX_FORMAT not in written or leapp:
                raise
            left_out = {name: str(error) for name in written if name != JAX_FORMAT}
            written = [JAX_FORMAT]
    trained = Trained(function, spec, tensors, origin["global_step"])
    documents["contract.json"] = make_contract(origin["env"], env, spec, seen, reason)
    # a policy that only the export clips has other returns than the trained one
    as_trained = not clips or bool(env_clips)
    if seed is not None and as_trained and not isinstance(env, HostEnv):
        episode = reference_episode(exported, env, params, seed)
        documents |= {} if episode is None else {"episode.json": episode}
    facts = {
        "checkpoint": origin["checkpoint"],
        "global_step": origin["global_step"],
        "clipping": reason,
        "matmul_precision": {"training": origin.get("matmul_precision"), "proof": "float32"},
        **({"evaluated": origin["evaluated"]} if origin.get("evaluated") else {}),
        **exporter.facts(policy),
    }
    facts |= {"left_out": left_out} if left_out else {}
    return _write(to, written, trained, documents, cases, facts, leapp)


def _decide_clipping(
    clipping: Clipping, space: gymnasium.Space, env_clips: bool | None, spec: Spec
) -> tuple[bool, str]:
    """Decide whether to clip, and why, for the contract. ``env_clips`` None: not known."""
    form = action_form(space, clips=True)
    if form.whole:
        return True, "to whole numbers within the action space, as in training"
    if spec.head not in _UNBOUNDED:
        return False, f"none: {spec.head} actions are inside their space"
    if form.clip is None:
        return False, "none: the action space has no finite bounds"
    if clipping == "none":
        return False, "none: switched off"
    if env_clips:
        return True, "to the action space, as the environment does"
    if clipping == "space":
        if env_clips is None:
            return True, "to the action space, as requested; whether the environment does is not known"
        return True, "to the action space, as requested; the environment does not, so this is not the trained policy"
    if env_clips is None:
        return False, "none: the environment does not say whether it clips (clip_actions), so that is not known"
    return False, "none: the environment acts on actions beyond its action space, which clipping would change"


def _write(
    to: Path,
    formats: Sequence[str],
    trained: Trained,
    documents: Mapping[str, Any],
    cases: list[Case],
    facts: dict[str, Any],
    leapp: bool,
) -> dict[str, Any]:
    """Write and check everything in a folder next to ``to``, then move it there. Returns the certificate."""
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".partial-{to.name}-") as scratch:
        # next to ``to``, on the same file system: the last step is a rename
        made = Path(scratch) / "export"
        made.mkdir()
        replace_file(made / "policy.json", spec_to_json(trained.spec))
        for name, document in documents.items():
            text = document if isinstance(document, str | bytes) else to_json(document, "null", indent=2)
            replace_file(made / name, text)
        save_cases(made / "observations.npz", cases)
        check_texts(made, trained.spec)
        for name in formats:
            FORMATS[name].write(made / FORMATS[name].file, trained)
        if [*formats] != [JAX_FORMAT]:
            loader.write_loader(made)
        artefacts = check_artefacts(made, trained.spec, cases, formats, trust=True)
        if leapp:
            leapp_bundle.write_bundle(made, trained.spec, installed_versions())
            artefacts["leapp"] = check_bundle(made, trained.spec, cases, installed_versions())
        raise_on_problems(artefacts)
        report = {
            "schema_version": SCHEMA_VERSION,
            **facts,
            "rows": {case.name: len(case.expected["action"]) for case in cases},
            "largest_allowed": {
                case.name: {name: float(np.nanmax(x)) for name, x in case.allowed.items()} for case in cases
            },
            **({"leapp": artefacts.pop("leapp")} if leapp else {}),
            "artefacts": artefacts,
            "sha256": {file.name: sha256(file) for file in sorted(made.iterdir())},
            "versions": {"python": platform.python_version(), "machine": platform.machine(), **installed_versions()},
        }
        replace_file(made / "parity.json", to_json(report, "null", indent=2))
        if to.exists():
            to.rmdir()  # empty, and os.replace does not replace a folder everywhere
        sync(made)
        move(made, to)
    return report


def _check_names(formats: Sequence[str] | None) -> None:
    if formats is not None and LEROBOT in formats and len(formats) > 1:
        raise ValueError(f"--formats: {LEROBOT} is a folder in LeRobot's layout, without other files; pass it alone")
    unknown = [name for name in formats or () if name not in (*FORMATS, LEROBOT)]
    if unknown or (formats is not None and not formats):
        raise ValueError(
            f"--formats: unknown {', '.join(unknown) or 'empty list'}; allowed: {', '.join((*FORMATS, LEROBOT))}"
        )


def _written_formats(formats: Sequence[str] | None) -> list[str]:
    """Return the formats to make. ``formats``: as in ``export_policy``."""
    chosen = list(formats or FORMATS)
    missing = {name: FORMATS[name].missing(to_write=True) for name in chosen}
    lacking = {name: packages for name, packages in missing.items() if packages}
    if lacking:
        packages = " ".join(sorted({package for some in lacking.values() for package in some}))
        others = [name for name in chosen if name not in lacking]
        without = f", or leave them out: --formats {','.join(others)}" if others else ""
        text = f"not installed, but needed for {', '.join(lacking)}: pip install {packages}{without}"
        raise MissingPackageError(text)
    return chosen


def _parser() -> CommandParser:
    parser = CommandParser("ejax export", description="Export a trained policy, and verify it.")
    parser.add_argument("run", type=a_path, metavar="RUN", help="folder of a run, or a shipped policy")
    add_policy_options(parser)
    parser.add_argument("--to", type=a_folder, required=True, metavar="DIR", help="folder to create")
    formats = f"any of {','.join(FORMATS)}; default: all possible ones; or {LEROBOT}"
    parser.add_argument("--formats", metavar="A,B", help=formats)
    parser.add_argument(
        "--clip",
        choices=("auto", "space", "none"),
        default="auto",
        help="clip actions to the action space: if the environment does (auto, the default), always, or never",
    )
    parser.add_argument("--leapp", action="store_true", help="also write a LEAPP bundle: leapp.yaml and leapp.onnx")
    parser.add_argument("-v", "--verbose", action="store_true", help="print errors in units in the last place too")
    add_trust_option(parser)
    return parser


if __name__ == "__main__":
    exit_with(main)
