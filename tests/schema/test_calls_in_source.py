"""Calls in the source of ejax and interop that only some places may make, each with its reason there."""

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from case_tables import cases

ROOT = Path(__file__).parents[2]


@functools.cache
def sources() -> Mapping[str, ast.Module]:
    files = [path for folder in ("ejax", "interop") for path in (ROOT / folder).rglob("*.py")]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in files}


def found(named: Callable[[ast.AST], Iterable[str]]) -> set[tuple[str, str]]:
    """Return ``(file, name)`` of all that ``named`` finds in a node."""
    return {(file, name) for file, tree in sources().items() for node in ast.walk(tree) for name in named(node)}


def modes(call: ast.Call) -> list[str]:
    return [ast.unparse(each) for each in (*call.args, *(pair.value for pair in call.keywords))]


_OPENS = re.compile(
    r"(.*\.)?(fromfile|from_file|from_xml_path|genfromtxt|load_file|loadtxt|memmap|safe_open|ZipFile)|.*\.read_(bytes|text)"
    r"|(json|np|pickle|torch|torch\.\w+|yaml)\.(\w+_)?load|ET\.parse"
)
"""Calls that open a file to read it, by what is called; ``open`` has more to it."""
_READER = "the bounded reader itself"
_OURS = "what this process, or one that it started, has written"
_KERNEL = "a file of the kernel's, about a process"
_SHIPPED = "a file of ejax, or of an installed package"
_CHECKED = "refused before, by "
READS = {
    ("ejax/data/buffer.py", "path.open"): f"{_OURS}: the shared memory",
    ("ejax/data/control.py", "os.open"): f"{_OURS}: for its lock alone",
    ("ejax/data/supervisor.py", "(self.folder / LIFE).read_bytes"): _OURS,
    ("ejax/data/supervisor.py", "(self.folder / SPEC).read_bytes"): _OURS,
    ("ejax/data/worker.py", "Path(folder, ORDER).read_bytes"): _OURS,
    ("ejax/envs/locomotion/clips.py", "np.load"): "of what open_plain has opened",
    ("ejax/envs/locomotion/clips.py", "np.loadtxt"): "of what open_plain has opened",
    ("ejax/envs/locomotion/model.py", "mujoco.MjSpec.from_file"): f"{_CHECKED}check_model_files",
    ("ejax/envs/locomotion/model.py", "ET.parse"): _SHIPPED,
    ("ejax/envs/task/scene.py", "ET.parse"): _SHIPPED,
    ("ejax/config/embodichain/check.py", "Path(__file__).with_name('other_files.toml').read_text"): _SHIPPED,
    ("ejax/envs/task/robots.py", "(ASSETS / 'ur.toml').read_text"): _SHIPPED,
    ("ejax/experts/learner.py", "self._order.read_bytes"): f"{_OURS}: the round, in a folder of mode 700",
    ("ejax/envs/task/robots.py", "(ASSETS / file).read_text"): _SHIPPED,
    ("ejax/envs/mujoco/models.py", "mujoco.MjSpec.from_file"): f"{_CHECKED}check_model_files",
    ("ejax/schema/plain_files.py", "os.open"): _READER,
    ("ejax/schema/tables.py", "Path(module).with_suffix('.toml').read_text"): _SHIPPED,
    ("ejax/schema/writing.py", "os.open"): _READER,
    ("ejax/play/replay.py", "np.load"): "of what open_plain has opened",
    ("ejax/report/page.py", "Path(__file__).with_name(name).read_text"): _SHIPPED,
    ("ejax/training/trace_shares.py", "jax.profiler.ProfileData.from_file"): _OURS,
    ("ejax/store/run_lock.py", "Path(f'/proc/{pid}/stat').read_text"): _KERNEL,
    ("ejax/policies/pretrained/weights.py", "safe_open"): f"{_CHECKED}check_plain",
    ("interop/artefacts/formats.py", "load_file"): f"{_CHECKED}check_plain",
    ("interop/artefacts/formats.py", "torch.export.load"): f"{_CHECKED}check_files, with --trust alone",
    ("interop/artefacts/formats.py", "torch.jit.load"): f"{_CHECKED}check_files, with --trust alone",
    ("interop/standalone_verify.py", "np.load"): f"{_CHECKED}check_plain",
    ("interop/plain_pt.py", "torch.load"): f"{_CHECKED}check_plain",
    ("interop/plain_pt.py", "zipfile.ZipFile"): f"{_CHECKED}check_plain",
    ("interop/standalone_verify.py", "os.open"): _READER,
    ("interop/twin/sentences.py", "np.load"): f"{_CHECKED}check_plain",
    ("interop/artefacts/loader.py", "own.read_text"): _SHIPPED,
    ("interop/artefacts/loader.py", "source.read_bytes"): _SHIPPED,
    ("interop/artefacts/loader.py", "zipfile.ZipFile"): "writes, into memory",
}
"""Module and call, with the reason."""


