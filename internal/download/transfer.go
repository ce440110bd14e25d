package download

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// probeBytes are asked for before a file's size is known.
	probeBytes = 4 << 20
	// minPiece keeps requests from costing more than what they bring, maxPiece the
	// hash near to what arrives.
	minPiece, maxPiece = 4 << 20, 64 << 20
	// minSteal is the least that is worth a connection of its own, and stealAfter the
	// least time that it saves.
	minSteal   = 1 << 20
	stealAfter = time.Second
	// worthwhile is what a connection must bring for its failure not to count.
	worthwhile = 64 << 10
	// flushAfter bounds how long bytes that arrive slowly wait in a buffer.
	flushAfter = 100 * time.Millisecond
	// A connection gathers at most one part in gatherShare of a file before it writes, but
	// not less than leastGathered, and one part in noteShare may be written before that is
	// noted: with eight connections a kill costs less than 0.4 % of a file of 64 MiB.
	gatherShare, noteShare, leastGathered = 8192, 1024, 32 << 10
	// syncBytes and syncAfter are how much the crash of a machine can cost.
	syncBytes = 64 << 20
	syncAfter = 5 * time.Second
)

var (
	errComplete = errors.New("complete")
	errNothing  = errors.New("nothing left to take")
	// errAgain asks for another try at once; whoever returns it has changed something.
	errAgain = errors.New("once more")
)

// pass is one attempt at a whole file.
type pass struct {
	cancel  context.CancelCauseFunc
	spawn   func() // one more worker; under the lock
	err     error
	hasher  *hasher
	workers sync.WaitGroup
	active  int
	limit   int // of workers
	learned bool
	asked   []*source // that brought something

	barren int   // failures since anything worthwhile came
	fresh  int64 // bytes since

	sequence uint64
	unnoted  int64
	unsynced int64
}

// segment is a part of the file that a worker has under way.
type segment struct {
	at, end int64 // end -1: wherever the file ends
	start   int64
	began   time.Time
}

// slow says whether a second connection would be of use: bytes that are on their way
// to the first one when it loses half of its segment have come for nothing.
func (s *segment) slow(now time.Time) bool {
	elapsed := now.Sub(s.began)
	return elapsed > stealAfter && time.Duration(float64(elapsed)*float64(s.end-s.at)/float64(max(s.at-s.start, 1))) > stealAfter
}

func (j *job) used() []*source { return j.asked }

// runPass ends when every byte is in the part file and hashed, or with an error.
func (j *job) runPass(ctx context.Context) error {
	transferring, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	keeping, stop := context.WithCancelCause(ctx)
	defer stop(nil)

	j.mu.Lock()
	j.pass = &pass{cancel: cancel, limit: j.file.Connections}
	j.spawn = func() {
		j.active++
		j.workers.Go(func() { j.work(transferring) })
	}
	j.claimed = nil
	if j.single {
		j.limit = 1
	}
	j.hasher = newHasher(j.file.Digest.hash(), j.part, j.done.prefix(), func(b *[]byte) { j.c.buffers.Put(b) })
	j.mu.Unlock()

	var helpers sync.WaitGroup
	helpers.Go(func() {
		if err := j.hasher.run(keeping); err != nil && keeping.Err() == nil {
			j.stop(err)
			stop(err)
		}
	})
	var syncer sync.WaitGroup
	syncer.Go(func() { j.syncNowAndThen(keeping) })

	j.mu.Lock()
	j.spawn()
	j.mu.Unlock()
	j.workers.Wait()

	j.mu.Lock()
	err := j.err
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	size := j.size
	if left, open := j.done.gap(size); err == nil && (open || size < 0) {
		err = fmt.Errorf("bytes %d to %d were asked of nobody", left.start, left.end)
	}
	j.mu.Unlock()
	if err == nil {
		j.hasher.finish(size)
	} else {
		stop(err)
	}
	helpers.Wait()
	stop(nil)
	syncer.Wait()
	if err == nil {
		j.mu.Lock()
		if err = j.err; err == nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		j.mu.Unlock()
	}
	if err != nil {
		err = errors.Join(err, j.noteAll(ctx.Err() == nil))
	}
	return err
}

// stop ends the pass with an error: the first one counts.
func (j *job) stop(err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.err == nil {
		j.err = err
	}
	j.cancel(err)
}

