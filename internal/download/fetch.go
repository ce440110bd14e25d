package download

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	// maxChanges is how often a file may change under the download before validators
	// are taken for noise (with a digest) or the download fails (without).
	maxChanges = 3
	// maxCorrupt is how many wrong files one URL may send.
	maxCorrupt = 3
)

// File is one file to download.
type File struct {
	// URLs are mirrors of it, best first.
	URLs []string
	// Path is where it goes. Its directory must exist. TARGET.part and
	// TARGET.part.state are beside it meanwhile.
	Path string
	// Root, if set, is what Path is below and can't leave.
	Root *os.Root
	// Digest and Size are checked where they are known.
	Digest Digest
	Size   int64
	// Mode is 0644 where it is 0.
	Mode fs.FileMode
	// Connections bounds those of this file; 0: as many as the client has.
	Connections int
	// Progress is called from time to time and once at the end, Notice for each
	// failure that is tried again; never two calls at once. Both may be nil.
	Progress func(Progress)
	Notice   func(Notice)
}

// Result is a file that is complete.
type Result struct {
	Size int64
	// SHA256 is of its content; empty if another digest was asked for.
	SHA256 string
	// Present says that it was there before.
	Present bool
	// Received came over the network; Resumed was there from an earlier run.
	Received, Resumed int64
}

// Fetch makes the file complete at its path. However it ends, what is at the path is
// the whole, right file, or what was there before. When it is interrupted, what has
// arrived is kept for the next call.
func (c *Client) Fetch(ctx context.Context, f File) (Result, error) {
	result, err := c.fetch(ctx, f)
	if err != nil {
		return Result{}, fmt.Errorf("downloading %s: %w", f.Path, err)
	}
	return result, nil
}

func (c *Client) fetch(ctx context.Context, f File) (result Result, err error) {
	j, err := c.newJob(f)
	if err != nil {
		return Result{}, err
	}
	defer func() { err = errors.Join(err, j.dir.Close()) }()
	if err := j.lock(ctx); err != nil || j.present {
		return Result{Size: j.size, SHA256: j.sum(f.Digest.hex), Present: j.present}, err
	}
	// Closing the file gives the lock up, so it comes last.
	defer func() { err = errors.Join(err, j.part.Close()) }()
	if f.Progress != nil {
		reporting, stop := context.WithCancel(context.WithoutCancel(ctx))
		var reporter sync.WaitGroup
		reporter.Go(func() { j.report(reporting, j.quietly(f.Progress)) })
		defer func() { stop(); reporter.Wait() }()
	}
	if err := j.resume(); err != nil {
		return Result{}, err
	}
	resumed := j.done.total()
	if err := j.run(ctx); err != nil {
		return Result{}, errors.Join(err, j.leave())
	}
	return Result{Size: j.size, SHA256: j.sum(j.digest), Received: j.received, Resumed: resumed}, nil
}

// job is one call of Fetch.
type job struct {
	c        *Client
	file     File
	dir      *os.Root
	name     string
	insecure bool
	sources  []*source
	part     *os.File
	keep     *keeper
	present  bool
	digest   string // what was found
	telling  sync.Mutex

	// Between passes: how often what went wrong.
	changes, startOvers int
	seen                map[string]int // wrong digests
	exclusive           *source
	insisted            bool // something else was tried after changes
	ignoreValidators    bool
	given               []error // of sources that were given up

	mu       sync.Mutex
	size     int64   // -1: not known
	sizeFrom *source // who said so, in this run
	done     spans   // in the part file
	synced   spans   // of those, what survives the machine
	claimed  []*segment
	received int64
	single   bool // one connection after another
	*pass
}

func (c *Client) newJob(f File) (*job, error) {
	if err := f.Digest.check(); err != nil {
		return nil, err
	}
	if f.Mode == 0 {
		f.Mode = 0o644
	}
	j := &job{c: c, file: f, size: -1, seen: map[string]int{}, insecure: c.options.AllowHTTP || f.Digest.strong()}
	for _, text := range f.URLs {
		u, err := parseURL(text, j.insecure)
		if err != nil {
			return nil, err
		}
		j.sources = append(j.sources, &source{url: u, shown: redact(u)})
	}
	if len(j.sources) == 0 {
		return nil, errors.New("no URL")
	}
	if j.file.Connections <= 0 || j.file.Connections > c.options.Connections {
		j.file.Connections = c.options.Connections
	}
	j.single = j.file.Connections == 1
	var err error
	if f.Root != nil {
		if !fs.ValidPath(f.Path) || f.Path == "." {
			return nil, errors.New("not a path below its root")
		}
		j.dir, err = f.Root.OpenRoot(path.Dir(f.Path))
		j.name = path.Base(f.Path)
	} else {
		j.dir, err = os.OpenRoot(filepath.Dir(f.Path))
		j.name = filepath.Base(f.Path)
	}
	if err != nil {
		return nil, fmt.Errorf("opening the directory: %w", err)
	}
	j.keep = &keeper{dir: j.dir, name: j.name + ".part.state", boot: bootID()}
	return j, nil
}

