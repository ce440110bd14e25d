// Package chromium drives a headless Chromium for tests: it opens a page the
// way a person would and reports what a person would not see, the messages on
// the console and the requests to the network.
package chromium

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

// ErrAbsent says that there is no browser on this machine.
var ErrAbsent = errors.New("no Chromium found: install the Debian package chromium (apt-get install chromium), or name a browser in CHROMIUM")

// Browser is a running browser.
type Browser struct {
	ctx   context.Context
	close []func()
}

// Start starts a browser. It lives until Close, or until ctx ends.
func Start(ctx context.Context) (*Browser, error) {
	path, err := find()
	if err != nil {
		return nil, err
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(path), chromedp.WSURLReadTimeout(time.Minute), chromedp.NoSandbox, chromedp.DisableGPU,
		chromedp.Flag("hide-scrollbars", false))
	alloc, stopAlloc := chromedp.NewExecAllocator(ctx, options...)
	tab, stopTab := chromedp.NewContext(alloc)
	if err := chromedp.Run(tab); err != nil {
		stopTab()
		stopAlloc()
		return nil, fmt.Errorf("starting %s: %w", path, err)
	}
	return &Browser{ctx: tab, close: []func(){stopTab, stopAlloc}}, nil
}

// Close ends the browser.
func (b *Browser) Close() {
	for _, f := range b.close {
		f()
	}
}

func find() (string, error) {
	if path := os.Getenv("CHROMIUM"); path != "" {
		return path, nil
	}
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", ErrAbsent
}

// Visit is what came of opening a page.
type Visit struct {
	// Console holds errors and warnings, exceptions included.
	Console []string
	// Requests holds every URL asked for, besides the page itself.
	Requests []string
	// ScrollWidth is the width of the content, ClientWidth that of the window.
	ScrollWidth, ClientWidth int64
	// PNG is the whole page.
	PNG []byte
}

// Size is the size of the window, and how the page is looked at.
type Size struct {
	Width, Height int64
	Mobile, Dark  bool
	// Print looks at the page as it would be printed.
	Print bool
}

// Open opens the file at path in a new tab and hands the tab's context to each
// look, for questions of its own.
func (b *Browser) Open(path string, size Size, looks ...func(context.Context) error) (*Visit, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("opening page: %w", err)
	}
	url := "file://" + abs
	tab, stop := chromedp.NewContext(b.ctx)
	defer stop()
	v := &Visit{}
	var mu sync.Mutex
	chromedp.ListenTarget(tab, func(e any) {
		mu.Lock()
		defer mu.Unlock()
		switch e := e.(type) {
		case *runtime.EventConsoleAPICalled:
			v.Console = append(v.Console, string(e.Type)+": "+args(e.Args))
		case *runtime.EventExceptionThrown:
			v.Console = append(v.Console, "exception: "+e.ExceptionDetails.Error())
		case *log.EventEntryAdded:
			v.Console = append(v.Console, string(e.Entry.Level)+": "+e.Entry.Text+" "+e.Entry.URL)
		case *network.EventRequestWillBeSent:
			if e.Request.URL != url {
				v.Requests = append(v.Requests, e.Request.URL)
			}
		}
	})
	scheme, medium := "light", "screen"
	if size.Dark {
		scheme = "dark"
	}
	if size.Print {
		medium = "print"
	}
	err = chromedp.Run(tab,
		network.Enable(), log.Enable(), runtime.Enable(), page.Enable(),
		emulation.SetDeviceMetricsOverride(size.Width, size.Height, 1, size.Mobile),
		emulation.SetEmulatedMedia().WithMedia(medium).
			WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}),
		chromedp.Navigate(url),
		chromedp.Evaluate(`document.documentElement.scrollWidth`, &v.ScrollWidth),
		chromedp.Evaluate(`document.documentElement.clientWidth`, &v.ClientWidth),
	)
	if err == nil {
		for _, look := range looks {
			if err = chromedp.Run(tab, chromedp.ActionFunc(look)); err != nil {
				break
			}
		}
	}
	if err == nil {
		err = chromedp.Run(tab, chromedp.FullScreenshot(&v.PNG, 100))
	}
	if err != nil {
		return nil, fmt.Errorf("opening page: %w", err)
	}
	mu.Lock()
	defer mu.Unlock()
	return v, nil
}

// Picture takes a picture of the element that selector names, in a page of this
// HTML, at one and a half times the size for sharp letters.
func (b *Browser) Picture(ctx context.Context, html, selector string) ([]byte, error) {
	dir, err := os.MkdirTemp("", "picture-")
	if err != nil {
		return nil, fmt.Errorf("taking picture: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	file := filepath.Join(dir, "page.html")
	if err := os.WriteFile(file, []byte(html), 0o600); err != nil {
		return nil, fmt.Errorf("taking picture: %w", err)
	}
	tab, stop := chromedp.NewContext(b.ctx)
	defer stop()
	var png []byte
	var clip page.Viewport
	err = chromedp.Run(tab,
		emulation.SetDeviceMetricsOverride(2400, 1600, 1, false),
		chromedp.Navigate("file://"+file),
		chromedp.Evaluate(`(({x, y, width, height}) => ({x, y, width, height, scale: 1.5}))(document.querySelector(`+
			strconv.Quote(selector)+`).getBoundingClientRect())`, &clip),
		chromedp.ActionFunc(func(ctx context.Context) error {
			var err error
			png, err = page.CaptureScreenshot().WithClip(&clip).Do(ctx)
			return err
		}),
	)
	if err != nil {
		return nil, fmt.Errorf("taking picture: %w", err)
	}
	return png, ctx.Err()
}

func args(objects []*runtime.RemoteObject) string {
	var out []string
	for _, o := range objects {
		out = append(out, string(o.Value))
	}
	return strings.Join(out, " ")
}
