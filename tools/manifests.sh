#!/usr/bin/env bash
# Print deploy/kubernetes/base/torchperfd.yaml: the chart with its default values, for those who use no Helm. Overlays
# replace the image's registry, which cannot exist.
set -euo pipefail
cd "$(dirname "$0")/.."
echo "# Rendered from deploy/helm/torchperfd by \`make manifests\`; the Secret torchperfd-fleet is yours to make."
.venv-kube/bin/helm template torchperfd deploy/helm/torchperfd --namespace torchperfd \
  --set image.repository=registry.example.com/torchperfd --set fleet.tokenSecret=torchperfd-fleet --skip-tests 2>/dev/null |
  grep -vE '^ +(helm\.sh/chart|app\.kubernetes\.io/managed-by): |^# Source: |^$'
