{{/* Labels of one part: pass the component's name. */}}
{{- define "keda.labels" -}}
app.kubernetes.io/name: keda
app.kubernetes.io/component: {{ . }}
app.kubernetes.io/part-of: llmbox
{{- end }}

{{- define "keda.selector" -}}
app.kubernetes.io/name: keda
app.kubernetes.io/component: {{ . }}
{{- end }}

{{- define "keda.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "keda.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* Environment all three programs read. */}}
{{- define "keda.env" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: WATCH_NAMESPACE
  value: {{ join "," .Values.watchNamespaces | quote }}
# The Go runtime collects harder as it nears this, instead of being killed at the limit.
- name: GOMEMLIMIT
  valueFrom:
    resourceFieldRef:
      resource: limits.memory
{{- end }}

{{/* The operator's rights where it scales; bound per watched namespace or, with none named,
     cluster-wide. */}}
{{- define "keda.watchRules" -}}
- apiGroups: [keda.sh]
  resources:
  - scaledjobs
  - scaledjobs/finalizers
  - scaledjobs/status
  - scaledobjects
  - scaledobjects/finalizers
  - scaledobjects/status
  - triggerauthentications
  - triggerauthentications/status
  verbs: [get, list, watch, update, patch]
- apiGroups: [eventing.keda.sh]
  resources: [cloudeventsources, cloudeventsources/status]
  verbs: [get, list, watch, update, patch]
- apiGroups: [apps]
  resources: [deployments, replicasets, statefulsets]
  verbs: [get, list, watch]
- apiGroups: [apps]
  resources: [deployments/scale, statefulsets/scale]
  verbs: [get, list, watch, update, patch]
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [create, delete, get, list, watch, update, patch]
- apiGroups: [""]
  resources: [configmaps, limitranges, pods, services]
  verbs: [get, list, watch]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
{{- if not .Values.restrictSecrets }}
# Asked for by restrictSecrets: false. KEDA's client caches, so it lists and watches.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, list, watch]
{{- end }}
{{- if .Values.scaledJobs }}
- apiGroups: [batch]
  resources: [jobs]
  verbs: [create, delete, get, list, watch, update, patch]
{{- end }}
{{- end }}
