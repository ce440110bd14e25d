// Package rendered judges what the embedded charts render, all value combinations and the
// plan of a box: pod security by Kubernetes' own checks, requests and limits, the footprint
// beside upstream's charts, and the configuration of Envoy that Envoy Gateway's translator
// makes of it. It needs neither a cluster nor a container, and must not know either.
package rendered
