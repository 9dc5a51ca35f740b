{{/* The name of all objects. */}}
{{- define "torchperfd.name" -}}
{{- if contains "torchperfd" .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-torchperfd" .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "torchperfd.selector" -}}
app.kubernetes.io/name: torchperfd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "torchperfd.labels" -}}
{{ include "torchperfd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "torchperfd.image" -}}
{{- $image := .Values.image -}}
{{- $repository := required "set image.repository to where you have pushed the image" $image.repository -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* The headless Service's name within the cluster: peers are found by it, and certificates are made out to it. */}}
{{- define "torchperfd.host" -}}
{{- printf "%s.%s.svc" (include "torchperfd.name" .) .Release.Namespace -}}
{{- end -}}

{{- define "torchperfd.tokenSecret" -}}
{{- default (printf "%s-fleet" (include "torchperfd.name" .)) .Values.fleet.tokenSecret -}}
{{- end -}}

{{/* Empty without TLS between daemons. */}}
{{- define "torchperfd.tlsSecret" -}}
{{- $tls := .Values.fleet.tls -}}
{{- if $tls.certManager.issuer -}}
{{- default (printf "%s-fleet-tls" (include "torchperfd.name" .)) $tls.secret -}}
{{- else -}}
{{- $tls.secret -}}
{{- end -}}
{{- end -}}

{{- define "torchperfd.hasFleet" -}}
{{- if and .Values.fleet.enabled (eq .Values.mode "daemonset") -}}true{{- end -}}
{{- end -}}

{{/* The rules of triggers as the daemon's file. Values are written as JSON, which TOML reads: Helm's toToml makes
     floats of integers. */}}
{{- define "torchperfd.triggers" -}}
{{- range .Values.triggers }}
[[trigger]]
{{- range $key, $value := . }}
{{- if kindIs "map" $value }}
{{- range $name, $label := $value }}
{{ $key }}.{{ $name }} = {{ toJson $label }}
{{- end }}
{{- else }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{ end }}
{{- end -}}

{{- define "torchperfd.probe" -}}
httpGet:
  path: {{ .path }}
  port: metrics
  {{- if .root.Values.metrics.tls }}
  scheme: HTTPS
  {{- end }}
timeoutSeconds: 3
{{- end -}}

{{/* A part of a pod as CEL. Each object has the type of its place, such as Object.spec.volumes, as the API server wants
     it; only quantities of resources are a map, which holds values of one type. */}}
{{- define "torchperfd.cel" -}}
{{- $type := .type -}}
{{- $parts := list -}}
{{- if kindIs "slice" .value -}}
{{- range .value -}}
{{- $parts = append $parts (include "torchperfd.cel" (dict "type" $type "value" .)) -}}
{{- end -}}
[ {{- join ", " $parts -}} ]
{{- else if not (kindIs "map" .value) -}}
{{- toJson .value -}}
{{- else if or (hasSuffix ".limits" $type) (hasSuffix ".requests" $type) -}}
{{- range $key, $value := .value -}}
{{- $parts = append $parts (printf "%s: %s" (toJson $key) (toString $value | toJson)) -}}
{{- end -}}
{ {{- join ", " $parts -}} }
{{- else -}}
{{- range $key, $value := .value -}}
{{- $inner := dict "type" (printf "%s.%s" $type $key) "value" $value -}}
{{- $parts = append $parts (printf "%s: %s" $key (include "torchperfd.cel" $inner)) -}}
{{- end -}}
{{- $type -}} { {{- join ", " $parts -}} }
{{- end -}}
{{- end -}}
