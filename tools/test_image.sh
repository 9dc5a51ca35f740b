#!/usr/bin/env bash
# Build the image with buildah, start the daemon in it with TLS and a password, and train on this machine with the
# client that the image gives to training pods.
#
#   tools/test_image.sh                      on the Dockerfile's base
#   BASE=IMAGE tools/test_image.sh           on another one
#   BASE=DIRECTORY tools/test_image.sh       on a folder with a Debian, where no registry can be reached
#
# Needs root, buildah, openssl, and .venv. tests/deploy has debootstrap make the folder. Takes five minutes and 4 GB.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d /tmp/torchperfd-image.XXXXXX)
daemon=
mounted=
store() { buildah --root "$work/storage" --runroot "$work/run" --storage-driver vfs "$@"; }
cleanup() {
  # All of its session: buildah passes no signal on.
  [ -z "$daemon" ] || kill -- -"$daemon" 2>/dev/null || true
  wait
  [ -z "$mounted" ] || store umount --all >/dev/null 2>&1 || true
  rm -rf "$work"
}
trap cleanup EXIT
fail() {
  echo "test_image: $1" >&2
  exit 1
}

base=${BASE:-}
if [ -d "$base" ]; then
  container=$(store from scratch)
  store add -q "$container" "$base" / >/dev/null
  folder=$(store mount "$container")
  # As in the image of Python: `python`, and a pip that installs.
  ln -s python3 "$folder/usr/bin/python"
  rm -f "$folder"/usr/lib/python3*/EXTERNALLY-MANAGED
  for file in /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
    [ ! -e "$file" ] || install -D -m 644 "$file" "$folder$file"
  done
  store umount "$container" >/dev/null
  store commit -q --rm "$container" localhost/stand-in >/dev/null
  base=localhost/stand-in
fi

revision=$(git rev-parse HEAD)
version=$(.venv/bin/python -c 'from torchperfd import _version; print(_version.__version__)')
store bud -q --isolation chroot --format docker -f deploy/docker/Dockerfile -t localhost/torchperfd \
  ${base:+--build-arg BASE="$base"} --build-arg VERSION="$version" \
  --build-arg REVISION="$revision" . >"$work/build.log" 2>&1 || {
  tail -20 "$work/build.log" >&2
  fail "the build failed"
}
store inspect --type image localhost/torchperfd >"$work/image.json"
container=$(store from localhost/torchperfd)
rootfs=$(store mount "$container")
mounted=yes

# A socket that this machine's training shares, and a page with TLS and a password.
mkdir "$work/socket" "$work/web"
chown 9407:9407 "$work/socket"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost \
  -keyout "$work/web/key.pem" -out "$work/web/cert.pem" 2>/dev/null
.venv/bin/python - "$work/web/web.yml" <<'PYTHON'
import sys, bcrypt
password = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
open(sys.argv[1], "w").write(
    f"tls_server_config: {{cert_file: cert.pem, key_file: key.pem}}\nbasic_auth_users: {{scrape: {password}}}\n"
)
PYTHON
chown -R 9407:9407 "$work/web"
# User, entry point and arguments are the image's.
enter=(buildah --root "$work/storage" --runroot "$work/run" --storage-driver vfs run --isolation chroot
  -v "$work/socket:/run/torchperfd" -v "$work/web:/web:ro" "$container" --)
inside() { "${enter[@]}" "$@"; }
mapfile -t command < <(.venv/bin/python tools/image_facts.py command <"$work/image.json")
mapfile -t health < <(.venv/bin/python tools/image_facts.py health <"$work/image.json")
.venv/bin/python tools/image_facts.py check "$version" "$revision" <"$work/image.json"

! inside "${health[@]}" >/dev/null 2>&1 || fail "the health check is content without a daemon"
setsid "${enter[@]}" "${command[@]}" --metrics-address 127.0.0.1:29407 --web.config.file /web/web.yml \
  >"$work/daemon.log" 2>&1 &
daemon=$!
for _ in $(seq 60); do
  [ ! -S "$work/socket/daemon.sock" ] || break
  sleep 1
done
for _ in $(seq 10); do inside "${health[@]}" >"$work/health.log" 2>&1 && healthy=yes && break || sleep 1; done
[ "${healthy:-}" = yes ] || { cat "$work/daemon.log" "$work/health.log" >&2; fail "the daemon is not healthy"; }
page=https://127.0.0.1:29407
code() { .venv/bin/python -c '
import ssl, sys, urllib.request, urllib.error
try:
    print(urllib.request.urlopen(sys.argv[1], context=ssl._create_unverified_context(), timeout=10).status)
except urllib.error.HTTPError as error:
    print(error.code)' "$1"; }
[ "$(code $page/-/ready)" = 200 ] || fail "a probe needs no password"
[ "$(code $page/metrics)" = 401 ] || fail "metrics need a password"
inside torchperfd version | grep -q "hooks native" || fail "the image has no native hooks"
inside python -c 'import obstore, yaml, bcrypt, opentelemetry.proto.collector.metrics.v1.metrics_service_pb2'
inside py-spy --version >/dev/null

# What the init container of a training pod copies, with the Python of this machine, which has torch.
cp -R "$rootfs/opt/torchperfd" "$work/client"
for version in 3.11 3.12 3.13 3.14; do
  [ -e "$work/client/$version/torchperfd/launch/runner.py" ] && [ -d "$work/client/$version/grpc" ] ||
    fail "no client for Python $version"
done
cat >"$work/train.py" <<'PYTHON'
import time, torch, torchperfd
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100):
    optimizer.zero_grad()
    model(torch.rand(8, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
print(torchperfd.__file__)
PYTHON
python=$(.venv/bin/python -c 'import sys; print(sys._base_executable)')
torch=$(.venv/bin/python -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])')
# torch alone of that folder, which has a client of its own as well.
mkdir "$work/torch"
for each in "$torch"/*; do
  case $(basename "$each") in *torchperfd* | grpc* | google* | __editable__*) ;; *) ln -s "$each" "$work/torch/" ;; esac
done
(cd "$work" && PYTHONPATH=$work/torch TORCHPERFD_SOCKET=$work/socket/daemon.sock TORCHPERFD_SERVICE_USER=9407 \
  "$python" "$work/client/run.py" --name injected train.py >"$work/train.log" 2>&1) &
training=$!
for _ in $(seq 30); do inside torchperfd ps 2>/dev/null | grep -q injected && seen=yes && break || sleep 1; done
wait "$training" || { cat "$work/train.log" >&2; fail "training failed"; }
[ "${seen:-}" = yes ] || { cat "$work/train.log" "$work/daemon.log" >&2; fail "the daemon has not seen the run"; }
grep -q "^$work/client/3" "$work/train.log" || fail "the client was another one: $(cat "$work/train.log")"
echo "test_image: built, healthy, and a run of the injected client was seen"
