{{/* Labels of one part: pass the component's name. */}}
{{- define "envoy-gateway.labels" -}}
app.kubernetes.io/name: envoy-gateway
app.kubernetes.io/component: {{ . }}
app.kubernetes.io/part-of: llmbox
{{- end }}

{{/* What the controller's pods are selected by. */}}
{{- define "envoy-gateway.selector" -}}
app.kubernetes.io/name: envoy-gateway
app.kubernetes.io/component: controller
{{- end }}

{{/* Pod and container security of everything that runs the gateway image. */}}
{{- define "envoy-gateway.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "envoy-gateway.containerSecurity" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* Environment the gateway image reads in the cluster. */}}
{{- define "envoy-gateway.env" -}}
- name: ENVOY_GATEWAY_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: KUBERNETES_CLUSTER_DOMAIN
  value: {{ .Values.clusterDomain | quote }}
# The Go runtime collects harder as it nears this, instead of being killed at the limit.
- name: GOMEMLIMIT
  valueFrom:
    resourceFieldRef:
      resource: limits.memory
{{- end }}

{{/* Own namespace plus those routes may come from, once each and in order. */}}
{{- define "envoy-gateway.watched" -}}
{{- prepend .Values.routeNamespaces .Release.Namespace | uniq | toJson -}}
{{- end }}
