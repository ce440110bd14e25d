package main

import (
	"sync"
	"time"

	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
)

// buckets are the tokens that each route has left. Only a route's default bucket is
// known here, not those of single clients (descriptors).
type buckets struct {
	mu sync.Mutex
	of map[string]*bucket
}

type bucket struct {
	// What the bucket was made by; another limit is another bucket.
	most, fill uint32
	every      time.Duration

	tokens uint32
	filled time.Time
}

// take takes a token of a route's bucket, if there is one left at that time.
func (b *buckets) take(route string, limit *typev3.TokenBucket, now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	fill := uint32(1) // as Envoy where nothing is said
	if n := limit.GetTokensPerFill(); n != nil {
		fill = n.GetValue()
	}
	have := b.of[route]
	if have == nil || have.most != limit.GetMaxTokens() || have.fill != fill || have.every != limit.GetFillInterval().AsDuration() {
		have = &bucket{most: limit.GetMaxTokens(), fill: fill, every: limit.GetFillInterval().AsDuration(), tokens: limit.GetMaxTokens(), filled: now}
		if b.of == nil {
			b.of = map[string]*bucket{}
		}
		b.of[route] = have
	}
	for have.every > 0 && now.Sub(have.filled) >= have.every {
		have.filled = have.filled.Add(have.every)
		if have.tokens = min(have.most, have.tokens+have.fill); have.tokens == have.most {
			have.filled = now
		}
	}
	if have.tokens == 0 {
		return false
	}
	have.tokens--
	return true
}
