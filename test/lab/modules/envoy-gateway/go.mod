module github.com/llmbox-dev/llmbox/test/lab/modules/envoy-gateway

go 1.26.7

require github.com/envoyproxy/gateway v1.9.1