func (j *job) work(ctx context.Context) {
	for {
		src, err := j.pick(ctx)
		if err == nil {
			err = j.turn(ctx, src)
		}
		if err != nil && !errors.Is(err, errComplete) && !errors.Is(err, errNothing) {
			j.stop(err)
		}
		if errors.Is(err, errNothing) {
			// The last ones may need help yet, or fail.
			err = sleep(ctx, stealAfter/2)
		}
		j.mu.Lock()
		leave := err != nil || j.active > j.limit
		if leave {
			j.active--
		}
		j.mu.Unlock()
		if leave {
			return
		}
	}
}

// turn brings one segment. An error ends the worker, and the pass unless it is
// errComplete or errNothing.
func (j *job) turn(ctx context.Context, src *source) error {
	select {
	case j.c.slots <- struct{}{}:
		defer func() { <-j.c.slots }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	seg := j.claim()
	if seg == nil {
		return j.nothing()
	}
	began := time.Now()
	got, err := j.transfer(ctx, src, seg)
	j.mu.Lock()
	j.claimed = slices.DeleteFunc(j.claimed, func(s *segment) bool { return s == seg })
	j.mu.Unlock()
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err == nil:
		return nil
	}
	return j.failed(src, began, got, err)
}

// nothing is left to take: either everything is there, or others are at it.
func (j *job) nothing() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.claimed) > 0 {
		return errNothing
	}
	j.cancel(errComplete)
	return errComplete
}

// pick chooses whom to ask: the first mirror that is not to be left alone for now.
func (j *job) pick(ctx context.Context) (*source, error) {
	for {
		j.mu.Lock()
		var best *source
		now := time.Now()
		for _, src := range j.usable() {
			if best == nil || src.barred.Before(best.barred) && best.barred.After(now) {
				best = src
			}
		}
		if best == nil {
			defer j.mu.Unlock()
			return nil, j.deadError()
		}
		wait := best.barred.Sub(now)
		j.mu.Unlock()
		if wait <= 0 {
			return best, nil
		}
		if err := sleep(ctx, wait); err != nil {
			return nil, err
		}
	}
}

// candidates are the sources whose bytes may be put together: all, if a digest judges
// the result; the caller holds the lock.
func (j *job) candidates() []*source {
	if j.file.Digest == (Digest{}) {
		return j.sources[:1]
	}
	if j.exclusive != nil && j.exclusive.dead == nil {
		return []*source{j.exclusive}
	}
	return j.sources
}

// usable are those that can be asked now; the caller holds the lock.
func (j *job) usable() []*source {
	var out []*source
	for _, src := range j.candidates() {
		if src.dead == nil && (j.single || !src.noRange) {
			out = append(out, src)
		}
	}
	return out
}

// claim takes the first part of the file that nobody has, or half of the largest one
// under way.
func (j *job) claim() *segment {
	j.mu.Lock()
	defer j.mu.Unlock()
	taken := slices.Clone(j.done)
	for _, seg := range j.claimed {
		if seg.end < 0 {
			return nil
		}
		taken = taken.add(span{seg.at, seg.end})
	}
	var seg *segment
	if gap, ok := taken.gap(j.size); ok {
		seg = &segment{at: gap.start, end: gap.end}
		if !j.single {
			if end := seg.at + j.piece(); seg.end < 0 || end < seg.end {
				seg.end = end
			}
		}
	} else if seg = j.steal(); seg == nil {
		return nil
	}
	seg.start, seg.began = seg.at, time.Now()
	j.claimed = append(j.claimed, seg)
	return seg
}

func (j *job) piece() int64 {
	size := max(j.size, j.file.Size)
	if size <= 0 {
		return probeBytes
	}
	return min(max(size/int64(2*j.file.Connections), minPiece), maxPiece)
}

func (j *job) steal() *segment {
	now := time.Now()
	var victim *segment
	for _, seg := range j.claimed {
		if seg.slow(now) && (victim == nil || seg.end-seg.at > victim.end-victim.at) {
			victim = seg
		}
	}
	if j.single || victim == nil || victim.end-victim.at < 2*minSteal {
		return nil
	}
	seg := &segment{at: victim.at + (victim.end-victim.at)/2, end: victim.end}
	victim.end = seg.at
	return seg
}

