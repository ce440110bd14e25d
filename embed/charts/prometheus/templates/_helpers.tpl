{{/* Labels of an object. Call with a dict: name, component. */}}
{{- define "prometheus.labels" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/part-of: llmbox
{{- end -}}

{{/* Labels that select the pods of a workload. Call with a dict: name. */}}
{{- define "prometheus.selector" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/part-of: llmbox
{{- end -}}

{{/* Image reference by its key in .Values.images. Call with a dict: root, key. */}}
{{- define "prometheus.image" -}}
{{- required (printf "images.%s is not set" .key) (get .root.Values.images .key) -}}
{{- end -}}

{{/* imagePullSecrets of a pod. */}}
{{- define "prometheus.imagePullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Tag of an image reference without a leading v: the version the operator bases its flags on. */}}
{{- define "prometheus.version" -}}
{{- $reference := first (splitList "@" .) -}}
{{- last (splitList ":" $reference) | trimPrefix "v" -}}
{{- end -}}

{{/* Security context of every container of this chart. */}}
{{- define "prometheus.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* API group of a kind kube-state-metrics can export. */}}
{{- define "prometheus.apiGroup" -}}
{{- $groups := dict
  "configmaps" ""
  "cronjobs" "batch"
  "daemonsets" "apps"
  "deployments" "apps"
  "endpointslices" "discovery.k8s.io"
  "horizontalpodautoscalers" "autoscaling"
  "ingresses" "networking.k8s.io"
  "jobs" "batch"
  "leases" "coordination.k8s.io"
  "limitranges" ""
  "mutatingwebhookconfigurations" "admissionregistration.k8s.io"
  "namespaces" ""
  "networkpolicies" "networking.k8s.io"
  "nodes" ""
  "persistentvolumeclaims" ""
  "persistentvolumes" ""
  "poddisruptionbudgets" "policy"
  "pods" ""
  "replicasets" "apps"
  "resourcequotas" ""
  "secrets" ""
  "services" ""
  "statefulsets" "apps"
  "storageclasses" "storage.k8s.io"
  "validatingwebhookconfigurations" "admissionregistration.k8s.io"
  "volumeattachments" "storage.k8s.io" -}}
{{- get $groups . -}}
{{- end -}}
