// Command picture turns a captured terminal screen (tmux capture-pane -e -p)
// into a PNG: it writes the cells out as HTML and has headless Chromium take
// the picture. It is how docs/img is made.
package main

import (
	"context"
	"flag"
	"fmt"
	"html"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"

	"github.com/llmbox-dev/llmbox/test/browser/chromium"
)

// palette is the 16 colours of the picture's terminal.
func palette() [16]string {
	return [16]string{
		"#1b2027", "#ff6b6b", "#5fd068", "#f2c14e", "#5aa9ff", "#c792ea", "#45c8d8", "#d5dbe3",
		"#5b6572", "#ff8a8a", "#86e58d", "#f7d67f", "#86c1ff", "#dbb0f5", "#7fe0ec", "#ffffff",
	}
}

type style struct {
	fg          string
	bold, faint bool
}

func (s style) css() string {
	var b strings.Builder
	if s.fg != "" {
		b.WriteString("color:" + s.fg + ";")
	}
	if s.bold {
		b.WriteString("font-weight:700;")
	}
	if s.faint {
		b.WriteString("opacity:.58;")
	}
	return b.String()
}

func main() {
	title := flag.String("title", "", "title of the window")
	flag.Parse()
	if flag.NArg() != 2 {
		fmt.Fprintln(os.Stderr, "usage: picture [-title T] SCREEN.ansi PICTURE.png")
		os.Exit(2)
	}
	if err := run(*title, flag.Arg(0), flag.Arg(1)); err != nil {
		fmt.Fprintln(os.Stderr, "picture:", err)
		os.Exit(1)
	}
}

func run(title, from, to string) error {
	raw, err := os.ReadFile(from) //nolint:gosec // the file named by whoever runs this
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	b, err := chromium.Start(ctx)
	if err != nil {
		return err
	}
	defer b.Close()
	png, err := b.Picture(ctx, page(title, strings.TrimRight(string(raw), "\n")), "#window")
	if err != nil {
		return err
	}
	return os.WriteFile(to, png, 0o644) //nolint:gosec // a picture for everybody
}

func page(title, screen string) string {
	var b strings.Builder
	b.WriteString(`<!doctype html><meta charset=utf-8><style>
body{margin:0;background:#fff}
#window{display:inline-block;background:#12161c;border-radius:10px;padding:0 16px 14px;color:#d5dbe3}
#bar{height:34px;display:flex;align-items:center;gap:7px;color:#7d8794;font:12px "DejaVu Sans",sans-serif}
#bar i{width:11px;height:11px;border-radius:50%;background:#39414d}
#bar span{flex:1;text-align:center;margin-right:47px}
pre{margin:0;font:14px/19px "JetBrains Mono","DejaVu Sans Mono",monospace;font-variant-ligatures:none}
pre b{font-weight:inherit;display:inline-block;width:1ch;overflow:hidden;height:19px;vertical-align:top;text-align:center}
</style><div id=window><div id=bar><i></i><i></i><i></i><span>` + html.EscapeString(title) + `</span></div><pre>`)
	var s style
	p := ansi.GetParser()
	defer ansi.PutParser(p)
	var state byte
	for len(screen) > 0 {
		seq, width, n, next := ansi.DecodeSequence(screen, state, p)
		switch {
		case ansi.HasCsiPrefix(seq):
			if p.Command() == 'm' {
				s = s.apply(p.Params())
			}
		case width > 0 && seq[0] < 0x80:
			fmt.Fprintf(&b, `<span style="%s">%s</span>`, s.css(), html.EscapeString(seq))
		case width > 0:
			// A glyph from another font must not push its line.
			fmt.Fprintf(&b, `<b style="%s">%s</b>`, s.css(), html.EscapeString(seq))
		case seq == "\n":
			b.WriteByte('\n')
		}
		state, screen = next, screen[n:]
	}
	b.WriteString("</pre></div>")
	return b.String()
}

func (s style) apply(params ansi.Params) style {
	colors := palette()
	at := func(i int) int {
		v, _, _ := params.Param(i, 0)
		return v
	}
	if len(params) == 0 {
		return style{}
	}
	for i := 0; i < len(params); i++ {
		switch v := at(i); {
		case v == 0:
			s = style{}
		case v == 1:
			s.bold = true
		case v == 2:
			s.faint = true
		case v == 22:
			s.bold, s.faint = false, false
		case v >= 30 && v <= 37:
			s.fg = colors[v-30]
		case v >= 90 && v <= 97:
			s.fg = colors[v-82]
		case v == 39:
			s.fg = ""
		case v == 38 && at(i+1) == 2:
			s.fg = fmt.Sprintf("#%02x%02x%02x", at(i+2), at(i+3), at(i+4))
			i += 4
		case v == 38 && at(i+1) == 5:
			s.fg = xterm(at(i+2), colors)
			i += 2
		}
	}
	return s
}

// xterm is the colour of the 256 colour palette.
func xterm(n int, colors [16]string) string {
	switch {
	case n < 16:
		return colors[n]
	case n >= 232:
		g := strconv.FormatInt(int64(8+10*(n-232)), 16)
		if len(g) < 2 {
			g = "0" + g
		}
		return "#" + g + g + g
	}
	n -= 16
	level := func(v int) int {
		if v == 0 {
			return 0
		}
		return 55 + 40*v
	}
	return fmt.Sprintf("#%02x%02x%02x", level(n/36), level(n/6%6), level(n%6))
}
