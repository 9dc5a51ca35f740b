{{/* What DaemonSet and sidecar have in common. Training processes of any user hand their traces over through the
     socket; the captures directory is made below the volume, for the daemon alone. */}}
{{- define "torchperfd.daemon" -}}
name: torchperfd
image: {{ include "torchperfd.image" . }}
args:
  - serve
  - --socket=/run/torchperfd/daemon.sock
  # Training containers run as any user.
  - --socket-mode=666
  - --captures-dir=/var/lib/torchperfd/captures
  - --captures-max-bytes={{ .Values.captures.gibibytes }}GiB
  # The pod's address: loopback is out of reach for Prometheus and the kubelet's probes.
  - --metrics-address=0.0.0.0:9407
  {{- with .Values.captures.upload }}
  - --captures-upload={{ . }}
  {{- end }}
  {{- with .Values.lake.url }}
  - --lake={{ . }}
  - --lake-cluster={{ $.Values.lake.cluster }}
  {{- end }}
  {{- if .Values.events.enabled }}
  - --kubernetes-events
  {{- end }}
  {{- if .Values.metrics.webConfigSecret }}
  - --web.config.file=/etc/torchperfd-web/web.yml
  {{- end }}
  {{- if include "torchperfd.hasFleet" . }}
  - --fleet-address=0.0.0.0:9408
  - --fleet-peers=dns:{{ include "torchperfd.host" . }}:9408
  - --fleet-token-file=/etc/torchperfd-fleet/token
  {{- if include "torchperfd.tlsSecret" . }}
  - --fleet-tls-cert=/etc/torchperfd-tls/tls.crt
  - --fleet-tls-key=/etc/torchperfd-tls/tls.key
  - --fleet-tls-ca=/etc/torchperfd-tls/ca.crt
  {{- end }}
  {{- end }}
env:
  - name: NODE_NAME
    valueFrom:
      fieldRef:
        fieldPath: spec.nodeName
  {{- if eq .Values.mode "daemonset" }}
  # All GPUs of the node, for NVML only: no CUDA libraries.
  - name: NVIDIA_VISIBLE_DEVICES
    value: all
  - name: NVIDIA_DRIVER_CAPABILITIES
    value: utility
  {{- end }}
  {{- range $key, $value := .Values.settings }}
  - name: TORCHPERFD_{{ upper $key }}
    value: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}
  {{- end }}
{{- with .Values.captures.uploadSecret }}
envFrom:
  - secretRef:
      name: {{ . }}
{{- end }}
ports:
  - name: metrics
    containerPort: 9407
  {{- if include "torchperfd.hasFleet" . }}
  - name: fleet
    containerPort: 9408
  {{- end }}
startupProbe:
  {{- include "torchperfd.probe" (dict "root" . "path" "/-/ready") | nindent 2 }}
  periodSeconds: 1
  failureThreshold: 120
livenessProbe:
  {{- include "torchperfd.probe" (dict "root" . "path" "/-/healthy") | nindent 2 }}
  failureThreshold: 6
{{- if eq .Values.mode "daemonset" }}
readinessProbe:
  {{- include "torchperfd.probe" (dict "root" . "path" "/-/ready") | nindent 2 }}
{{- end }}
resources:
  {{- toYaml .Values.resources | nindent 2 }}
volumeMounts:
  - name: torchperfd-socket
    mountPath: /run/torchperfd
  - name: torchperfd-captures
    mountPath: /var/lib/torchperfd
  - name: torchperfd-tmp
    mountPath: /tmp
  {{- if .Values.triggers }}
  - name: torchperfd-config
    mountPath: /etc/torchperfd
    readOnly: true
  {{- end }}
  {{- if .Values.metrics.webConfigSecret }}
  - name: torchperfd-web
    mountPath: /etc/torchperfd-web
    readOnly: true
  {{- end }}
  {{- if include "torchperfd.hasFleet" . }}
  - name: torchperfd-fleet
    mountPath: /etc/torchperfd-fleet
    readOnly: true
  {{- if include "torchperfd.tlsSecret" . }}
  - name: torchperfd-tls
    mountPath: /etc/torchperfd-tls
    readOnly: true
  {{- end }}
  {{- end }}
{{- end -}}

{{/* The volumes of both, without the socket's. */}}
{{- define "torchperfd.volumes" -}}
- name: torchperfd-captures
  {{- if and .Values.captures.hostPath (eq .Values.mode "daemonset") }}
  hostPath:
    path: {{ .Values.captures.hostPath }}
    type: DirectoryOrCreate
  {{- else }}
  emptyDir:
    # Beyond what is kept: a capture that is being written.
    sizeLimit: {{ add .Values.captures.gibibytes 5 }}Gi
  {{- end }}
- name: torchperfd-tmp
  emptyDir: {}
{{- if .Values.triggers }}
- name: torchperfd-config
  configMap:
    name: {{ include "torchperfd.name" . }}
{{- end }}
{{- with .Values.metrics.webConfigSecret }}
- name: torchperfd-web
  secret:
    secretName: {{ . }}
{{- end }}
{{- if include "torchperfd.hasFleet" . }}
- name: torchperfd-fleet
  secret:
    secretName: {{ include "torchperfd.tokenSecret" . }}
    defaultMode: 0400
{{- with include "torchperfd.tlsSecret" . }}
- name: torchperfd-tls
  secret:
    secretName: {{ . }}
    defaultMode: 0400
{{- end }}
{{- end }}
{{- end -}}
