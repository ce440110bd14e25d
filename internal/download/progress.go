package download

import (
	"context"
	"time"
)

const (
	progressEvery = 250 * time.Millisecond
	// rateWindow is what the rate is averaged over: pauses of a second do not show.
	rateWindow = 5 * time.Second
)

// Progress is how far a file is.
type Progress struct {
	// Done of Total bytes are there; Total is -1 while it is not known.
	Done, Total int64
	// Rate is in bytes a second, over the last seconds.
	Rate float64
	// Left is how long the rest takes at that rate; -1 while nobody can know.
	Left time.Duration
}

// meter turns a count of bytes into a rate.
type meter struct {
	at    time.Time
	bytes int64
	rate  float64
	begun bool
}

func (m *meter) add(now time.Time, bytes int64) float64 {
	if !m.begun {
		*m = meter{at: now, bytes: bytes, begun: true}
		return 0
	}
	elapsed := now.Sub(m.at)
	if elapsed <= 0 {
		return m.rate
	}
	current := float64(bytes-m.bytes) / elapsed.Seconds()
	weight := min(elapsed.Seconds()/rateWindow.Seconds(), 1)
	if m.rate == 0 {
		weight = 1
	}
	m.rate += weight * (current - m.rate)
	m.at, m.bytes = now, bytes
	return m.rate
}

// report calls tell from time to time until ctx ends, and then once more.
func (j *job) report(ctx context.Context, tell func(Progress)) {
	ticker := time.NewTicker(progressEvery)
	defer ticker.Stop()
	var m meter
	for {
		j.mu.Lock()
		p := Progress{Done: j.done.total(), Total: j.size, Left: -1}
		received := j.received
		j.mu.Unlock()
		if p.Total < 0 && j.file.Size > 0 {
			p.Total = j.file.Size
		}
		p.Rate = m.add(time.Now(), received)
		if p.Total >= 0 && p.Rate > 0 {
			p.Left = time.Duration(float64(p.Total-p.Done) / p.Rate * float64(time.Second))
		}
		tell(p)
		if ctx.Err() != nil {
			return
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
		}
	}
}