// failed takes note of a failure; an error ends the pass.
func (j *job) failed(src *source, began time.Time, got int64, err error) error {
	j.mu.Lock()
	notice := Notice{URL: src.shown, Err: err}
	defer func() {
		if err != nil {
			j.notice(notice)
		}
	}()
	defer j.mu.Unlock()
	// Only what goes on here is worth a notice; the rest is told with the end.
	end := func(why error) error { err = nil; return why }
	switch {
	case errors.Is(err, errAgain):
		return end(nil)
	case is[diskError](err), is[*ChangedError](err), errors.Is(err, errStartOver), errors.Is(err, errSingle):
		return end(err)
	case is[*RangeError](err) && !is[unasked](err):
		src.noRange = true
		if len(j.usable()) == 0 {
			return end(errSingle)
		}
		return nil
	case final(err):
		src.dead = err
		if len(j.usable()) > 0 {
			return nil
		}
		if slices.ContainsFunc(j.candidates(), func(s *source) bool { return s.dead == nil }) {
			return end(errSingle)
		}
		return end(j.deadError())
	case j.file.Digest == (Digest{}) && src.condition() == "" && j.done.total() > 0:
		return end(errStartOver)
	}
	if got >= worthwhile {
		return nil
	}
	now := time.Now()
	if began.Before(src.bumped) { // one of several that failed together
		notice.Wait = max(src.barred.Sub(now), 0)
		return nil
	}
	if j.barren++; j.barren >= j.c.options.Tries*len(j.usable()) {
		return end(&RetryError{Tries: j.barren, Err: err})
	}
	src.failures++
	src.bumped = now
	notice.Wait = max(j.c.pause(src.failures), j.c.retryAfter(err, now))
	src.barred = now.Add(notice.Wait)
	var status *StatusError
	if errors.As(err, &status) && (status.Code == http.StatusTooManyRequests || status.Code == http.StatusServiceUnavailable) {
		j.limit = max(j.active/2, 1)
	}
	return nil
}

