{{- define "sluiceway.name" -}}
{{- $name := .Values.fullnameOverride | default (ternary .Release.Name (printf "%s-sluiceway" .Release.Name) (contains "sluiceway" .Release.Name)) -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "sluiceway.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "sluiceway.selector" . }}
{{- end -}}

{{- define "sluiceway.selector" -}}
app.kubernetes.io/name: sluiceway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "sluiceway.scheme" -}}
{{ ternary "https" "http" (not (empty .Values.tls.existingSecret)) }}
{{- end -}}

{{- define "sluiceway.host" -}}
{{ include "sluiceway.name" . }}.{{ .Release.Namespace }}.svc
{{- end -}}

{{- define "sluiceway.url" -}}
{{ include "sluiceway.scheme" . }}://{{ include "sluiceway.host" . }}:2319
{{- end -}}

{{- define "sluiceway.podSecurity" -}}
automountServiceAccountToken: false
# Variables such as SLUICEWAY_PORT, which Kubernetes would make of the Service's name, must not be taken for configuration.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "sluiceway.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- /* One worker's settings over the defaults. Takes the root and the worker's own values. */ -}}
{{- define "sluiceway.worker" -}}
{{- mergeOverwrite (deepCopy .root.Values.workerDefaults) .own | toYaml -}}
{{- end -}}
