#!/usr/bin/env bash
# Every check that runs no code of ours: style, types, layers, the API's rules, the stubs.
# All of them run; one line each says how it went, and what failed is shown in full.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
output=$(mktemp)
trap 'rm -f "$output"' EXIT
failed=0

check() {
  local name=$1 start=$SECONDS
  shift
  if "$@" >"$output" 2>&1; then
    printf '  %-22s ok %4d s\n' "$name" $((SECONDS - start))
  else
    printf '  %-22s FAILED\n' "$name"
    sed 's/^/    /' "$output"
    failed=1
  fi
}

# What the API is compared with: main if this is another branch, else the commit before this one.
# BREAKING_AGAINST names another commit; with `none` nothing is compared.
breaking() {
  local base=${BREAKING_AGAINST:-} candidate head
  head=$(git rev-parse --verify --quiet HEAD) || { echo "no commit yet"; return 0; }
  if [ -z "$base" ]; then
    for candidate in origin/main main HEAD~1; do
      base=$(git rev-parse --verify --quiet "$candidate^{commit}") || continue
      [ "$base" != "$head" ] && break
      base=
    done
  fi
  if [ -z "$base" ] || [ "$base" = none ] || ! git cat-file -e "$base:proto/buf.yaml" 2>/dev/null; then
    echo "nothing to compare with"
    return 0
  fi
  local old
  old=$(mktemp -d)
  git archive "$base" proto | tar -x -C "$old"
  "$bin/buf" breaking proto --against "$old/proto"
  local status=$?
  rm -rf "$old"
  return $status
}

echo "Lint"
check "ruff check" "$bin/ruff" check .
check "ruff format" "$bin/ruff" format --check .
check "mypy --strict" "$bin/mypy" --no-error-summary controlplane dataplane clients/python tests benchmarks scripts
# With the frameworks' own types, which are not in .venv.
if [ -x .venv-frameworks/bin/python ]; then
  check "mypy examples" "$bin/mypy" --no-error-summary \
    --cache-dir .mypy_cache/examples --python-executable .venv-frameworks/bin/python examples
else
  printf '  %-22s not run: needs make frameworks\n' "mypy examples"
fi
check "import rules" "$bin/lint-imports"
check "buf lint" "$bin/buf" lint proto
check "buf breaking" breaking
check "stubs are current" env VENV="${VENV:-.venv}" bash scripts/proto.sh --check
exit $failed
