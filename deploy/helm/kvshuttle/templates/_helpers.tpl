{{- define "kvshuttle.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvshuttle.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvshuttle.labels" -}}
{{ include "kvshuttle.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "kvshuttle.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "kvshuttle.engineImage" -}}
{{ .Values.engineImage.repository }}:{{ .Values.engineImage.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "kvshuttle.controlPlaneHost" -}}
{{ include "kvshuttle.fullname" . }}-controlplane.{{ .Release.Namespace }}.svc
{{- end -}}

{{- define "kvshuttle.issuerRef" -}}
{{- if .Values.certificates.issuerRef -}}
{{ toYaml .Values.certificates.issuerRef }}
{{- else -}}
name: {{ include "kvshuttle.fullname" . }}-authority
kind: Issuer
{{- end -}}
{{- end -}}

{{- define "kvshuttle.tracingEnv" -}}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ .Values.tracing.endpoint | quote }}
{{- with .Values.tracing.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvshuttle.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "kvshuttle.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}
