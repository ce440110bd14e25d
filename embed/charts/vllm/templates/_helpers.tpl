{{/* Labels of every object: call with (list . NAME COMPONENT). */}}
{{- define "vllm.labels" -}}
app.kubernetes.io/name: {{ index . 1 }}
app.kubernetes.io/component: {{ index . 2 }}
app.kubernetes.io/part-of: llmbox
{{- end }}

{{- define "vllm.servedName" -}}
{{- .Values.model.servedName | default .Values.model.name -}}
{{- end }}

{{/* The kind the model server runs as. */}}
{{- define "vllm.workload" -}}
{{- if and (eq .Values.workload "StatefulSet") (gt (int .Values.tensorParallel) 1) -}}StatefulSet{{- else -}}Deployment{{- end -}}
{{- end }}

{{/* Replicas the GPUs allow; at least one, so that a box whose GPU is not seen yet still renders. */}}
{{- define "vllm.maxReplicas" -}}
{{- $byGPU := max 1 (div (int .Values.gpu.available) (int .Values.tensorParallel)) -}}
{{- $want := int .Values.autoscaling.maxReplicas -}}
{{- if gt $want 0 -}}{{- min $want $byGPU -}}{{- else -}}{{- $byGPU -}}{{- end -}}
{{- end }}

{{- define "vllm.minReplicas" -}}
{{- min (int .Values.autoscaling.minReplicas) (int (include "vllm.maxReplicas" .)) -}}
{{- end }}

{{/* Most replicas there can ever be. */}}
{{- define "vllm.ceiling" -}}
{{- if .Values.autoscaling.enabled -}}{{- include "vllm.maxReplicas" . -}}{{- else -}}{{- .Values.replicas -}}{{- end -}}
{{- end }}

{{/* Whether .args (list) already has the flag .flag, alone or as flag=value. */}}
{{- define "vllm.hasFlag" -}}
{{- $found := "" -}}
{{- range .args -}}
{{- if or (eq . $.flag) (hasPrefix (printf "%s=" $.flag) .) -}}{{- $found = "true" -}}{{- end -}}
{{- end -}}
{{- $found -}}
{{- end }}

{{/* The words after `vllm serve`: what the chart knows first, then what llmbox computed. */}}
{{- define "vllm.args" -}}
{{- $given := .Values.args -}}
{{- $own := list
  (list "--revision" .Values.model.revision)
  (list "--served-model-name" (include "vllm.servedName" .))
  (list "--tensor-parallel-size" (ternary (toString .Values.tensorParallel) "" (gt (int .Values.tensorParallel) 1)))
  (list "--shutdown-timeout" (ternary (toString .Values.drain.shutdownTimeoutSeconds) "" (gt (int .Values.drain.shutdownTimeoutSeconds) 0)))
  (list "--port" "8000") -}}
{{- $out := list -}}
{{- if or (empty $given) (hasPrefix "-" (first $given)) -}}
{{- $out = append $out .Values.model.name -}}
{{- else -}}
{{- $out = append $out (first $given) -}}
{{- $given = rest $given -}}
{{- end -}}
{{- range $own -}}
{{- if and (index . 1) (not (include "vllm.hasFlag" (dict "args" $given "flag" (index . 0)))) -}}
{{- $out = append $out (printf "%s=%s" (index . 0) (index . 1)) -}}
{{- end -}}
{{- end -}}
{{- range (concat $out $given) }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* Pod-level security of everything in the llm namespace. 2000 is the user `vllm` of vLLM's image. */}}
{{- define "vllm.podSecurity" -}}
runAsNonRoot: true
runAsUser: 2000
runAsGroup: 2000
fsGroup: 2000
# The volume holds many and large files: change owners only when its top folder is wrong.
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "vllm.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
{{- end }}

{{/* Where pods may run. */}}
{{- define "vllm.placement" -}}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The host's own name for hf-cache's class: no provisioner answers to it. */}}
{{- define "vllm.localClass" -}}llmbox-local{{- end }}

{{/* What the download was told to ask instead of the hub, as a JSON list of {host, port}. */}}
{{- define "vllm.downloadVia" -}}
{{- $out := list -}}
{{- range $raw := list .Values.weights.endpoint .Values.weights.proxy.https -}}
{{- if $raw -}}
{{- $url := urlParse $raw -}}
{{- $port := regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default (ternary "80" "443" (eq $url.scheme "http")) -}}
{{- $out = append $out (dict "host" $url.hostname "port" $port) -}}
{{- end -}}
{{- end -}}
{{- toJson $out -}}
{{- end }}

{{/* Those of them that are addresses, as a JSON list of {cidr, port}. */}}
{{- define "vllm.downloadHosts" -}}
{{- $out := list -}}
{{- range include "vllm.downloadVia" . | fromJsonArray -}}
{{- if contains ":" .host -}}
{{- $out = append $out (dict "cidr" (printf "%s/128" .host) "port" .port) -}}
{{- else if regexMatch "^[0-9]+(\\.[0-9]+){3}$" .host -}}
{{- $out = append $out (dict "cidr" (printf "%s/32" .host) "port" .port) -}}
{{- end -}}
{{- end -}}
{{- toJson $out -}}
{{- end }}

{{/* Ports of the internet that a download needs: the hub's, and those of others given by name. */}}
{{- define "vllm.downloadPorts" -}}
{{- $out := list "443" -}}
{{- range include "vllm.downloadVia" . | fromJsonArray -}}
{{- if not (or (contains ":" .host) (regexMatch "^[0-9]+(\\.[0-9]+){3}$" .host)) -}}
{{- $out = append $out .port -}}
{{- end -}}
{{- end -}}
{{- $out | uniq | toJson -}}
{{- end }}
