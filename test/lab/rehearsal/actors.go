package rehearsal

import (
	"context"
	"fmt"
	"os"
	"time"

	"k8s.io/client-go/rest"

	"github.com/llmbox-dev/llmbox/test/lab/actors"
)

// startActors runs the stand-ins for the product's own pods until ctx ends.
func startActors(ctx context.Context, o Options, config *rest.Config, egressSocket string, gatewayPort int) error {
	return actors.Start(ctx, actors.Options{
		Config:       config,
		EgressSocket: egressSocket,
		GatewayPort:  gatewayPort,
		GPUs:         o.GPUs,
		ProductName:  o.Product.Name,
		MemoryMiB:    o.Product.MemoryMiB,
		Log:          o.Log.With("from", "actors"),
	})
}

// untilServed waits until the actors have made their socket: before that, what
// the API server sends into the cluster fails.
func untilServed(ctx context.Context, egressSocket string) error {
	for {
		_, err := os.Stat(egressSocket)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for the actors: %w (last: %w)", context.Cause(ctx), err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}
