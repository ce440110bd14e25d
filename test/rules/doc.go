// Package rules proves what the charts tell Prometheus and Grafana: every alert fires when
// it must and is silent when it must not, by Prometheus' own promtool; every query of every
// dashboard parses; every metric that is read is one that something in a box exports, kept
// by the monitor that scrapes it. It renders a box's plan and must not know a cluster.
package rules
