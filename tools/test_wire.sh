#!/usr/bin/env bash
# Run the wire tests against the oldest and the newest supported pair of grpcio and
# protobuf, each in an environment of its own, without torch.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
# Everything that makes, sends, receives or reads a message.
tests=(
  tests/unit/client/test_wire.py
  tests/unit/daemon/test_translate.py
  tests/unit/daemon/test_session_service.py
  tests/unit/daemon/test_control_service.py
  tests/unit/daemon/test_command_live.py
)

run_with() {
  local name=$1
  shift
  local venv=.venv-wire-$name
  if [ ! -e "$venv/.installed" ]; then
    "$python" -m venv "$venv"
    "$venv/bin/pip" install -q --disable-pip-version-check "$@" \
      -e . "pytest>=8.2" "pytest-timeout>=2.3" "pytest-rerunfailures>=15" "hypothesis>=6.100" "pyyaml>=6" "httpx>=0.27"
    touch "$venv/.installed"
  fi
  echo "wire tests on the $name pair: $("$venv/bin/pip" list --disable-pip-version-check 2>/dev/null |
    awk '/^(grpcio|grpcio-health-checking|protobuf) / {printf "%s %s  ", $1, $2}')"
  "$venv/bin/python" -m pytest -q "${tests[@]}"
}

run_with oldest grpcio==1.63.2 grpcio-health-checking==1.62.3 protobuf==4.25.0
run_with newest --upgrade grpcio grpcio-health-checking protobuf
