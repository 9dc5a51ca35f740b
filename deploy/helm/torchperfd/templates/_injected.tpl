{{/* What a training pod gets: containers that run before, volumes, and what each of its containers gets. */}}
{{- define "torchperfd.injected" -}}
initContainers:
  - name: torchperfd-client
    image: {{ include "torchperfd.image" . }}
    command: [cp, -R, /opt/torchperfd/., /client]
    securityContext:
      {{- include "torchperfd.unprivileged" . | nindent 6 }}
    resources:
      requests: {cpu: 50m, memory: 64Mi}
      limits: {memory: 128Mi}
    volumeMounts:
      - name: torchperfd-client
        mountPath: /client
  {{- if eq .Values.mode "sidecar" }}
  # An init container that restarts always is a sidecar: training starts once it answers, and the pod ends
  # without it.
  - {{ include "torchperfd.daemon" . | indent 4 | trim }}
    restartPolicy: Always
    securityContext:
      {{- include "torchperfd.unprivileged" . | nindent 6 }}
  {{- end }}
volumes:
  - name: torchperfd-client
    emptyDir: {}
  - name: torchperfd-socket
    {{- if eq .Values.mode "sidecar" }}
    emptyDir: {}
    {{- else }}
    hostPath:
      path: /run/torchperfd
      # A node without a daemon must not hold the pod up.
      type: DirectoryOrCreate
    {{- end }}
  {{- if eq .Values.mode "sidecar" }}
  {{- include "torchperfd.volumes" . | nindent 2 }}
  {{- end }}
env:
  - name: TORCHPERFD_SOCKET
    value: /run/torchperfd/daemon.sock
  {{- if eq .Values.mode "sidecar" }}
  # The image's user: all containers of the pod can write to the socket's volume, so the client asks the kernel
  # which user listens there.
  - name: TORCHPERFD_SERVICE_USER
    value: "9407"
  {{- end }}
  - name: NODE_NAME
    valueFrom:
      fieldRef:
        fieldPath: spec.nodeName
  - name: POD_UID
    valueFrom:
      fieldRef:
        fieldPath: metadata.uid
volumeMounts:
  - name: torchperfd-socket
    mountPath: /run/torchperfd
    readOnly: true
  - name: torchperfd-client
    mountPath: /opt/torchperfd
    readOnly: true
{{- end -}}

{{/* As the level "restricted" of Pod Security wants it. */}}
{{- define "torchperfd.unprivileged" -}}
runAsUser: 9407
runAsGroup: 9407
runAsNonRoot: true
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}
