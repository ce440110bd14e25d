package main

import (
	"slices"

	"sigs.k8s.io/controller-tools/pkg/markers"
)

// group is a folder of CRDs that one component brings, and all that is needed
// to make them.
type group struct {
	// name is the folder under modules/ and, mostly, the last part of dir.
	name string
	// dir is where the files go, from the root of the source tree.
	dir     string
	sources []source
	options options
	// exclude lists kinds found in the packages that are not part of what
	// upstream installs, as CRD name -> reason.
	exclude map[string]string
	fixups  []fixup
}

// source is a Go module and the packages in it whose kinds are wanted.
type source struct {
	module, version string
	// paths are below the module's path.
	paths []string
	// shipped is where the module (or shippedIn, if that is another one) keeps
	// the YAML its own project generated: what ours is compared with in tests.
	shipped   []string
	shippedIn string
}

// options are controller-gen's, named as there. crdVersions is always v1 and
// maxDescLen always 0.
type options struct {
	allowDangerousTypes    bool
	ignoreUnexportedFields bool
	embeddedObjectMeta     bool
	// markers registers markers that only this project's generator knows.
	markers func(*markers.Registry) error
}

// packages are the import paths of all sources.
func (g group) packages() []string {
	var all []string
	for _, s := range g.sources {
		for _, p := range s.paths {
			all = append(all, s.module+"/"+p)
		}
	}
	slices.Sort(all)
	return all
}

// groups is the list that drives everything. A version is written here and in
// modules/NAME/go.mod; a test holds the two together.
func groups() []group {
	return []group{
		{
			name: "prometheus",
			dir:  "embed/crds/prometheus",
			sources: []source{{
				module:  "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring",
				version: "v0.95.2",
				// v1beta1 holds a second version of AlertmanagerConfig that
				// needs a conversion webhook; upstream's default set is without it.
				paths: []string{"v1", "v1alpha1"},
			}},
			fixups: prometheusFixups("0.95.2"),
		},
		{
			name: "gpu-operator",
			dir:  "embed/crds/gpu-operator",
			sources: []source{{
				module: "github.com/NVIDIA/gpu-operator",
				// The tree of release v25.3.4, whose tag is no Go version.
				version: "v0.0.0-20250917190837-d73a0086a6ba",
				paths:   []string{"api/nvidia/v1", "api/nvidia/v1alpha1"},
				shipped: []string{"config/crd/bases/*.yaml"},
			}},
		},
		{
			name: "nfd",
			dir:  "embed/crds/nfd",
			sources: []source{{
				module:    "sigs.k8s.io/node-feature-discovery/api/nfd",
				version:   "v0.17.3",
				paths:     []string{"v1alpha1"},
				shipped:   []string{"deployment/base/nfd-crds/nfd-api-crds.yaml"},
				shippedIn: "sigs.k8s.io/node-feature-discovery",
			}},
		},
		{
			name: "gateway-api",
			dir:  "embed/crds/gateway-api",
			sources: []source{{
				module: "sigs.k8s.io/gateway-api",
				// What Envoy Gateway 1.9.1 requires.
				version: "v1.6.1",
				paths:   []string{"apis/v1", "apis/v1alpha2", "apis/v1alpha3", "apis/v1beta1"},
				shipped: []string{"config/crd/standard/gateway.networking.k8s.io_*s.yaml", "config/crd/standard/gateway.networking.k8s.io_*es.yaml"},
			}},
			fixups: gatewayAPIFixups("v1.6.1"),
		},
		{
			name: "envoy-gateway",
			dir:  "embed/crds/envoy-gateway",
			sources: []source{{
				module:  "github.com/envoyproxy/gateway",
				version: "v1.9.1",
				paths:   []string{"api/v1alpha1"},
				shipped: []string{"charts/gateway-helm/charts/crds/crds/generated/*.yaml"},
			}},
			options: options{allowDangerousTypes: true},
		},
		{
			name: "keda",
			dir:  "embed/crds/keda",
			sources: []source{{
				module:  "github.com/kedacore/keda/v2",
				version: "v2.21.0",
				paths:   []string{"apis/eventing/v1alpha1", "apis/keda/v1alpha1"},
				shipped: []string{"config/crd/bases/*.yaml"},
			}},
			options: options{embeddedObjectMeta: true},
			exclude: map[string]string{
				"withtriggers.keda.sh": "a view that ScaledObject and ScaledJob share inside the operator; upstream deletes its file (Makefile, target manifests)",
			},
			fixups: kedaFixups(),
		},
		{
			name: "kyverno",
			dir:  "embed/crds/kyverno",
			sources: []source{
				{
					module:  "github.com/kyverno/kyverno",
					version: "v1.19.1",
					paths: []string{
						"api/kyverno/v1", "api/kyverno/v1beta1", "api/kyverno/v2", "api/kyverno/v2alpha1", "api/kyverno/v2beta1",
						"api/policyreport/v1alpha2", "api/reports/v1",
					},
					shipped: []string{"config/crds/*/*.yaml"},
				},
				{
					module: "github.com/kyverno/api",
					// What Kyverno 1.19.1 requires.
					version: "v0.0.1-alpha.3.0.20260723090831-fb2785727f98",
					paths:   []string{"api/policies.kyverno.io/v1", "api/policies.kyverno.io/v1alpha1", "api/policies.kyverno.io/v1beta1"},
				},
			},
			options: options{ignoreUnexportedFields: true, markers: registerKyvernoMarkers},
		},
		{
			name: "external-secrets",
			dir:  "embed/crds/external-secrets",
			sources: []source{{
				module: "github.com/external-secrets/external-secrets",
				// Not the release whose image is shipped; docs/crds.md says why.
				version: "v0.16.2",
				paths:   []string{"apis/externalsecrets/v1", "apis/externalsecrets/v1alpha1", "apis/externalsecrets/v1beta1", "apis/generators/v1alpha1"},
				shipped: []string{"config/crds/bases/*external-secrets.io_*.yaml"},
			}},
			fixups: externalSecretsFixups(),
		},
		{
			// k3s brings these itself; they are for clusters of tests that
			// have no k3s.
			name: "helm-controller",
			dir:  "test/lab/crds/helm-controller",
			sources: []source{{
				module:  "github.com/k3s-io/helm-controller",
				version: "v0.17.9",
				paths:   []string{"pkg/apis/helm.cattle.io/v1"},
				shipped: []string{"pkg/crds/yaml/generated/*.yaml"},
			}},
			options: options{embeddedObjectMeta: true},
		},
	}
}
