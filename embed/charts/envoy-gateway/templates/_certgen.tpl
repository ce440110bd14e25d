{{/* The Job's spec. A Job's pod template can't be changed, so its hash is part of the Job's
     name: another spec is another Job, the same spec stays the finished one. */}}
{{- define "envoy-gateway.certgenSpec" -}}
backoffLimit: 6
template:
  metadata:
    labels:
      {{- include "envoy-gateway.labels" "certgen" | nindent 6 }}
  spec:
    serviceAccountName: envoy-gateway-certgen
    automountServiceAccountToken: true
    enableServiceLinks: false
    restartPolicy: OnFailure
    securityContext:
      {{- include "envoy-gateway.podSecurity" . | nindent 6 }}
    containers:
    - name: certgen
      image: {{ .Values.images.gateway }}
      imagePullPolicy: IfNotPresent
      command:
      - envoy-gateway
      - certgen
      # Existing Secrets are left as they are.
      - --disable-topology-injector
      env:
        {{- include "envoy-gateway.env" . | nindent 8 }}
      resources:
        {{- toYaml .Values.certgen.resources | nindent 8 }}
      securityContext:
        {{- include "envoy-gateway.containerSecurity" . | nindent 8 }}
    {{- with .Values.tolerations }}
    tolerations:
      {{- toYaml . | nindent 6 }}
    {{- end }}
{{- end }}
