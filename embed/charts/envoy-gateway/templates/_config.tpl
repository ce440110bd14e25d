{{/* The EnvoyGateway document; also hashed into the Deployment's pod template. */}}
{{- define "envoy-gateway.config" -}}
apiVersion: gateway.envoyproxy.io/v1alpha1
kind: EnvoyGateway
gateway:
  controllerName: {{ .Values.controllerName }}
logging:
  level:
    default: {{ .Values.controller.logLevel }}
provider:
  type: Kubernetes
  kubernetes:
    watch:
      type: Namespaces
      namespaces:
      {{- range include "envoy-gateway.watched" . | fromJsonArray }}
      - {{ . }}
      {{- end }}
    leaderElection:
      # One replica, replaced by Recreate: a lease would only add writes to the datastore.
      disable: true
    proxyTopologyInjector:
      # Zone-aware routing has nothing to tell on one node, and costs an admission webhook.
      disabled: true
    shutdownManager:
      image: {{ .Values.images.gateway }}
envoyProxy:
  # What a Gateway of a foreign class would get; ours has the EnvoyProxy "llmbox".
  provider:
    type: Kubernetes
    kubernetes:
      envoyDeployment:
        container:
          image: {{ .Values.images.envoy }}
{{- end }}
