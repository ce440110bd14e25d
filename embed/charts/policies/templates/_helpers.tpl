{{/* Labels of every object: call with the policy's name. */}}
{{- define "policies.labels" -}}
app.kubernetes.io/name: {{ . }}
app.kubernetes.io/component: policy
app.kubernetes.io/part-of: llmbox
{{- end }}

{{- define "policies.outsideInfra" -}}
namespaceSelector:
  matchExpressions:
  - key: kubernetes.io/metadata.name
    operator: NotIn
    values:
      {{- toYaml .Values.privilegedNamespaces | nindent 6 }}
{{- end }}

{{- define "policies.modelNamespace" -}}
namespaceSelector:
  matchExpressions:
  - key: kubernetes.io/metadata.name
    operator: In
    values: [{{ .Values.modelNamespace }}]
{{- end }}

{{- define "policies.pods" -}}
resourceRules:
- apiGroups: [""]
  apiVersions: [v1]
  operations: [CREATE]
  resources: [pods]
{{- end }}

{{/* What every validating policy has. Nothing here scans what already runs. */}}
{{- define "policies.common" -}}
validationActions: [{{ .Values.action }}]
failurePolicy: {{ .Values.failurePolicy }}
evaluation:
  admission:
    enabled: true
  background:
    enabled: false
{{- end }}

{{/* Also look at what makes pods, so that whoever applies a Deployment hears it at once. */}}
{{- define "policies.autogen" -}}
autogen:
  podControllers:
    controllers: [deployments, statefulsets, daemonsets, jobs, cronjobs]
{{- end }}

{{/* CEL: containers and init containers of the pod. */}}
{{- define "policies.containers" -}}
(object.spec.containers + (has(object.spec.initContainers) ? object.spec.initContainers : []))
{{- end }}
