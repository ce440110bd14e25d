// Command replay shows a recorded run again, at its own pace, through the same
// renderers that showed it first. It is how the screen is looked at while it is
// being worked on and how the pictures in docs/img are made; it must not be
// part of the product.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/llmbox-dev/llmbox/internal/event"
	"github.com/llmbox-dev/llmbox/internal/report"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "replay:", err)
		os.Exit(1)
	}
}

func run() error {
	speed := flag.Float64("speed", 1, "how many times faster than it was recorded; 0 means at once, with the recorded times")
	until := flag.Duration("until", 0, "show the run up to this point at once, then hold; 0 means play to the end")
	title := flag.String("title", "llmbox rehearse", "title of the screen")
	output := flag.String("output", "text", "text or json")
	html := flag.String("report", "", "write the HTML account to this file")
	boom := flag.Bool("panic", false, "panic half way, to see the terminal come back")
	flag.Parse()
	if flag.NArg() != 1 {
		return fmt.Errorf("usage: replay [flags] FILE.ndjson")
	}
	events, err := read(flag.Arg(0))
	if err != nil {
		return err
	}

	stop := make(chan struct{})
	var once sync.Once
	var asked int
	var mu sync.Mutex
	o := report.Options{
		Title: *title, Stdout: os.Stdout, Stderr: os.Stderr,
		Terminal: report.IsTerminal(os.Stdout), Getenv: os.Getenv, Format: report.Format(*output),
	}
	if keys := report.OpenKeys(); keys != nil {
		o.Keys = keys
	}
	// With -until the clock stands still, so that a picture taken twice is the
	// same picture.
	if *until > 0 {
		at := events[0].Time.Add(*until)
		o.Now = func() time.Time { return at }
	}
	var r report.Renderer
	o.Interrupt = func() {
		mu.Lock()
		asked++
		again := asked > 1
		mu.Unlock()
		once.Do(func() { close(stop) })
		if again {
			_ = r.Close()
			os.Exit(130)
		}
	}
	r = report.New(o)
	defer report.Rescue(r)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	if *until > 0 {
		// A held picture has no work to go on with once its window is gone.
		signal.Notify(signals, syscall.SIGHUP)
	}
	go func() {
		for range signals {
			o.Interrupt()
		}
	}()

	recorder := report.NewRecorder()
	sink := event.Fanout{r, recorder}
	start, first := time.Now(), events[0].Time
	interrupted := false
play:
	for i, e := range events {
		if *boom && i > len(events)/2 {
			panic("on purpose")
		}
		since := e.Time.Sub(first)
		switch {
		case *until > 0:
			if since > *until {
				<-stop
				interrupted = true
				break play
			}
		case *speed > 0:
			at := start.Add(time.Duration(float64(since) / *speed))
			select {
			case <-stop:
				interrupted = true
				break play
			case <-time.After(time.Until(at)):
			}
			e.Time = at
		}
		sink.Emit(e)
	}
	if interrupted {
		now := time.Now()
		if o.Now != nil {
			now = o.Now()
		}
		sink.Emit(event.Event{Time: now, Type: event.RunDone, Summary: &event.Summary{Outcome: "interrupted"}})
	}
	if err := r.Close(); err != nil {
		return err
	}
	if *html != "" {
		return report.WriteReport(*html, recorder.Timeline(), report.Meta{Title: *title})
	}
	return nil
}

func read(path string) ([]event.Event, error) {
	f, err := os.Open(filepath.Clean(path))
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	var events []event.Event
	err = report.ReadEvents(f, func(e event.Event) { events = append(events, e) })
	if err == nil && len(events) == 0 {
		err = fmt.Errorf("%s holds no event", path)
	}
	return events, err
}
