// Command http-standin takes the place of a program that can't be built here and that
// others only need to be up: it listens where its image says, calls itself healthy on
// every path, and has one metric, which says that it is a stand-in.
//
// It ignores its arguments. HTTP_STANDIN_NAME and HTTP_STANDIN_LISTEN (addresses with
// commas between) are set by its image.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := serve(ctx, os.Getenv("HTTP_STANDIN_NAME"), strings.Split(os.Getenv("HTTP_STANDIN_LISTEN"), ","))
	stop()
	if err != nil {
		log.Fatal("http-standin: ", err)
	}
}

func serve(ctx context.Context, name string, addresses []string) error {
	mux := http.NewServeMux()
	mux.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4")
		_, _ = fmt.Fprintf(w, "# TYPE http_standin_info gauge\nhttp_standin_info{for=%q} 1\n", name)
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Llmbox-Stand-In", name)
		_, _ = fmt.Fprintf(w, "{\"stand_in_for\":%q}\n", name)
	})
	log.Printf("http-standin: in the place of %s, on %s", name, strings.Join(addresses, " and "))
	failed := make(chan error, len(addresses))
	for _, a := range addresses {
		server := &http.Server{Addr: a, Handler: mux, ReadHeaderTimeout: 10 * time.Second}
		go func() { failed <- server.ListenAndServe() }()
		defer func() { _ = server.Close() }()
	}
	select {
	case <-ctx.Done():
		return nil
	case err := <-failed:
		if errors.Is(err, http.ErrServerClosed) {
			return nil
		}
		return err
	}
}
