module github.com/llmbox-dev/llmbox/test/lab/modules/external-secrets

go 1.26.0

require github.com/external-secrets/external-secrets v0.16.2
replace github.com/Masterminds/sprig/v3 => github.com/external-secrets/sprig/v3 v3.3.0
