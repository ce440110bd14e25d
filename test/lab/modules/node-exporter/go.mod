module github.com/llmbox-dev/llmbox/test/lab/modules/node-exporter

go 1.26.0

require github.com/prometheus/node_exporter v1.12.1
