{{/* Labels of an object. Call with a dict: name, component. */}}
{{- define "gpu-operator.labels" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/part-of: llmbox
{{- end -}}

{{/* Labels that select the pods of a workload. Call with a dict: name. */}}
{{- define "gpu-operator.selector" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/part-of: llmbox
{{- end -}}

{{/* Image reference by its key in .Values.images. Call with a dict: root, key. */}}
{{- define "gpu-operator.image" -}}
{{- required (printf "images.%s is not set" .key) (get .root.Values.images .key) -}}
{{- end -}}

{{/*
Fields of one operand's image in the ClusterPolicy, which wants repository, image and
version apart. A digest takes the place of the tag: the operator joins it with @.
Call with a dict: root, key.
*/}}
{{- define "gpu-operator.splitImage" -}}
{{- $reference := include "gpu-operator.image" . -}}
{{- $parts := splitList "@" $reference -}}
{{- $segments := splitList "/" (first $parts) -}}
{{- $nameAndTag := splitList ":" (last $segments) -}}
repository: {{ join "/" (initial $segments) }}
image: {{ first $nameAndTag }}
version: {{ ternary (last $parts) (last $nameAndTag) (gt (len $parts) 1) | quote }}
imagePullPolicy: IfNotPresent
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
{{- range . }}
- {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* imagePullSecrets of a pod. */}}
{{- define "gpu-operator.imagePullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Security context of every container of this chart. */}}
{{- define "gpu-operator.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Security context of every pod of this chart. */}}
{{- define "gpu-operator.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65534
runAsGroup: 65534
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Configuration of the device plugin, empty without sharing. */}}
{{- define "gpu-operator.devicePluginConfig" -}}
{{- if gt (int .Values.devicePlugin.timeSlicing.replicas) 1 -}}
version: v1
sharing:
  timeSlicing:
    # A pod that asks for two slices would not get twice the GPU.
    failRequestsGreaterThanOne: true
    renameByDefault: false
    resources:
    - name: {{ .Values.devicePlugin.timeSlicing.resource }}
      replicas: {{ .Values.devicePlugin.timeSlicing.replicas }}
{{- end -}}
{{- end -}}

{{/*
Names of ConfigMaps that operands read once, at start: they carry a hash of the content,
so that a change of it restarts the operand.
*/}}
{{- define "gpu-operator.devicePluginConfigName" -}}
device-plugin-config-{{ include "gpu-operator.devicePluginConfig" . | sha256sum | trunc 8 }}
{{- end -}}
{{- define "gpu-operator.metricsConfigName" -}}
{{- if .Values.dcgmExporter.metricsConfigMap -}}
{{- .Values.dcgmExporter.metricsConfigMap -}}
{{- else -}}
dcgm-metrics-{{ .Files.Get "files/dcgm-metrics.csv" | sha256sum | trunc 8 }}
{{- end -}}
{{- end -}}
