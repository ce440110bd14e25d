{{/* Labels of every object: call with the component's name. */}}
{{- define "kyverno.labels" -}}
app.kubernetes.io/name: kyverno
app.kubernetes.io/component: {{ . }}
app.kubernetes.io/part-of: llmbox
{{- end }}

{{/* What both containers must know about themselves; the names are the binary's. */}}
{{- define "kyverno.env" -}}
- name: INIT_CONFIG
  value: kyverno
- name: METRICS_CONFIG
  value: kyverno-metrics
- name: KYVERNO_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: KYVERNO_POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: KYVERNO_SERVICEACCOUNT_NAME
  value: kyverno-admission-controller
- name: KYVERNO_ROLE_NAME
  value: kyverno:admission-controller
- name: KYVERNO_DEPLOYMENT
  value: kyverno-admission-controller
- name: KYVERNO_SVC
  value: kyverno-svc
{{- end }}

{{- define "kyverno.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