def opened(node: ast.AST) -> Iterator[str]:
    """Name a call that reads a file, as it stands there."""
    if not isinstance(node, ast.Call):
        return
    called = ast.unparse(node.func)
    if called in ("open", "io.open", "os.open") or (called.endswith(".open") and _is_mode(node.args)):
        if not any(re.fullmatch(r"'[wxa][bt]?'|.*O_(WRONLY|DIRECTORY).*", mode) for mode in modes(node)):
            yield called
    elif _OPENS.fullmatch(called):
        yield called


def _is_mode(args: list[ast.expr]) -> bool:
    """Separate ``path.open("rb")`` from methods of that name which take a key or a file."""
    return not args or (
        isinstance(args[0], ast.Constant) and re.fullmatch(r"[rwxabt+]{1,3}", str(args[0].value)) is not None
    )


_WRITES = re.compile(
    r"os\.(replace|rename|renames|link|symlink|mkfifo|truncate)|shutil\.(copy2?|copyfile|copytree|move|unpack_archive)|.*\.write_(bytes|text)"
    r"|(np|numpy)\.save\w*|.*\bopen_memmap|.*\.tofile|(torch(\.jit|\.onnx|\.export)?|onnx|ET|cv2|plt|imageio)\.(save|dump|imwrite|imsave|savefig)"
    r"|(json|pickle|yaml)\.dump|.*\.(rename|touch|symlink_to|hardlink_to|mkdir|makedirs)|tempfile\.(mkstemp|NamedTemporaryFile)"
)
"""Calls that write a file, or name one, by what is called; ``open`` and ``os.open`` have more to it."""
_WRITER = "the one writer itself"
_OWN_FOLDER = "into a folder that this process has just made, where nobody else's files are"
WRITES = {
    ("ejax/schema/writing.py", name): _WRITER
    for name in ("open", "os.open", "os.mkdir", "os.replace", "place.mkdir", "path.write_bytes")
} | {
    ("ejax/algorithms/host_rows.py", "file.open"): "rows' files, in the folder that place_rows has made below the run",
    ("ejax/algorithms/host_rows.py", "np.lib.format.open_memmap"): "the same, after what had its name was removed",
    ("ejax/data/buffer.py", "path.open"): f"the shared memory, {_OWN_FOLDER}",
    ("ejax/data/buffer.py", "path.touch"): f"the shared memory, {_OWN_FOLDER}",
    ("ejax/data/control.py", "(folder / COUNTS).touch"): _OWN_FOLDER,
    ("ejax/data/supervisor.py", "(self.folder / ORDER).write_bytes"): _OWN_FOLDER,
    ("ejax/data/worker.py", "(folder / LIFE).open"): _OWN_FOLDER,
    ("ejax/data/worker.py", "(folder / SPEC).write_bytes"): _OWN_FOLDER,
    ("ejax/learner.py", "shutil.copytree"): "a run into a folder that the program names; fails where anything is there",
    ("ejax/runtime/streams.py", "os.open"): "os.devnull",
    ("ejax/store/checkpoint.py", "shutil.copytree"): f"links, {_OWN_FOLDER}",
    ("ejax/schema/writing.py", "os.link"): _OWN_FOLDER,
    ("ejax/store/run_dir.py", "path.mkdir"): "fails where anything is there",
    ("ejax/store/run_dir.py", "path.parent.mkdir"): "above the run",
    ("interop/export.py", "made.mkdir"): _OWN_FOLDER,
    ("interop/artefacts/formats.py", "path.write_bytes"): _OWN_FOLDER,
    ("interop/artefacts/formats.py", "torch.save"): _OWN_FOLDER,
    ("interop/artefacts/formats.py", "torch.export.save"): _OWN_FOLDER,
    ("interop/artefacts/leapp_bundle.py", "(folder / name).write_bytes"): _OWN_FOLDER,
    ("interop/artefacts/leapp_bundle.py", "(folder / MODEL).write_bytes"): _OWN_FOLDER,
    ("interop/artefacts/parity.py", "np.savez_compressed"): _OWN_FOLDER,
    ("interop/artefacts/parity.py", "path.open"): _OWN_FOLDER,
    ("ejax/envs/host/guarded.py", "np.savez_compressed"): "into what new_file has opened",
    ("interop/exporters/vla.py", "np.savez"): "into memory",
    ("interop/exporters/lerobot.py", "np.savez_compressed"): "into what new_file has opened",
    ("interop/checkpoints/file.py", "torch.save"): "into what replacing has opened",
}
"""Module and call, with the reason."""