// transfer brings a segment from a source, and says how many bytes came.
func (j *job) transfer(ctx context.Context, src *source, seg *segment) (int64, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	a := j.ask(src, seg)
	resp, err := j.c.get(ctx, a.url, a.header, j.insecure)
	if err != nil {
		j.forget(src, a)
		return 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	skip, err := j.accept(src, seg, a, resp)
	if err != nil {
		return 0, err
	}
	return j.receive(src, seg, resp, skip)
}

// question is what a source is asked.
type question struct {
	url         *url.URL
	resolved    bool
	header      http.Header
	ranged      string
	conditional bool
	start, end  int64 // as asked
}

func (j *job) ask(src *source, seg *segment) question {
	j.mu.Lock()
	defer j.mu.Unlock()
	q := question{url: src.url, header: http.Header{"Accept-Encoding": {"identity"}}, start: seg.at, end: seg.end}
	if src.resolved != nil {
		q.url, q.resolved = src.resolved, true
	}
	if src.noRange || j.single && seg.at == 0 && (seg.end < 0 || seg.end == j.size) {
		return q
	}
	q.ranged = fmt.Sprintf("bytes=%d-", seg.at)
	if seg.end >= 0 {
		q.ranged += strconv.FormatInt(seg.end-1, 10)
	}
	q.header.Set("Range", q.ranged)
	if condition := src.condition(); condition != "" && !src.noCondition && !j.ignoreValidators {
		q.header.Set("If-Range", condition)
		q.conditional = true
	}
	return q
}

// forget drops the remembered end of a redirect: it may have been good for a while only.
func (j *job) forget(src *source, q question) {
	if q.resolved {
		j.mu.Lock()
		src.resolved = nil
		j.mu.Unlock()
	}
}

// accept judges the beginning of an answer: what to leave out of its body, or why it is
// of no use.
func (j *job) accept(src *source, seg *segment, q question, resp *http.Response) (skip int64, err error) {
	at := redact(resp.Request.URL)
	switch resp.StatusCode {
	case http.StatusOK, http.StatusPartialContent, http.StatusRequestedRangeNotSatisfiable:
	default:
		return 0, j.refused(src, q, resp)
	}
	if encoding := resp.Header.Get("Content-Encoding"); encoding != "" && encoding != "identity" {
		return 0, &EncodingError{URL: at, Encoding: encoding}
	}
	now := validator{ETag: resp.Header.Get("ETag"), Modified: resp.Header.Get("Last-Modified")}
	total, end := int64(-1), int64(-1)
	got := fmt.Sprintf("%d with Content-Range %q", resp.StatusCode, resp.Header.Get("Content-Range"))
	var wrong error = &RangeError{URL: at, Asked: q.ranged, Got: got}
	if q.ranged == "" {
		wrong = unasked{&RangeError{URL: at, Asked: "the whole file", Got: got}}
	}
	whole := resp.StatusCode == http.StatusOK
	switch resp.StatusCode {
	case http.StatusPartialContent:
		var start int64
		var ok bool
		if start, end, total, ok = contentRange(resp.Header.Get("Content-Range")); !ok || q.ranged == "" {
			return 0, wrong
		}
		length := resp.ContentLength
		if start != q.start || q.end >= 0 && end > q.end || length >= 0 && length != end-start {
			return 0, wrong
		}
	case http.StatusRequestedRangeNotSatisfiable:
		_, _, total, _ = contentRange(resp.Header.Get("Content-Range"))
		if q.start > 0 && total >= 0 && total <= q.start {
			return 0, &ChangedError{URL: at, Before: fmt.Sprintf("more than %d bytes", q.start), Now: fmt.Sprintf("%d bytes", total)}
		}
		if q.start > 0 || total != 0 {
			return 0, wrong
		}
		end = 0
	case http.StatusOK:
		total = resp.ContentLength
		if total < 0 && !slices.Contains(resp.TransferEncoding, "chunked") && j.file.Size == 0 && j.file.Digest == (Digest{}) {
			return 0, fmt.Errorf("%s: %w", at, ErrNoLength)
		}
	}
	if whole && q.ranged != "" {
		if q.conditional && src.differs(now) {
			return 0, &ChangedError{URL: at, Before: src.validator.String(), Now: now.String()}
		}
		if q.conditional && seg.at > 0 {
			j.mu.Lock()
			src.noCondition = true
			j.mu.Unlock()
			return 0, errAgain
		}
		j.mu.Lock()
		alone := !j.learned
		if alone {
			src.noRange = true
			j.single, j.limit = true, 1
			j.done = slices.Clip(spans(nil).add(span{0, j.done.prefix()}))
		}
		j.mu.Unlock()
		if !alone {
			return 0, wrong
		}
	}
	if whole && j.file.Digest == (Digest{}) && now.condition() == "" {
		j.mu.Lock()
		begun := len(j.done) > 0
		j.mu.Unlock()
		if begun {
			return 0, errStartOver
		}
	}
	if err := j.learn(src, now, total, at); err != nil {
		return 0, err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if final := resp.Request.URL; final.String() != src.url.String() && src.url.User == nil {
		src.resolved = final
	}
	if whole {
		skip = j.done.prefix()
		seg.at, seg.end = 0, total
		return skip, nil
	}
	if seg.end < 0 || end < seg.end {
		seg.end = end
	}
	return 0, nil
}

// refused turns a refusal into an error. Storage to which a redirect leads refuses
// when the redirect has grown old.
func (j *job) refused(src *source, q question, resp *http.Response) error {
	err := refusal(resp)
	if !final(err) {
		j.forget(src, q)
		return err
	}
	if q.resolved {
		j.forget(src, q)
		return errAgain
	}
	if origin(resp.Request.URL) == origin(src.url) {
		return err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if src.refused++; src.refused > 1 {
		return err
	}
	return retryable{err}
}

// contentRange reads "bytes START-LAST/TOTAL" and "bytes */TOTAL"; TOTAL may be "*".
func contentRange(text string) (start, end, total int64, ok bool) {
	unit, text, _ := strings.Cut(strings.TrimSpace(text), " ")
	part, whole, slash := strings.Cut(strings.TrimSpace(text), "/")
	if !strings.EqualFold(unit, "bytes") || !slash {
		return 0, 0, -1, false
	}
	number := func(text string) (int64, bool) {
		n, err := strconv.ParseUint(text, 10, 62)
		return int64(n), err == nil // #nosec G115 -- of 62 bits
	}
	total = -1
	if whole != "*" {
		if total, ok = number(whole); !ok {
			return 0, 0, -1, false
		}
	}
	if part == "*" {
		return 0, 0, total, false
	}
	first, last, dash := strings.Cut(part, "-")
	start, ok1 := number(first)
	end, ok2 := number(last)
	end++
	if !dash || !ok1 || !ok2 || end <= start || total >= 0 && end > total {
		return 0, 0, -1, false
	}
	return start, end, total, true
}

// learn compares what an answer says about the file with what is known, and makes
// ready for writing when it is the first.
func (j *job) learn(src *source, now validator, total int64, at string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if total >= 0 {
		if j.file.Size > 0 && total != j.file.Size {
			return &SizeError{URL: at, Want: j.file.Size, Got: total}
		}
		if n := len(j.done); n > 0 && total < j.done[n-1].end && j.size < 0 {
			return &ChangedError{URL: at, Before: fmt.Sprintf("%d bytes or more", j.done[n-1].end), Now: fmt.Sprintf("%d bytes", total)}
		}
		if j.size >= 0 && total != j.size {
			if j.sizeFrom != nil && j.sizeFrom != src {
				return &SizeError{URL: at, Want: j.size, Got: total}
			}
			return &ChangedError{URL: at, Before: fmt.Sprintf("%d bytes", j.size), Now: fmt.Sprintf("%d bytes", total)}
		}
	}
	if !j.ignoreValidators && src.differs(now) {
		return &ChangedError{URL: at, Before: src.validator.String(), Now: now.String()}
	}
	if !src.known() {
		src.validator = now
	}
	if j.size < 0 && total >= 0 {
		j.size, j.sizeFrom = total, src
	}
	if j.learned {
		return nil
	}
	if j.file.Digest == (Digest{}) && src.condition() == "" && !j.single {
		// Pieces of it could not be told from pieces of another file.
		src.noRange = true
		return errSingle
	}
	j.learned = true
	if j.size >= 0 {
		if err := reserve(j.part, j.file.Path, j.size); err != nil {
			return err
		}
	}
	if j.tiny() {
		return nil
	}
	if err := j.unrecorded(j.keep.save(j.state(), slices.Clone(j.done), j.sequence)); err != nil {
		return err
	}
	if !j.single && j.size >= 0 {
		pieces := (j.size - j.done.total() + minPiece - 1) / minPiece
		for range min(int64(j.limit), pieces) - 1 {
			j.spawn()
		}
	}
	return nil
}

// tiny says that the file is not worth a record, which takes the disk longer than the
// file the network.
func (j *job) tiny() bool { return j.size >= 0 && j.size < worthwhile }

// state is what the first line of the state file holds; the caller holds the lock.
func (j *job) state() state {
	s := state{Size: j.size, Digest: j.file.Digest.String(), Synced: slices.Clone(j.synced)}
	for _, src := range j.sources {
		if src.known() {
			s.Sources = append(s.Sources, sourceState{src.shown, src.validator})
		}
	}
	return s
}

// receive writes the body of an answer to its place.
func (j *job) receive(src *source, seg *segment, resp *http.Response, skip int64) (got int64, err error) {
	at := redact(resp.Request.URL)
	if skip > 0 {
		n, err := io.Copy(io.Discard, io.LimitReader(resp.Body, skip))
		j.mu.Lock()
		j.received += n
		j.mu.Unlock()
		if err == nil && n < skip {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return 0, broken(err, resp)
		}
		j.mu.Lock()
		seg.at = skip
		j.mu.Unlock()
	}
	pos := seg.at
	for {
		buffer, _ := j.c.buffers.Get().(*[]byte)
		n, readErr := j.fill(seg, pos, resp.Body, (*buffer)[:j.gather()])
		kept := false
		if n > 0 {
			if kept, err = j.store(src, seg, pos, buffer, n); err != nil {
				return got, err
			}
			pos, got = pos+int64(n), got+int64(n)
		}
		if !kept {
			j.c.buffers.Put(buffer)
		}
		end := j.endOf(seg)
		switch {
		case end >= 0 && pos >= end:
			return got, nil
		case errors.Is(readErr, io.EOF) && end < 0:
			return got, j.ends(pos, at)
		case errors.Is(readErr, io.EOF):
			return got, fmt.Errorf("receiving %s: %w", at, io.ErrUnexpectedEOF)
		case readErr != nil:
			return got, broken(readErr, resp)
		case end < 0 && j.file.Size > 0 && pos > j.file.Size:
			return got, &SizeError{URL: at, Want: j.file.Size, Got: pos}
		}
	}
}

// gather is how much a connection gathers before it writes: what a process that is killed
// loses must be small beside the file, too.
func (j *job) gather() int64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return min(max(j.size/gatherShare, leastGathered), bufferSize)
}

func (j *job) endOf(seg *segment) int64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return seg.end
}

// fill reads until the buffer is full, the segment ends or enough time has passed.
func (j *job) fill(seg *segment, pos int64, from io.Reader, buffer []byte) (n int, err error) {
	var began time.Time
	for {
		room := int64(len(buffer) - n)
		if end := j.endOf(seg); end >= 0 {
			room = min(room, end-pos-int64(n))
		}
		if room <= 0 {
			return n, nil
		}
		var m int
		m, err = from.Read(buffer[n : n+int(room)])
		n += m
		if err != nil {
			return n, err
		}
		if began.IsZero() {
			began = time.Now()
		} else if time.Since(began) > flushAfter {
			return n, nil
		}
	}
}

// store writes a buffer and notes that it is there. True: the hasher has the buffer now.
func (j *job) store(src *source, seg *segment, pos int64, buffer *[]byte, n int) (kept bool, err error) {
	if _, err := j.part.WriteAt((*buffer)[:n], pos); err != nil {
		j.mu.Lock()
		need := max(j.size, j.file.Size) - j.done.total()
		j.mu.Unlock()
		return false, space(err, j.part, j.file.Path, max(need, 0))
	}
	kept = j.hasher.offer(pos, buffer, n)
	j.mu.Lock()
	seg.at = pos + int64(n)
	j.done = j.done.add(span{pos, seg.at})
	if !slices.Contains(j.asked, src) {
		j.asked = append(j.asked, src)
	}
	if j.fresh += int64(n); j.fresh >= worthwhile {
		j.barren, j.fresh, src.failures, src.refused = 0, 0, 0, 0
	}
	j.hasher.advance(j.done.prefix())
	j.received += int64(n)
	j.unsynced += int64(n)
	j.unnoted += int64(n)
	var note spans
	if j.unnoted >= max(j.size/noteShare, leastGathered) {
		j.unnoted = 0
		j.sequence++
		note = slices.Clone(j.done)
	}
	sequence := j.sequence
	if j.size >= 0 && j.done.total() == j.size {
		j.cancel(errComplete) // wakes who has nothing to do
	}
	j.mu.Unlock()
	if note != nil {
		return kept, j.unrecorded(j.keep.note(note, sequence))
	}
	return kept, nil
}

// unrecorded judges that a record could not be written. On a full disk the file itself
// has its space, and the record before is as true as it was.
func (j *job) unrecorded(err error) error {
	if err == nil || errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return nil
	}
	return diskError{fmt.Errorf("recording what has arrived: %w", err)}
}

