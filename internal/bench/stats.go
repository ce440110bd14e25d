package bench

import (
	"math"
	"slices"
	"time"
)

// Spread says how times are spread, in milliseconds.
type Spread struct {
	P50 float64 `json:"p50"`
	P90 float64 `json:"p90"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

// Why a level ended.
const (
	// EndedRequests: all its requests were made.
	EndedRequests = "requests"
	// EndedTime: its time was up before that.
	EndedTime = "time"
	// EndedInterrupted: the run was stopped.
	EndedInterrupted = "interrupted"
)

// How tokens were counted.
const (
	// CountedByUsage: the server said how many.
	CountedByUsage = "usage"
	// CountedByChunks: each piece of the stream counts as one token.
	CountedByChunks = "chunks"
	// CountedMixed: some of each.
	CountedMixed = "mixed"
)

// Level is what was measured with one number of requests at once. All figures but
// Requests, Failed and Abandoned are of the requests that succeeded.
type Level struct {
	Concurrency int `json:"concurrency"`
	// Requests is how many were made, Abandoned how many the end of the run cut off.
	Requests  int             `json:"requests"`
	Succeeded int             `json:"succeeded"`
	Failed    map[Failure]int `json:"failed"`
	Abandoned int             `json:"abandoned"`
	Ended     string          `json:"ended"`
	// Seconds is from the first request's beginning to the end of the last that succeeded.
	Seconds float64 `json:"seconds"`
	// CountedBy is how tokens were counted; empty if none was.
	CountedBy    string `json:"counted_by"`
	OutputTokens int64  `json:"output_tokens"`
	Chunks       int64  `json:"chunks"`
	// PromptTokens is the mean as the server counts; 0 if it does not.
	PromptTokens float64 `json:"prompt_tokens_mean"`
	// FirstToken is from sending a request to the first piece of its answer.
	FirstToken Spread `json:"first_token_ms"`
	// BetweenChunks are the gaps between pieces.
	BetweenChunks Spread `json:"between_chunks_ms"`
	// TokensPerSecond is of all requests together, PerRequest the mean of each one's rate
	// after its first token; 0 if no answer had a second one.
	TokensPerSecond float64 `json:"tokens_per_second"`
	PerRequest      float64 `json:"tokens_per_second_per_request"`
}

// failures is how many requests failed.
func (l Level) failures() int {
	sum := 0
	for _, n := range l.Failed {
		sum += n
	}
	return sum
}

// summarise makes a level's figures.
func summarise(concurrency int, all []request) Level {
	l := Level{Concurrency: concurrency, Requests: len(all), Failed: map[Failure]int{}}
	var firsts, gaps []time.Duration
	var began, finish time.Time
	var rates []float64
	var prompts, counted, byUsage int64
	for _, r := range all {
		if began.IsZero() || r.began.Before(began) {
			began = r.began
		}
		switch {
		case r.cut:
			l.Abandoned++
			continue
		case r.kind != "":
			l.Failed[r.kind]++
			continue
		}
		l.Succeeded++
		if r.finish.After(finish) {
			finish = r.finish
		}
		firsts = append(firsts, r.first)
		gaps = append(gaps, r.gaps...)
		l.OutputTokens += r.tokens
		l.Chunks += int64(r.chunks)
		if counted++; r.fromUsage {
			byUsage++
			prompts += r.prompt
		}
		if seconds := r.answered.Seconds(); seconds > 0 && r.tokens > 1 {
			rates = append(rates, float64(r.tokens-1)/seconds)
		}
	}
	if l.Succeeded == 0 {
		return l
	}
	switch byUsage {
	case counted:
		l.CountedBy = CountedByUsage
	case 0:
		l.CountedBy = CountedByChunks
	default:
		l.CountedBy = CountedMixed
	}
	if byUsage > 0 {
		l.PromptTokens = hundredth(float64(prompts) / float64(byUsage))
	}
	seconds := finish.Sub(began).Seconds()
	l.Seconds = hundredth(seconds)
	if seconds > 0 {
		l.TokensPerSecond = hundredth(float64(l.OutputTokens) / seconds)
	}
	for _, rate := range rates {
		l.PerRequest += rate / float64(len(rates))
	}
	l.PerRequest = hundredth(l.PerRequest)
	l.FirstToken, l.BetweenChunks = spread(firsts), spread(gaps)
	return l
}

// spread sorts times and reads off their percentiles: the smallest value that so many of
// a hundred don't exceed (nearest rank), always one that was measured.
func spread(times []time.Duration) Spread {
	if len(times) == 0 {
		return Spread{}
	}
	slices.Sort(times)
	at := func(percent int) float64 {
		rank := (len(times)*percent + 99) / 100
		return hundredth(times[max(rank, 1)-1].Seconds() * 1e3)
	}
	return Spread{P50: at(50), P90: at(90), P99: at(99), Max: at(100)}
}

func hundredth(x float64) float64 { return math.Round(x*100) / 100 }