func (j *job) partName() string { return j.name + ".part" }

// sum is a digest, if it is a SHA-256.
func (j *job) sum(text string) string {
	if j.file.Digest.algorithm == gitBlobName {
		return ""
	}
	return text
}

// quietly keeps callbacks from overlapping.
func (j *job) quietly(tell func(Progress)) func(Progress) {
	return func(p Progress) {
		j.telling.Lock()
		defer j.telling.Unlock()
		tell(p)
	}
}

func (j *job) notice(n Notice) {
	if j.file.Notice == nil {
		return
	}
	j.telling.Lock()
	defer j.telling.Unlock()
	j.file.Notice(n)
}

// lock makes the part file this job's own, unless the target is complete already.
func (j *job) lock(ctx context.Context) error {
	for waited := false; ; waited = true {
		present, length, err := verify(ctx, j.dir, j.name, j.file.Digest, j.file.Size)
		if err != nil {
			return err
		}
		if present {
			j.present, j.size = true, length
			return j.settle()
		}
		j.part, err = openPart(j.dir, j.partName())
		switch {
		case err == nil && waited:
			// It may have become complete between the look and the lock.
			if present, length, err = verify(ctx, j.dir, j.name, j.file.Digest, j.file.Size); err != nil || present {
				j.present, j.size = present, length
				return errors.Join(err, j.settle(), remove(j.dir, j.partName()), j.part.Close())
			}
			return nil
		case err == nil:
			return nil
		case !errors.Is(err, ErrBusy):
			return fmt.Errorf("opening the part file: %w", err)
		case !waited:
			j.notice(Notice{Err: ErrBusy})
		}
		if err := sleep(ctx, lockPause); err != nil {
			return err
		}
	}
}

// settle gives a file that was there the mode it should have.
func (j *job) settle() error {
	if !j.present {
		return nil
	}
	info, err := j.dir.Lstat(j.name)
	if err != nil || info.Mode().Perm() == j.file.Mode.Perm() {
		return err
	}
	return j.dir.Chmod(j.name, j.file.Mode.Perm())
}

// resume takes over what an earlier run has left.
func (j *job) resume() error {
	s, err := j.keep.load()
	if err != nil && !errors.Is(err, errState) {
		return fmt.Errorf("reading what an earlier run left: %w", err)
	}
	if err != nil || !j.fits(s) {
		return j.reset()
	}
	info, err := j.part.Stat()
	if err != nil {
		return err
	}
	trusted := s.trusted()
	if n := len(trusted); n > 0 && trusted[n-1].end > info.Size() {
		return j.reset()
	}
	j.size, j.done, j.synced = s.Size, trusted, s.Synced
	for _, known := range s.Sources {
		for _, src := range j.sources {
			if src.shown == known.URL {
				src.validator = known.validator
			}
		}
	}
	return nil
}

// fits says whether a state is of the file that is wanted.
func (j *job) fits(s state) bool {
	if s.Digest != j.file.Digest.String() || j.file.Size > 0 && s.Size >= 0 && s.Size != j.file.Size {
		return false
	}
	if j.file.Digest != (Digest{}) {
		return true
	}
	// Nothing will judge the result: it must be from the URL that is asked now.
	return len(s.Sources) == 1 && s.Sources[0].URL == j.sources[0].shown && s.Sources[0].condition() != ""
}

// reset throws away what has arrived.
func (j *job) reset() error {
	j.mu.Lock()
	j.size, j.sizeFrom, j.done, j.synced = -1, nil, nil, nil
	for _, src := range j.sources {
		src.validator = validator{}
	}
	j.mu.Unlock()
	if err := errors.Join(j.part.Truncate(0), j.keep.close(false)); err != nil {
		return diskError{fmt.Errorf("starting over: %w", err)}
	}
	return nil
}

// run tries until the file is complete or nothing is left to try.
func (j *job) run(ctx context.Context) error {
	for {
		err := j.runPass(ctx)
		if err == nil {
			if err = j.check(); err == nil {
				return j.finish()
			}
		}
		if err := j.judge(ctx, err); err != nil {
			return err
		}
	}
}

