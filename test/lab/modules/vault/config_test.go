package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const whole = `ui = false
log_level = "info"
disable_mlock = true
cluster_name = "box"
api_addr = "http://127.0.0.1:8200"
storage "file" {
  path = "/data"
}
listener "tcp" {
  address = "127.0.0.1:8200"
  tls_disable = true
  telemetry {
    unauthenticated_metrics_access = true
  }
}
telemetry {
  prometheus_retention_time = "1h"
  disable_hostname = true
}
`

func TestLoad(t *testing.T) {
	for _, tt := range []struct{ name, from, to, problem string }{
		{"what a chart writes", "", "", ""},
		{"a setting that Vault does not know", "ui = false", "uii = false", "line 1: uii"},
		{"one in the listener", "tls_disable", "tls_disabled", "tls_disabled"},
		{"one in the telemetry", "disable_hostname", "hide_hostname", "hide_hostname"},
		{"a setting of Vault's that does not reach the core", `log_level = "info"`, `pid_file = "/tmp/pid"`, "line 2: pid_file"},
		{"a seal that nobody makes", `log_level = "info"`, `seal "awskms" {}`, "line 2: seal"},
		{"a setting twice", `log_level = "info"`, "log_level = \"info\"\nlog_level = \"warn\"", "twice"},
		{"memory to be locked", "disable_mlock = true", "disable_mlock = false", "disable_mlock"},
		{"pages for people", "ui = false", "ui = true", "ui must be false"},
		{"no storage", `storage "file"`, `listener "tcp"`, "unknown or unsupported field path"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "vault.hcl")
			if err := os.WriteFile(path, []byte(strings.Replace(whole, tt.from, tt.to, 1)), 0o600); err != nil {
				t.Fatal(err)
			}
			config, err := load([]string{path})
			switch {
			case tt.problem != "":
				if err == nil || !strings.Contains(err.Error(), tt.problem) {
					t.Errorf("the error is %v, want %q", err, tt.problem)
				}
			case err != nil:
				t.Error(err)
			case config.Storage.Type != "file" || config.ClusterName != "box" || !config.Listeners[0].Telemetry.UnauthenticatedMetricsAccess:
				t.Errorf("read %+v", config)
			}
		})
	}
}
