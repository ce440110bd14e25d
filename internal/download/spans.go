package download

import (
	"encoding/json"
	"fmt"
	"slices"
)

// span is the bytes from start up to, but without, end.
type span struct{ start, end int64 }

func (s span) MarshalJSON() ([]byte, error) { return json.Marshal([2]int64{s.start, s.end}) }

func (s *span) UnmarshalJSON(raw []byte) error {
	var pair []int64
	if err := json.Unmarshal(raw, &pair); err != nil {
		return err
	}
	if len(pair) != 2 {
		return fmt.Errorf("a range of %d numbers", len(pair))
	}
	s.start, s.end = pair[0], pair[1]
	return nil
}

// spans are in order, and neither touch nor overlap.
type spans []span

// valid says whether they are that, and within size.
func (s spans) valid(size int64) bool {
	at := int64(-1)
	for _, x := range s {
		if x.start <= at || x.end <= x.start || size >= 0 && x.end > size {
			return false
		}
		at = x.end
	}
	return true
}

// add returns the spans with one more.
func (s spans) add(x span) spans {
	if x.end <= x.start {
		return s
	}
	first, _ := slices.BinarySearchFunc(s, x.start, func(y span, start int64) int {
		if y.end < start {
			return -1
		}
		return 1
	})
	last := first
	for last < len(s) && s[last].start <= x.end {
		x = span{min(x.start, s[last].start), max(x.end, s[last].end)}
		last++
	}
	return slices.Replace(s, first, last, x)
}

// prefix is how far they reach from 0 without a gap.
func (s spans) prefix() int64 {
	if len(s) == 0 || s[0].start > 0 {
		return 0
	}
	return s[0].end
}

func (s spans) total() int64 {
	var n int64
	for _, x := range s {
		n += x.end - x.start
	}
	return n
}

// gap is the first one; it ends at size, or never (-1) where size is not known.
func (s spans) gap(size int64) (span, bool) {
	at := s.prefix()
	if size >= 0 && at >= size {
		return span{}, false
	}
	for _, x := range s {
		if x.start > at {
			return span{at, x.start}, true
		}
	}
	return span{at, size}, true
}
