package incluster

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/llmbox-dev/llmbox/internal/weights"
)

// sayEvery is how often a download says how far it is.
const sayEvery = 15 * time.Second

// Download fills a volume with a model's weights and says so, line by line.
func Download(ctx context.Context, out io.Writer, o weights.Options) error {
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(out, format+"\n", args...) }
	o.Notice = func(text string) { say("%s", text) }
	w, err := weights.Open(ctx, o)
	if err != nil {
		return err
	}
	defer w.Close()
	say("%s at %s: %d files, %s (%d left out)", o.Model, w.Commit, w.Files, size(w.Bytes), w.LeftOut)
	told := time.Now()
	err = w.Fetch(ctx, func(p weights.Progress) {
		if time.Since(told) >= sayEvery {
			told = time.Now()
			say("%s of %s at %s a second: %s", size(p.Done), size(p.Total), size(int64(p.Rate)), p.File)
		}
	})
	if err == nil {
		say("complete")
	}
	return err
}

func size(n int64) string { return fmt.Sprintf("%.2f GB", float64(n)/1e9) }