def written(node: ast.AST) -> Iterator[str]:
    """Name a call that writes a file, as it stands there."""
    if not isinstance(node, ast.Call):
        return
    called = ast.unparse(node.func)
    if called in ("open", "io.open", "os.open") or called.endswith(".open"):
        pattern = r"'(?=.*[wxa+])[rwxabt+]+'|.*(O_(WRONLY|RDWR|CREAT)|flags).*"
        if any(re.fullmatch(pattern, mode) for mode in modes(node)):
            yield called
    elif _WRITES.fullmatch(called):
        yield called


PLAIN_JSON = {
    "ejax/config/__main__.py": "counts",
    "ejax/config/load.py": "read back at once",
    "ejax/config/models.py": "read back at once",
    "ejax/config/run_config.py": "read back at once",
    "ejax/data/lerobot/recording.py": "a note of names",
    "ejax/logs/metric_log.py": "times of a clock",
    "ejax/policies/mlp.py": "read back at once",
    "ejax/policies/vla/config.py": "read back at once",
    "ejax/policies/vla/words.py": "words",
    "ejax/report/curves.py": "a text to be shown",
    "ejax/runtime/processes.py": "texts between processes",
    "ejax/schema/plain_files.py": "to_json itself",
    "ejax/store/replay_rows.py": "counts",
    "ejax/store/resume_rules.py": "texts of an error",
    "ejax/store/run_lock.py": "an owner",
    "ejax/store/schedule_file.py": "counts",
    "ejax/training/build.py": "a text of an error",
    "ejax/training/callbacks.py": "a state, as a text where it has a NaN",
    "ejax/training/command.py": "a name",
    "ejax/training/host_parts.py": "a text of an error",
    "ejax/training/start.py": "read back at once",
    "ejax/training/teachers.py": "texts of a report",
    "ejax/training/warm_start.py": "texts of a report",
    "interop/artefacts/leapp_bundle.py": "shapes",
    "interop/exporters/lerobot.py": "a tokenizer's own text, read back at once",
    "interop/serving/server.py": "counts, and a contract of strict JSON",
    "interop/standalone_verify.py": "a text of an error",
}
"""Files that call ``json.dumps`` without ``allow_nan=False`` -> why no NaN gets into a file of JSON."""


def loose_json(node: ast.AST) -> Iterator[str]:
    dumps = isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dumps", "json.dump")
    if dumps and "allow_nan" not in {each.arg for each in node.keywords}:
        yield "json"


_RUNS_CODE = {
    *("import_module", "__import__", "find_spec", "spec_from_file_location", "exec_module", "run_path", "run_module"),
    *("exec", "eval", "resolve_name", "locate"),
}
_UNPICKLES = {"pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.loads", "joblib.load"}
RUNS_CODE = {
    ("ejax/schema/lazy_names.py", "import_module"): "tables of public names",
    ("ejax/runtime/process_exit.py", "import_module"): "the module that a command names",
    ("ejax/__main__.py", "run_module"): "its own table of commands",
    ("ejax/schema/trust.py", "import_module"): "the gate",
    ("ejax/schema/code_places.py", "find_spec"): "for the gate: a top-level name",
    ("ejax/schema/trust.py", "exec_module"): "the gate, of torch:FILE.py:Name",
    ("ejax/schema/registry.py", "import_module"): "entries of its own tables",
    ("ejax/envs/adapters/library.py", "import_module"): "libraries that the adapters name",
    ("ejax/envs/mujoco/engine.py", "import_module"): "an engine from a fixed table",
    ("ejax/logs/metrics.py", "import_module"): "wandb",
    ("ejax/logs/metrics.py", "find_spec"): "tensorboardX: a top-level name",
    ("ejax/envs/mujoco/engines/warp.py", "import_module"): "mujoco_warp",
    ("ejax/config/load.py", "find_spec"): "wandb",
    ("ejax/runtime/device.py", "find_spec"): "packages that decide XLA's flags: top-level names",
    ("ejax/schema/plain_files.py", "find_spec"): "of a package that carries files: a top-level name",
    ("interop/artefacts/formats.py", "find_spec"): "packages that the formats need",
    ("interop/standalone_verify.py", "find_spec"): "onnxruntime",
    ("interop/verify.py", "find_spec"): "onnxruntime and PyYAML",
    ("ejax/envs/adapters/gymnasium.py", "pickle.loads"): "of the worker's own pickle, to see whether that can be",
    ("ejax/data/worker.py", "pickle.loads"): "the order, in a folder of mode 700 that its owner made",
    ("ejax/data/supervisor.py", "pickle.loads"): "the worker's spec, in the same folder",
    ("ejax/experts/learner.py", "pickle.loads"): "the round, in a folder of mode 700 that its owner made",
    ("ejax/data/control.py", "pickle.loads"): "a worker's error, from shared memory of mode 600",
}