// judge decides what to do after a pass that failed: nil is another one.
func (j *job) judge(ctx context.Context, err error) error {
	var wrong *ChecksumError
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case is[diskError](err):
		return plain(err)
	case errors.Is(err, errSingle):
		j.mu.Lock()
		j.single = true
		j.done = slices.Clip(spans(nil).add(span{0, j.done.prefix()}))
		j.mu.Unlock()
		return nil
	case errors.As(err, &wrong):
		return j.suspect(wrong)
	case is[*ChangedError](err):
		if j.changes++; j.changes > maxChanges {
			if j.insisted {
				return errors.Join(err, j.reset())
			}
			j.insisted, j.changes = true, 0
			if j.file.Digest == (Digest{}) {
				// A single answer is of one piece, whatever it is called.
				j.single, j.sources[0].noRange = true, true
			} else {
				// Servers of one name that name the same file differently: the digest decides.
				j.ignoreValidators = true
			}
		}
	case errors.Is(err, errStartOver):
		if j.startOvers++; j.startOvers >= j.c.options.Tries {
			return errors.Join(&RetryError{Tries: j.startOvers, Err: err}, j.reset())
		}
	case j.file.Digest == (Digest{}) && len(j.sources) > 1:
		// One URL alone is used at a time: now the next, from the start.
		j.notice(Notice{URL: j.sources[0].shown, Err: err})
		j.given = append(j.given, err)
		j.sources = j.sources[1:]
		return j.reset()
	case len(j.given) > 0:
		return &MirrorsError{Errs: append(j.given, err)}
	default:
		return err
	}
	j.notice(Notice{Err: err})
	return j.reset()
}

// leave ends a download that failed: what has arrived stays, if anything has.
func (j *job) leave() error {
	empty := len(j.done) == 0 || j.tiny()
	err := j.keep.close(!empty)
	if empty {
		err = errors.Join(err, remove(j.dir, j.partName()))
	}
	return err
}

// suspect throws a wrong file away and decides who may try again, alone and with one
// connection at a time: a server that gets ranges wrong is the likeliest reason.
func (j *job) suspect(wrong *ChecksumError) error {
	if err := j.reset(); err != nil {
		return err
	}
	j.seen[wrong.Got]++
	if used := j.used(); len(used) == 1 {
		src := used[0]
		if src.corrupt++; j.seen[wrong.Got] > 1 || src.corrupt >= maxCorrupt {
			src.dead = wrong
		}
	}
	var next *source
	for _, src := range j.sources {
		if src.dead == nil && (next == nil || src.corrupt < next.corrupt) {
			next = src
		}
	}
	if next == nil {
		return j.deadError()
	}
	j.exclusive, j.single = next, true
	j.notice(Notice{URL: next.shown, Err: wrong})
	return nil
}

func (j *job) deadError() error {
	var errs []error
	for _, src := range j.sources {
		if src.dead != nil {
			errs = append(errs, src.dead)
		}
	}
	if len(errs) == 1 {
		return errs[0]
	}
	return &MirrorsError{Errs: errs}
}

// check compares size and digest of a file whose every byte is there.
func (j *job) check() error {
	from := j.sources[0].shown
	if used := j.used(); len(used) > 0 {
		names := make([]string, len(used))
		for i, src := range used {
			names[i] = src.shown
		}
		from = strings.Join(names, " and ")
	}
	j.digest = hex.EncodeToString(j.hasher.hash.Sum(nil))
	if j.file.Size > 0 && j.size != j.file.Size {
		return errors.Join(&SizeError{URL: from, Want: j.file.Size, Got: j.size}, j.reset())
	}
	return j.file.Digest.compare(j.hasher.hash, from)
}

// finish puts the file in place.
func (j *job) finish() error {
	info, err := j.part.Stat()
	if err == nil && info.Size() != j.size {
		err = j.part.Truncate(j.size)
	}
	if err == nil {
		err = j.part.Chmod(j.file.Mode.Perm())
	}
	if err == nil {
		err = j.part.Sync()
	}
	if err != nil {
		return plain(space(err, j.part, j.file.Path, 0))
	}
	if err := j.dir.Rename(j.partName(), j.name); err != nil {
		return fmt.Errorf("putting it in place: %w", err)
	}
	if err := errors.Join(j.keep.close(false), syncDir(j.dir)); err != nil {
		return fmt.Errorf("after it was put in place: %w", err)
	}
	return nil
}

// source is one URL of a file. Its fields are guarded by the job's mutex.
type source struct {
	url   *url.URL
	shown string
	// resolved is where a redirect led last.
	resolved *url.URL
	validator
	// noRange: it does not honour ranges; noCondition: it does not with an If-Range.
	noRange, noCondition bool
	// refused counts refusals by where it redirects to.
	refused int
	corrupt int
	dead    error

	failures int
	bumped   time.Time // when failures was counted last
	barred   time.Time // not before
}
