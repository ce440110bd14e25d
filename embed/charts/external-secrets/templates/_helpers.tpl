{{- define "external-secrets.labels" -}}
app.kubernetes.io/name: external-secrets
app.kubernetes.io/component: {{ . }}
app.kubernetes.io/part-of: llmbox
{{- end }}

{{- define "external-secrets.selector" -}}
app.kubernetes.io/name: external-secrets
app.kubernetes.io/component: controller
{{- end }}
