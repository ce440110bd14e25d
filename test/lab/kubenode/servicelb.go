package kubenode

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
)

// ServiceLB is servicelb-standin: Services of type LoadBalancer get the node's
// address, as k3s's own controller gives it. kube-proxy does the rest.
func ServiceLB(ctx context.Context, config *rest.Config, address string) error {
	core, err := corev1client.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	for {
		list, err := core.Services(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
		if err == nil {
			for _, s := range list.Items {
				has := s.Status.LoadBalancer.Ingress
				if s.Spec.Type != corev1.ServiceTypeLoadBalancer || len(has) == 1 && has[0].IP == address {
					continue
				}
				s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: address}}
				// A conflict or an error comes round again in a second.
				_, _ = core.Services(s.Namespace).UpdateStatus(ctx, &s, metav1.UpdateOptions{})
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Second):
		}
	}
}
