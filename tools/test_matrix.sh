#!/usr/bin/env bash
# Run the client's tests, and one real run with a capture, on each supported torch and Python.
#
#   tools/test_matrix.sh                            the default list
#   tools/test_matrix.sh 3.11:2.4.1 3.13:2.14.1     these pairs of python:torch
#
# Each pair has an environment of its own below .venv-matrix/, which takes 1 to 6 GB. CUDA builds run on the
# CPU. A Python or torch that cannot be had here is reported as such; with CI set that is a failure. Prints a
# table; exits 1 if a pair failed.
set -uo pipefail
cd "$(dirname "$0")/.."
pairs=("$@")
[ ${#pairs[@]} -gt 0 ] || pairs=(3.11:2.4.1 3.11:2.7.1 3.11:2.10.0 3.11:2.13.0 3.11:2.14.1 3.13:2.14.1 3.14:2.14.1)
mkdir -p .venv-matrix
failed=0
table=()

install() { # venv python torch
  "$2" -m venv "$1" && "$1/bin/pip" install -q --disable-pip-version-check --upgrade pip &&
    "$1/bin/pip" install -q "torch==$3" -e . --group demo --group test &&
    touch "$1/.installed"
}

run_pair() { # python torch; sets result
  local python=python$1 venv=.venv-matrix/$1-$2 log=.venv-matrix/$1-$2.log tests demo
  if ! command -v "$python" >/dev/null; then
    result="no Python $1 here"
    [ -z "${CI:-}" ] || failed=1
    return
  fi
  if [ ! -e "$venv/.installed" ] && ! install "$venv" "$python" "$2" >"$log" 2>&1; then
    result="torch $2 cannot be installed here"
    [ -z "${CI:-}" ] || failed=1
    return
  fi
  # The native half serves every Python through the limited API; the newest build is in the source tree.
  "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/unit/client -n "${WORKERS:-2}" >"$log" 2>&1
  tests=$?
  "$venv/bin/python" client/examples/demo.py >>"$log" 2>&1
  demo=$?
  result="$(grep -E '^[0-9]+ (passed|failed)|^=.*(passed|failed).*=$' "$log" | tail -1 | tr -d '=' | sed 's/ in .*//; s/^ *//'); demo exit $demo"
  if [ $tests -ne 0 ] || [ $demo -ne 0 ]; then
    failed=1
    result="FAILED: $result (see $log)"
  fi
}

for pair in "${pairs[@]}"; do
  run_pair "${pair%%:*}" "${pair##*:}"
  table+=("$(printf '%-8s %-8s %s' "${pair%%:*}" "${pair##*:}" "$result")")
  echo "${table[-1]}"
done
printf '\n%-8s %-8s %s\n' Python torch result
printf '%s\n' "${table[@]}"
exit $failed
