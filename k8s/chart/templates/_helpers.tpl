{{- define "isthmus.image" -}}
{{ .Values.image.name }}:{{ .Values.image.version | default .Chart.AppVersion }}
{{- end }}

{{/* Labels of everything that this chart installs. What the controller makes
carries the value isthmus in managed-by, and nothing else may: it would be
pruned. */}}
{{- define "isthmus.labels" -}}
app.kubernetes.io/part-of: isthmus
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Where a pod may run: call with the values of a pod. */}}
{{- define "isthmus.placement" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* A CIDR as part of a name. */}}
{{- define "isthmus.dashed" -}}
{{ . | replace "." "-" | replace ":" "-" | replace "/" "-" }}
{{- end }}

{{/* The probes of all three daemons. A busy machine may take two minutes to
start one before liveness has a say: one that is killed for that starts again
and is slower still. */}}
{{- define "isthmus.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: health}
  periodSeconds: 1
  timeoutSeconds: 2
  failureThreshold: 120
livenessProbe:
  httpGet: {path: /healthz, port: health}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: health}
  periodSeconds: 5
  timeoutSeconds: 2
{{- end }}

{{/* Nothing but what it needs: netlink, and no way to get more. Root, because
Kubernetes gives capabilities to nobody else. */}}
{{- define "isthmus.netAdmin" -}}
securityContext:
  runAsUser: 0
  privileged: false
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    add: [NET_ADMIN]
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Who and where a pod is. */}}
{{- define "isthmus.whereabouts" -}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}
