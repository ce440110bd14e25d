package cluster

import (
	"errors"
	"net/netip"
	"slices"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

func TestAPIServers(t *testing.T) {
	slice := func(name, service string, kind discoveryv1.AddressType, port int32, addresses ...string) *discoveryv1.EndpointSlice {
		s := &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
			AddressType: kind, Ports: []discoveryv1.EndpointPort{{Port: &port}, {}},
		}
		for _, a := range addresses {
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
		}
		return s
	}
	for _, tt := range []struct {
		name    string
		objects []runtime.Object
		want    []string
	}{
		{"one server", []runtime.Object{slice("kubernetes", "kubernetes", discoveryv1.AddressTypeIPv4, 6443, "10.0.0.5")}, []string{"10.0.0.5:6443"}},
		{"three, in no order", []runtime.Object{slice("kubernetes", "kubernetes", discoveryv1.AddressTypeIPv4, 8443, "10.0.0.7", "10.0.0.5", "10.0.0.6", "10.0.0.5")},
			[]string{"10.0.0.5:8443", "10.0.0.6:8443", "10.0.0.7:8443"}},
		{"both families", []runtime.Object{
			slice("kubernetes", "kubernetes", discoveryv1.AddressTypeIPv4, 6443, "10.0.0.5"),
			slice("kubernetes-v6", "kubernetes", discoveryv1.AddressTypeIPv6, 6443, "fd00::5"),
		}, []string{"10.0.0.5:6443", "[fd00::5]:6443"}},
		{"somebody else's", []runtime.Object{slice("web", "web", discoveryv1.AddressTypeIPv4, 80, "10.0.0.9")}, nil},
		{"a name", []runtime.Object{slice("kubernetes", "kubernetes", discoveryv1.AddressTypeFQDN, 6443, "api.example.com")}, nil},
		{"none", nil, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := &Client{Kube: fake.NewSimpleClientset(tt.objects...)}
			got, err := c.APIServers(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			var want []netip.AddrPort
			for _, s := range tt.want {
				want = append(want, netip.MustParseAddrPort(s))
			}
			if !slices.Equal(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
		})
	}
}

func TestAPIServersUnreadable(t *testing.T) {
	gr := schema.GroupResource{Group: "discovery.k8s.io", Resource: "endpointslices"}
	for _, tt := range []struct {
		name string
		err  error
		want error
	}{
		{"no right to read them", apierrors.NewForbidden(gr, "", errors.New("no")), nil},
		{"no such resource", apierrors.NewNotFound(gr, ""), nil},
		{"expired credentials", apierrors.NewUnauthorized("expired"), ErrUnauthorized},
	} {
		t.Run(tt.name, func(t *testing.T) {
			kube := fake.NewSimpleClientset()
			kube.PrependReactor("list", "endpointslices", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, tt.err })
			got, err := (&Client{Kube: kube}).APIServers(t.Context())
			if !errors.Is(err, tt.want) || len(got) > 0 {
				t.Errorf("got %v and %v, want the error %v", got, err, tt.want)
			}
		})
	}
}
