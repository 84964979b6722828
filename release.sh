#!/usr/bin/env bash
# Build a release into dist/ and prove it: the wheel alone, outside of this folder, does what the README says.
# Nothing is published; the last lines say how. Needs Python >= 3.11 and git.
# Usage: bash release.sh [--no-extras]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
root=$PWD python=${PYTHON:-python3.11}

fail() {
    echo "release.sh: $*" >&2
    exit 1
}

[ -z "$(git status --porcelain)" ] || fail "there are changes that are not committed: git status"
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' ejax/__init__.py)
grep -q "^## ${version%rc*}" CHANGELOG.md || fail "CHANGELOG.md has no section '## ${version%rc*}'"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip=(-m pip --disable-pip-version-check --quiet)
environment() { # NAME [pip arguments]: a fresh environment
    "$python" -m venv "$work/$1"
    "$work/$1/bin/python" "${pip[@]}" install "${@:2}"
}

echo "== build $version"
environment build build twine
rm -rf dist
"$work/build/bin/python" -m build --outdir dist . >"$work/build.log" || { cat "$work/build.log"; fail "the build failed"; }
"$work/build/bin/twine" check --strict dist/*
wheel=$root/dist/ejax-$version-py3-none-any.whl

echo "== the wheel alone"
environment alone "$wheel" pytest hypothesis
mkdir "$work/empty" && cd "$work/empty"
export PATH=$work/alone/bin:$PATH
[ "$(ejax --version)" = "ejax $version" ]
ejax configs >configs.txt && grep -q "^push_cube/ppo " configs.txt
ejax play push_cube --video shipped.mp4  # before any training
ejax evaluate push_cube --episodes 8
small=(trainer.iterations=2 trainer.num_eval_episodes=8 trainer.final_eval_episodes=8)
ejax train push_cube/ppo --device cpu "${small[@]}"
ejax evaluate outputs/push_cube_ppo --episodes 8 --video push_cube.mp4
ejax play outputs/push_cube_ppo --video play.mp4 --episodes 1
ejax report outputs/push_cube_ppo
ejax config check push_cube/ppo
ejax configs copy push_cube/ppo mine.yaml
ejax train mine.yaml --device cpu "${small[@]}"
for file in shipped.mp4 push_cube.mp4 play.mp4 mine.yaml; do [ -s $file ] || fail "$file was not written"; done

echo "== tests against the wheel"
cp -r "$root/tests" tests
python -m pytest -q -p no:cacheprovider -c /dev/null --rootdir tests -o pythonpath=tests/helpers \
    -o markers="slow slow_cases" -m "not slow" tests/test_returns.py tests/test_losses.py tests/test_distributions.py tests/test_rollout.py

if [ "${1:-}" != --no-extras ]; then
    cd "$root"
    "$work/build/bin/python" benchmarks/extras.py "$wheel" --python "$python"
fi

cat <<END

dist/ has $version, proven. To publish it:
    git tag v$version && git push origin v$version
    twine upload dist/*
END