// ends says that a file of unknown length ends here.
func (j *job) ends(pos int64, at string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.file.Size > 0 && pos < j.file.Size {
		return fmt.Errorf("receiving %s: %w", at, io.ErrUnexpectedEOF)
	}
	j.size = pos
	j.cancel(errComplete)
	return nil
}

// syncNowAndThen makes what has arrived safe from the machine's crash.
func (j *job) syncNowAndThen(ctx context.Context) {
	ticker := time.NewTicker(progressEvery)
	defer ticker.Stop()
	last := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-ticker.C:
			j.mu.Lock()
			due := j.unsynced >= syncBytes || j.unsynced > 0 && now.Sub(last) >= syncAfter
			j.mu.Unlock()
			if !due {
				continue
			}
			if err := j.sync(); err != nil {
				j.stop(err)
				return
			}
			last = time.Now()
		}
	}
}

// sync brings the part file to the disk, and then writes down what of it is there.
func (j *job) sync() error {
	j.mu.Lock()
	s := j.state()
	s.Synced = slices.Clone(j.done)
	j.sequence++
	sequence := j.sequence
	j.unsynced = 0
	recorded := j.learned && !j.tiny()
	j.mu.Unlock()
	if !recorded {
		return nil
	}
	if err := unix.Fdatasync(int(j.part.Fd())); err != nil { // #nosec G115 -- a descriptor
		return space(err, j.part, j.file.Path, 0)
	}
	j.mu.Lock()
	j.synced = s.Synced
	j.mu.Unlock()
	return j.unrecorded(j.keep.save(s, s.Synced, sequence))
}

// noteAll writes down what has arrived when a pass ends early.
func (j *job) noteAll(sync bool) error {
	if sync {
		return j.sync()
	}
	j.mu.Lock()
	j.sequence++
	done, sequence := slices.Clone(j.done), j.sequence
	j.mu.Unlock()
	return j.unrecorded(j.keep.note(done, sequence))
}
