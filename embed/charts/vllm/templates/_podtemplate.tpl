{{/* The pod of the model server, used by Deployment and StatefulSet. */}}
{{- define "vllm.podTemplate" -}}
metadata:
  labels:
    {{- include "vllm.labels" (list . "model-server" "model-server") | nindent 4 }}
  annotations:
    llmbox.dev/model: {{ .Values.model.name | quote }}
    llmbox.dev/model-revision: {{ .Values.model.revision | quote }}
spec:
  # A Service near by would put VLLM_… variables into the pod, which vLLM reads as its own.
  enableServiceLinks: false
  automountServiceAccountToken: false
  {{- with .Values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ add .Values.drain.preStopSeconds .Values.drain.shutdownTimeoutSeconds 15 }}
  securityContext:
    {{- include "vllm.podSecurity" . | nindent 4 }}
  {{- with include "vllm.placement" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  initContainers:
  # vLLM's image has no tool that speaks its API: bring llmbox, which does.
  - name: probe
    image: {{ .Values.images.llmbox | quote }}
    command: ["/llmbox", "internal", "copy-self", "/probe/llmbox"]
    securityContext:
      {{- include "vllm.containerSecurity" . | nindent 6 }}
      readOnlyRootFilesystem: true
    resources:
      requests:
        cpu: 10m
        memory: 32Mi
      limits:
        memory: 256Mi
    volumeMounts:
    - name: probe
      mountPath: /probe
  containers:
  - name: vllm
    image: {{ .Values.images.vllm | quote }}
    # The image's entrypoint is `vllm serve`.
    args:
      {{- include "vllm.args" . | trim | nindent 6 }}
    env:
    - name: HOME
      # Compilers (Triton, FlashInfer, …) cache below HOME; kept, a restart is minutes shorter.
      value: {{ .Values.weights.mountPath | quote }}
    - name: HF_HOME
      value: {{ .Values.weights.mountPath | quote }}
    - name: HF_HUB_OFFLINE
      # Everything is on the volume; the pod has no way out either.
      value: "1"
    - name: VLLM_CACHE_ROOT
      value: {{ printf "%s/.cache/vllm" .Values.weights.mountPath | quote }}
    - name: VLLM_NO_USAGE_STATS
      value: "1"
    {{- range $name, $value := .Values.env }}
    - name: {{ $name }}
      value: {{ $value | quote }}
    {{- end }}
    ports:
    - name: http
      containerPort: 8000
      protocol: TCP
    # Started means: one token was generated, so weights, graphs and kernels are there. A
    # probe waits for it for 25 s, which is why they are counted by that.
    startupProbe:
      exec:
        command:
        - /probe/llmbox
        - internal
        - token-probe
        - --url
        - http://127.0.0.1:8000
        - --model
        - {{ include "vllm.servedName" . | quote }}
        - --timeout=25s
        - --every=500ms
      periodSeconds: 1
      timeoutSeconds: 30
      failureThreshold: {{ div (add (int .Values.startup.budgetSeconds) 24) 25 }}
    readinessProbe:
      httpGet:
        path: /health
        port: http
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: 3
    # Slow to act: a long prefill must not look like a dead engine.
    livenessProbe:
      httpGet:
        path: /health
        port: http
      periodSeconds: 15
      timeoutSeconds: 10
      failureThreshold: 8
    {{- if gt (int .Values.drain.preStopSeconds) 0 }}
    lifecycle:
      preStop:
        sleep:
          seconds: {{ .Values.drain.preStopSeconds }}
    {{- end }}
    securityContext:
      {{- include "vllm.containerSecurity" . | nindent 6 }}
      readOnlyRootFilesystem: {{ .Values.readOnlyRootFilesystem }}
    resources:
      requests:
        cpu: {{ .Values.resources.cpuRequestMillis }}m
        memory: {{ .Values.resources.memoryRequestMiB }}Mi
        {{ .Values.gpu.resource }}: {{ .Values.tensorParallel | quote }}
      limits:
        memory: {{ .Values.resources.memoryLimitMiB }}Mi
        {{ .Values.gpu.resource }}: {{ .Values.tensorParallel | quote }}
    volumeMounts:
    - name: hf-cache
      mountPath: {{ .Values.weights.mountPath }}
    - name: shm
      mountPath: /dev/shm
    - name: tmp
      mountPath: /tmp
    - name: probe
      mountPath: /probe
      readOnly: true
  volumes:
  - name: hf-cache
    persistentVolumeClaim:
      claimName: hf-cache
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ .Values.sharedMemoryMiB }}Mi
  - name: tmp
    emptyDir: {}
  - name: probe
    emptyDir:
      sizeLimit: 1Gi
{{- end }}