def running(node: ast.AST) -> Iterator[str]:
    """Name a call or an import by which code could run that a text names."""
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        last = called.rpartition(".")[2]
        if called in {"exec", "eval"} or last in _RUNS_CODE - {"exec", "eval"}:
            yield last
        elif called in _UNPICKLES:
            yield called
    elif isinstance(node, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        yield from names & (_RUNS_CODE | ({"loads", "Unpickler"} if node.module == "pickle" else set()))


VOUCHES = {
    ("ejax/config/load.py", "trust_strings"): "parse_config itself",
    ("ejax/learner.py", "parse_config"): "arguments of a program",
    ("ejax/schema/trust.py", "trust_strings"): "the words of a command line",
    ("ejax/data/record.py", "trust_strings"): "--task-cfg and --action-config, on the command line",
    (
        "ejax/training/policies.py",
        "trust_strings",
    ): "build_policy, whose section is the program's own as parse_config's is",
}
"""``parse_config`` and ``trust_strings`` are for a program's own words."""


def vouching(node: ast.AST) -> Iterator[str]:
    name = getattr(node, "attr", getattr(node, "id", None))
    if name in ("parse_config", "trust_strings") and isinstance(node, ast.Name | ast.Attribute):
        yield name


@cases(
    "named allowed",
    (opened, READS),
    (written, WRITES),
    (loose_json, {(file, "json"): why for file, why in PLAIN_JSON.items()}),
    (running, RUNS_CODE),
    (vouching, VOUCHES),
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_no_other_place_makes_such_a_call(named: Callable, allowed: Mapping) -> None:
    """The table of ``allowed`` has each exception, with its reason."""
    assert found(named) == set(allowed)


@cases(
    "code reads",
        *((code, True) for code in ("open(x)", "open(x, 'rb')", "p.open()", "p.open('r+b')", "Path(x).read_text()")),
        *((code, True) for code in ("np.load(x)", "json.load(f)", "yaml.safe_load(f)", "torch.jit.load(x)")),
        *((code, False) for code in ("open(x, 'wb')", "p.open('ab')", "section.open('env')", "files.open(name)")),
        *((code, False) for code in ("read_text(x)", "json.loads(x)", "os.open(x, os.O_WRONLY)", "p.open(mode='w')")),
)  # fmt: skip
def test_ways_of_reading_are_known(code: str, reads: bool) -> None:
    assert any(list(opened(node)) for node in ast.walk(ast.parse(code))) == reads


@cases(
    "code writes",
        *((code, True) for code in ("open(x, 'w')", "open(x, mode='ab')", "p.open('r+b')", "p.write_text(x)")),
        *((code, True) for code in ("os.replace(a, b)", "shutil.copyfile(a, b)", "np.savez(x)", "p.rename(q)")),
        *((code, True) for code in ("os.open(x, os.O_WRONLY)", "json.dump(a, f)", "p.open('xb')", "torch.save(a, b)")),
        *((code, False) for code in ("open(x)", "p.open('rb')", "json.dumps(a)", "a.replace(b, c)")),
)  # fmt: skip
def test_ways_of_writing_are_known(code: str, writes: bool) -> None:
    assert any(list(written(node)) for node in ast.walk(ast.parse(code))) == writes
