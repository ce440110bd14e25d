{{/* Labels of one part: pass the component's name. */}}
{{- define "vault.labels" -}}
app.kubernetes.io/name: vault
app.kubernetes.io/component: {{ . }}
app.kubernetes.io/part-of: llmbox
{{- end }}

{{- define "vault.selector" -}}
app.kubernetes.io/name: vault
app.kubernetes.io/component: {{ . }}
{{- end }}

{{- define "vault.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* Vault's configuration; also hashed into the pod template. */}}
{{- define "vault.config" -}}
ui        = false
log_level = "{{ .Values.logLevel }}"

# No swap in pods, and no capability to lock memory with.
disable_mlock = true

# Vault would make a name up when it is initialised. Until then its metrics have none, and
# vault_core_unsealed would stay 0 without a name for an hour, beside the 1 with a name.
cluster_name = "llmbox"

api_addr = "http://vault.{{ .Release.Namespace }}.svc:8200"
{{- if eq .Values.storage.type "raft" }}
cluster_addr = "https://vault-0.vault-internal.{{ .Release.Namespace }}.svc:8201"

storage "raft" {
  path    = "/vault/data"
  node_id = "vault-0"
}
{{- else }}

storage "file" {
  path = "/vault/data"
}
{{- end }}

# Plain HTTP inside the cluster of one node; the network policy says who may connect.
listener "tcp" {
  address         = "0.0.0.0:8200"
  cluster_address = "0.0.0.0:8201"
  tls_disable     = true

  telemetry {
    unauthenticated_metrics_access = true
  }
}

telemetry {
  prometheus_retention_time = "1h"
  disable_hostname          = true
}
{{- end }}
