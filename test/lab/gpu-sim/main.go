// Command gpu-sim takes the place of NVIDIA's device plugin on a machine without a
// GPU: it offers kubelet so many nvidia.com/gpu and hands in nothing but the
// environment that the container toolkit would read.
//
// It knows no MIG, no time slicing and no health: every device is healthy.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	plugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	resource   = "nvidia.com/gpu"
	socketName = "llmbox-gpu-sim.sock"
)

func main() {
	count := flag.Int("count", 1, "GPUs to offer")
	dir := flag.String("dir", plugin.DevicePluginPath, "kubelet's `directory` of device plugins")
	// NVIDIA's own flags come in its image: the first unknown one must not end it.
	flag.CommandLine.Init("gpu-sim", flag.ContinueOnError)
	if err := flag.CommandLine.Parse(os.Args[1:]); err != nil {
		os.Exit(2)
	}
	if text := os.Getenv("GPU_SIM_COUNT"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil {
			log.Fatalf("GPU_SIM_COUNT: %v", err)
		}
		*count = n
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	for ctx.Err() == nil {
		if err := serve(ctx, *dir, *count); err != nil && ctx.Err() == nil {
			log.Printf("gpu-sim: %v; again in a second", err)
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}
}

// serve registers with kubelet and serves it until ctx ends or kubelet has started
// anew: it then forgets its plugins and removes their sockets.
func serve(ctx context.Context, dir string, count int) error {
	socket := filepath.Join(dir, socketName)
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing an old socket: %w", err)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		return fmt.Errorf("listening for kubelet: %w", err)
	}
	server := grpc.NewServer()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	plugin.RegisterDevicePluginServer(server, &devices{ctx: ctx, count: count})
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(l) }()
	defer server.Stop()
	if err := register(ctx, filepath.Join(dir, "kubelet.sock")); err != nil {
		return err
	}
	log.Printf("gpu-sim: kubelet knows of %d %s", count, resource)
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-ended:
			return fmt.Errorf("serving kubelet: %w", err)
		case <-time.After(500 * time.Millisecond):
			if _, err := os.Stat(socket); errors.Is(err, fs.ErrNotExist) {
				return errors.New("kubelet has started anew")
			}
		}
	}
}

func register(ctx context.Context, kubelet string) error {
	conn, err := grpc.NewClient("unix://"+kubelet, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("registering with kubelet: %w", err)
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	_, err = plugin.NewRegistrationClient(conn).Register(ctx, &plugin.RegisterRequest{
		Version: plugin.Version, Endpoint: socketName, ResourceName: resource,
		Options: &plugin.DevicePluginOptions{},
	})
	if err != nil {
		return fmt.Errorf("registering with kubelet: %w", err)
	}
	return nil
}

type devices struct {
	plugin.UnimplementedDevicePluginServer
	ctx   context.Context //nolint:containedctx // ends the stream when the server does
	count int
}

func (d *devices) GetDevicePluginOptions(context.Context, *plugin.Empty) (*plugin.DevicePluginOptions, error) {
	return &plugin.DevicePluginOptions{}, nil
}

func (d *devices) ListAndWatch(_ *plugin.Empty, stream grpc.ServerStreamingServer[plugin.ListAndWatchResponse]) error {
	answer := &plugin.ListAndWatchResponse{}
	for i := range d.count {
		answer.Devices = append(answer.Devices, &plugin.Device{ID: "GPU-SIM-" + strconv.Itoa(i), Health: plugin.Healthy})
	}
	if err := stream.Send(answer); err != nil {
		return err
	}
	select {
	case <-d.ctx.Done():
	case <-stream.Context().Done():
	}
	return nil
}

func (d *devices) Allocate(_ context.Context, r *plugin.AllocateRequest) (*plugin.AllocateResponse, error) {
	answer := &plugin.AllocateResponse{}
	for _, c := range r.ContainerRequests {
		answer.ContainerResponses = append(answer.ContainerResponses, &plugin.ContainerAllocateResponse{
			Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(c.DevicesIds, ",")},
		})
	}
	return answer, nil
}
