package report

import (
	"fmt"
	"strings"
	"time"

	"charm.land/bubbles/v2/help"
	"charm.land/bubbles/v2/key"
	"charm.land/bubbles/v2/viewport"
	tea "charm.land/bubbletea/v2"
	"charm.land/lipgloss/v2"
	"github.com/charmbracelet/x/ansi"
)

const (
	// wideAt is the width from which a row has room for a timeline of its own.
	wideAt = 110
	// narrowBelow is the width below which a row has no room for a reason; the
	// status line shows them in turn.
	narrowBelow = 60
	// turn is how long the status line of a narrow screen shows one reason.
	turn = 3 * time.Second
	// elapsedWidth fits 59m59s and 1:02:03.
	elapsedWidth = 7
)

// pane is what fills the screen below the list, or instead of it.
type pane int

const (
	noPane pane = iota
	logPane
	checksPane
	helpPane
)

// keys are the keys of the screen.
type keys struct {
	Quit, Kill, Suspend, Logs, Checks, Help, Up, Down, PageUp, PageDown, Top, Bottom, Back key.Binding
}

func newKeys(l look) keys {
	up, down := "↑", "↓"
	if l.ascii {
		up, down = "up", "dn"
	}
	bind := func(show, does string, on ...string) key.Binding {
		return key.NewBinding(key.WithKeys(on...), key.WithHelp(show, does))
	}
	return keys{
		Quit:     bind("q", "stop", "q"),
		Kill:     bind("ctrl+c", "stop; twice: at once", "ctrl+c"),
		Suspend:  bind("ctrl+z", "suspend", "ctrl+z"),
		Logs:     bind("l", "logs", "l"),
		Checks:   bind("c", "checks", "c"),
		Help:     bind("?", "help", "?", "h"),
		Up:       bind(up+"/"+down, "scroll", "up", "k"),
		Down:     bind(down, "down", "down", "j"),
		PageUp:   bind("pgup/pgdn", "scroll a page", "pgup", "b"),
		PageDown: bind("pgdn", "page down", "pgdown", "space"),
		Top:      bind("home/end", "oldest, newest", "home", "g"),
		Bottom:   bind("end", "newest", "end", "G"),
		Back:     bind("esc", "back to the list", "esc"),
	}
}

// ShortHelp implements help.KeyMap.
func (k keys) ShortHelp() []key.Binding {
	return []key.Binding{k.Quit, k.Logs, k.Checks, k.Help, k.Up}
}

// FullHelp implements help.KeyMap.
func (k keys) FullHelp() [][]key.Binding {
	return [][]key.Binding{
		{k.Logs, k.Checks, k.Back, k.Help, k.Up, k.PageUp, k.Top},
		{k.Quit, k.Kill, k.Suspend},
	}
}

// model is the Bubble Tea model: what the keyboard changed, over the board that
// the run changes.
type model struct {
	board *board
	title string
	look  look
	now   func() time.Time
	// interrupt asks the run to stop, suspend the process. Neither may block.
	interrupt, suspend func()
	hasKeys            bool

	width, height int
	frame         int
	pane          pane
	asked         int
	keys          keys
	help          help.Model
	view          viewport.Model
	// shown tells which content the viewport holds.
	shown contentKey
	// scrolled is set while the person reads the list by hand; top is its
	// first row then.
	scrolled bool
	top      int
}

type contentKey struct {
	pane  pane
	lines int
	width int
}

type tick struct{}

func newModel(b *board, l look, title string, now func() time.Time) *model {
	if title == "" {
		title = "llmbox"
	}
	m := &model{
		board: b, title: l.text(title), look: l, now: now,
		interrupt: func() {}, suspend: func() {},
		keys: newKeys(l), help: help.New(), view: viewport.New(),
	}
	m.help.Styles = help.Styles{
		Ellipsis: l.dim, ShortKey: l.strong, ShortDesc: l.dim, ShortSeparator: l.dim,
		FullKey: l.strong, FullDesc: l.dim, FullSeparator: l.dim,
	}
	m.help.ShortSeparator, m.help.Ellipsis = "  ", l.ellipsis
	return m
}

// Init implements tea.Model.
func (m *model) Init() tea.Cmd { return m.tick() }

func (m *model) tick() tea.Cmd {
	return tea.Tick(m.look.spinnerFPS, func(time.Time) tea.Msg { return tick{} })
}

// Update implements tea.Model.
func (m *model) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tick:
		m.frame++
		return m, m.tick()
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case tea.KeyPressMsg:
		m.key(msg)
	}
	return m, nil
}

func (m *model) key(msg tea.KeyPressMsg) {
	switch {
	case key.Matches(msg, m.keys.Kill):
		m.asked++
		m.interrupt()
	case key.Matches(msg, m.keys.Quit):
		// A second q is more likely a slip than a wish to stop in the middle of
		// a step; that takes Ctrl-C.
		if m.asked == 0 {
			m.asked++
			m.interrupt()
		}
	case key.Matches(msg, m.keys.Suspend):
		m.suspend()
	case key.Matches(msg, m.keys.Logs):
		m.toggle(logPane)
	case key.Matches(msg, m.keys.Checks):
		m.toggle(checksPane)
	case key.Matches(msg, m.keys.Help):
		m.toggle(helpPane)
	case key.Matches(msg, m.keys.Back):
		m.pane, m.scrolled, m.top = noPane, false, 0
	default:
		m.scroll(msg)
	}
}

func (m *model) toggle(p pane) {
	if m.pane == p {
		p = noPane
	}
	m.pane = p
	m.shown = contentKey{}
}

func (m *model) scroll(msg tea.KeyPressMsg) {
	if m.pane == noPane {
		m.scrollList(msg)
		return
	}
	switch {
	case key.Matches(msg, m.keys.Up):
		m.view.ScrollUp(1)
	case key.Matches(msg, m.keys.Down):
		m.view.ScrollDown(1)
	case key.Matches(msg, m.keys.PageUp):
		m.view.PageUp()
	case key.Matches(msg, m.keys.PageDown):
		m.view.PageDown()
	case key.Matches(msg, m.keys.Top):
		m.view.GotoTop()
	case key.Matches(msg, m.keys.Bottom):
		m.view.GotoBottom()
	}
}

// scrollList moves through a list that is too long for the screen; going past
// its end gives the choice of rows back to the screen.
func (m *model) scrollList(msg tea.KeyPressMsg) {
	page := max(m.height-6, 1)
	was := m.top
	switch {
	case key.Matches(msg, m.keys.Up):
		m.top--
	case key.Matches(msg, m.keys.Down):
		m.top++
	case key.Matches(msg, m.keys.PageUp):
		m.top -= page
	case key.Matches(msg, m.keys.PageDown):
		m.top += page
	case key.Matches(msg, m.keys.Top):
		m.top = 0
	case key.Matches(msg, m.keys.Bottom):
		m.scrolled, m.top = false, 0
		return
	default:
		return
	}
	if !m.scrolled {
		// The first touch shows the list from its top.
		m.scrolled, m.top = true, 0
	}
	if m.top = max(m.top, 0); m.top == 0 && was == 0 && key.Matches(msg, m.keys.Up) {
		m.scrolled = false
	}
}

// View implements tea.Model.
func (m *model) View() tea.View {
	m.board.mu.Lock()
	defer m.board.mu.Unlock()
	v := tea.NewView(m.draw())
	v.AltScreen = true
	v.WindowTitle = m.title
	return v
}

// draw lays the whole screen out: never more than height lines of width cells.
func (m *model) draw() string {
	w, h := m.width, m.height
	if w <= 0 || h <= 0 {
		return ""
	}
	t := m.board.t
	head := m.header(t, w, h)
	var foot []string
	switch {
	case h >= 16:
		foot = []string{"", m.status(t, w), m.footer(w)}
	case h >= 9:
		foot = []string{m.status(t, w), m.footer(w)}
	case h >= 5:
		foot = []string{m.status(t, w)}
	}
	lines := append(head, m.body(t, w, max(h-len(head)-len(foot), 0))...)
	for len(lines) < h-len(foot) {
		lines = append(lines, "")
	}
	lines = append(lines, foot...)
	lines = lines[:min(len(lines), h)]
	for i, line := range lines {
		if ansi.StringWidth(line) > w {
			lines[i] = m.look.cut(line, w)
		}
	}
	return strings.Join(lines, "\n")
}

// header is the title with the counts, and the bar.
func (m *model) header(t *Timeline, w, h int) []string {
	l := m.look
	over, _, _ := t.Counts()
	counts := fmt.Sprintf("%d/%d", over, len(t.Steps))
	if w >= 60 {
		counts = fmt.Sprintf("%d of %d done", over, len(t.Steps))
	}
	right := l.dim.Render(counts) + "  " + l.strong.Render(clock(t.Elapsed(m.now())))
	title := l.title.Render(m.title)
	if name := l.text(t.Name); name != "" && w >= 60 {
		title += "  " + l.dim.Render(name)
	}
	room := w - 2 - ansi.StringWidth(right)
	lines := []string{" " + l.fit(title, room-1) + " " + right}
	if room < 8 {
		lines[0] = " " + right
	}
	if h < 3 {
		return lines
	}
	lines = append(lines, " "+m.bar(t, w-2))
	if h >= 14 {
		lines = append(lines, "")
	}
	return lines
}

func (m *model) bar(t *Timeline, w int) string {
	l := m.look
	percent := fmt.Sprintf("%3.0f%%", 100*t.Fraction())
	barWidth := w - len(percent) - 1
	if barWidth < 4 {
		return l.cut(percent, w)
	}
	full := int(t.Fraction() * float64(barWidth))
	var b strings.Builder
	for _, c := range lipgloss.Blend1D(full, l.blend...) {
		b.WriteString(lipgloss.NewStyle().Foreground(c).Render(l.full))
	}
	return b.String() + l.dim.Render(strings.Repeat(l.empty, barWidth-full)) + " " + percent
}

// body is the list, a pane, or both where there is room.
func (m *model) body(t *Timeline, w, h int) []string {
	if h <= 0 {
		return nil
	}
	if m.pane == noPane {
		return m.list(t, w, h)
	}
	// The list keeps all its rows where the pane still gets a useful height.
	above := len(t.Steps) + 1
	if m.pane == helpPane || h-above < 8 {
		above = 0
	}
	var lines []string
	if above > 0 {
		lines = append(m.list(t, w, above-1), "")
	}
	return append(lines, m.paneLines(w, h-above)...)
}

func (m *model) paneLines(w, h int) []string {
	l := m.look
	name := map[pane]string{logPane: "logs", checksPane: "checks", helpPane: "keys"}[m.pane]
	rule := " " + strings.Repeat(l.rule, 2) + " " + name + " "
	lines := []string{l.dim.Render(l.cut(rule+strings.Repeat(l.rule, max(w-ansi.StringWidth(rule)-1, 0)), w))}
	if h <= 1 {
		return lines[:max(h, 0)]
	}
	inner := max(w-2, 1)
	m.view.SetWidth(inner)
	m.view.SetHeight(h - 1)
	want := contentKey{pane: m.pane, width: inner}
	var content []string
	switch m.pane {
	case logPane:
		want.lines = m.board.dropped + len(m.board.log)
	case checksPane:
		want.lines = len(m.board.t.Findings)
	case helpPane, noPane:
	}
	if want != m.shown || m.pane == helpPane {
		// A pane that showed its end goes on showing its end.
		follow := m.pane == logPane && (m.shown.pane != logPane || m.view.AtBottom())
		switch m.pane {
		case logPane:
			content = m.board.logLines(l, inner)
		case checksPane:
			content = m.board.findingsLines(l, inner)
		case helpPane, noPane:
			content = m.helpLines()
		}
		if m.shown.pane != m.pane {
			m.view.GotoTop()
		}
		m.view.SetContentLines(content)
		if follow {
			m.view.GotoBottom()
		}
		m.shown = want
	}
	for _, line := range strings.Split(m.view.View(), "\n") {
		lines = append(lines, " "+line)
	}
	return lines
}

func (m *model) helpLines() []string {
	l := m.look
	var lines []string
	for _, group := range m.keys.FullHelp() {
		for _, k := range group {
			lines = append(lines, l.strong.Render(l.fit(k.Help().Key, 10))+" "+l.dim.Render(k.Help().Desc))
		}
		lines = append(lines, "")
	}
	return lines
}

// status says what comes next, or that the run is stopping.
func (m *model) status(t *Timeline, w int) string {
	l := m.look
	switch {
	case t.Summary != nil:
		return " " + l.cut(t.headline(l, Meta{Title: m.title}), w-2)
	case m.asked > 1:
		return l.warn.Render(l.cut(" stopping now", w))
	case m.asked > 0:
		return l.warn.Render(l.cut(" stopping after this step "+l.dot+" Ctrl-C stops at once", w))
	}
	if w < narrowBelow {
		if line := m.reasonInTurn(t); line != "" {
			return " " + l.cut(line, w-2)
		}
	}
	_, running, failed := t.Counts()
	var parts []string
	if failed > 0 {
		parts = append(parts, l.bad.Render(fmt.Sprintf("%d failed", failed)))
	}
	if running > 0 {
		parts = append(parts, l.work.Render(fmt.Sprintf("%d running", running)))
	}
	if next := t.Next(); len(next) > 0 {
		var names []string
		for _, s := range next {
			names = append(names, l.text(s.Title))
		}
		parts = append(parts, l.dim.Render("next: ")+strings.Join(names, ", "))
	} else if t.Start.IsZero() {
		parts = append(parts, l.dim.Render("starting"))
	}
	return " " + l.cut(strings.Join(parts, l.dim.Render(" "+l.dot+" ")), w-2)
}

// reasonInTurn goes through what runs and says why it isn't done, one step at a
// time; once a round it leaves the line to what comes next.
func (m *model) reasonInTurn(t *Timeline) string {
	var reasons []string
	for _, s := range t.Steps {
		if _, reason := m.phaseAndReason(s); s.State == Running && reason != "" {
			reasons = append(reasons, m.look.work.Render(m.look.text(s.Title))+" "+reason)
		}
	}
	i := int(t.Elapsed(m.now())/turn) % (len(reasons) + 1)
	if i == len(reasons) {
		return ""
	}
	return reasons[i]
}

func (m *model) footer(w int) string {
	if !m.hasKeys {
		return m.look.dim.Render(m.look.cut(" Ctrl-C stops after this step", w))
	}
	m.help.SetWidth(w - 2)
	return " " + m.help.ShortHelpView(m.keys.ShortHelp())
}

// list shows the steps in at most h rows. Where they don't all fit, those that
// are over fold into one row first, then those still to come.
func (m *model) list(t *Timeline, w, h int) []string {
	if h <= 0 || len(t.Steps) == 0 {
		return nil
	}
	if len(t.Steps) > h && m.scrolled {
		m.top = min(m.top, len(t.Steps)-h)
		var lines []string
		for _, s := range t.Steps[m.top : m.top+h] {
			lines = append(lines, m.row(t, s, w))
		}
		return lines
	}
	l := m.look
	steps, over, later := t.Steps, 0, 0
	if len(steps) > h {
		steps, over, later = t.fold(h)
	}
	var lines []string
	if over > 0 {
		lines = append(lines, m.foldRow(Done, fmt.Sprintf("%d done", over), w))
	}
	spare := h - len(steps) - len(lines)
	if later > 0 {
		spare--
	}
	for _, s := range steps {
		more := m.extra(s, w, spare)
		spare -= len(more)
		switch {
		case len(more) > 0 && s.State == Running:
			phase, _ := m.phaseAndReason(s)
			lines = append(lines, m.rowWith(t, s, w, l.work.Render(phase)))
		case len(more) > 0:
			lines = append(lines, m.rowWith(t, s, w, ""))
		default:
			lines = append(lines, m.row(t, s, w))
		}
		lines = append(lines, more...)
	}
	if later > 0 {
		lines = append(lines, m.foldRow(Pending, fmt.Sprintf("%d more to come", later), w))
	}
	return lines[:min(len(lines), h)]
}

// fold picks the steps to show in h rows, the rows of the folds included.
func (t *Timeline) fold(h int) (show []*Step, over, later int) {
	for _, s := range t.Steps {
		if t.over(s) {
			over++
			continue
		}
		show = append(show, s)
	}
	if over > 0 {
		h--
	}
	if len(show) <= h {
		return show, over, 0
	}
	// What failed or runs is what matters: what is to come goes first.
	var active, pending []*Step
	for _, s := range show {
		if s.State == Pending {
			pending = append(pending, s)
		} else {
			active = append(active, s)
		}
	}
	h = max(h-1, 0)
	if len(active) >= h {
		return active[:h], over, len(active) - h + len(pending)
	}
	keep := h - len(active)
	later = len(pending) - keep
	show = show[:0]
	for _, s := range t.Steps {
		switch {
		case t.over(s):
		case s.State != Pending:
			show = append(show, s)
		case keep > 0:
			show = append(show, s)
			keep--
		}
	}
	return show, over, later
}

func (m *model) foldRow(s State, text string, w int) string {
	l := m.look
	return l.cut(" "+l.stateStyle(s).Render(l.glyphs[s])+" "+l.dim.Render(text), w)
}

func (m *model) glyph(s *Step) string {
	l := m.look
	g := l.glyphs[s.State]
	if s.State == Running && m.board.t.Summary == nil {
		g = l.spinner[m.frame%len(l.spinner)]
	}
	return l.stateStyle(s.State).Render(g)
}

// row is a step in one line: state, title, on a wide screen its place in time,
// what it is about, elapsed.
func (m *model) row(t *Timeline, s *Step, w int) string {
	return m.rowWith(t, s, w, m.detail(t, s, w))
}

func (m *model) rowWith(t *Timeline, s *Step, w int, detail string) string {
	l := m.look
	elapsed := l.dim.Render(m.elapsed(s))
	out := " " + m.glyph(s) + " "
	titleWidth := m.titleWidth(t, w)
	room := w - 3 - titleWidth - 2 - 2 - elapsedWidth - 1
	if w >= wideAt {
		room -= min(w/4, 60) + 2
	}
	if room < 5 {
		return l.cut(out+m.titleOf(s, max(w-3-1-elapsedWidth-1, 4))+" "+elapsed, w)
	}
	out += m.titleOf(s, titleWidth) + "  "
	if w >= wideAt {
		out += m.track(t, s, min(w/4, 60)) + "  "
	}
	return out + l.fit(detail, room) + "  " + elapsed
}

// titleWidth is that of the longest title, as long as it leaves room.
func (m *model) titleWidth(t *Timeline, w int) int {
	width := 0
	for _, s := range t.Steps {
		width = max(width, ansi.StringWidth(m.look.text(s.Title)))
	}
	if w < narrowBelow {
		return min(width, max(w-22, 8))
	}
	return min(width, w/3)
}

// extra is what a step has to say beyond its row, in at most room lines of its
// own: the whole reason of one at work, error and fix of one that failed.
func (m *model) extra(s *Step, w, room int) []string {
	l := m.look
	if room <= 0 {
		return nil
	}
	switch s.State {
	case Running:
		if _, reason := m.phaseAndReason(s); reason != "" {
			return []string{"   " + l.dim.Render(l.cut(reason, w-4))}
		}
	case Failed:
		msg, fix := s.Trouble()
		// The way out comes before the end of a long error.
		out := l.clip(l.labelled("   ", "fix  ", fix, w-2, true), min(3, room-1))
		return append(l.clip(l.labelled("   ", "error", msg, w-2, true), min(4, room-len(out))), out...)
	case Pending, Done, Skipped, Stopped:
	}
	return nil
}

// clip keeps the first n lines, and shows where it left some out.
func (l look) clip(lines []string, n int) []string {
	if n <= 0 {
		return nil
	}
	if len(lines) <= n {
		return lines
	}
	lines = lines[:n]
	lines[n-1] += l.ellipsis
	return lines
}

func (m *model) titleOf(s *Step, w int) string {
	l := m.look
	title := l.fit(l.text(s.Title), w)
	switch s.State {
	case Running, Failed:
		return l.strong.Render(title)
	case Pending, Skipped:
		return l.dim.Render(title)
	case Done, Stopped:
	}
	return title
}

func (m *model) elapsed(s *Step) string {
	d := s.Elapsed(m.now())
	switch {
	case s.Start.IsZero() || s.State == Skipped:
		return strings.Repeat(" ", elapsedWidth)
	case s.State == Running:
		return fmt.Sprintf("%*s", elapsedWidth, clock(d))
	}
	return fmt.Sprintf("%*s", elapsedWidth, short(d))
}

func (m *model) phaseAndReason(s *Step) (phase, reason string) {
	l := m.look
	reason = s.reason()
	if p := s.Current(); p != nil {
		phase = p.Name
		if r := p.reason(); r != "" {
			reason = r
		}
	}
	return l.text(phase), l.text(reason)
}

// detail is what there is to say about a step in the rest of its row.
func (m *model) detail(t *Timeline, s *Step, w int) string {
	l := m.look
	if w < narrowBelow {
		if s.State == Running {
			return l.work.Render(m.inShort(s))
		}
		return ""
	}
	switch s.State {
	case Running:
		phase, reason := m.phaseAndReason(s)
		if phase != "" && reason != "" {
			phase += "  "
		}
		return l.work.Render(phase) + reason
	case Failed:
		msg, _ := s.Trouble()
		return l.bad.Render(l.text(msg))
	case Pending:
		var needs []string
		for _, n := range t.WaitsFor(s) {
			needs = append(needs, l.text(n.Title))
		}
		if len(needs) > 0 {
			return l.dim.Render("after " + strings.Join(needs, ", "))
		}
	case Skipped, Stopped:
		return l.dim.Render(joinNonEmpty(": ", string(s.State), l.text(s.Message)))
	case Done:
		if _, simulated := s.Actors(); simulated {
			return l.dim.Render(joinNonEmpty(" "+l.dot+" ", "simulated", l.text(s.Message)))
		}
		return l.dim.Render(l.text(s.Message))
	}
	return ""
}

// inShort is a few letters about a step at work: how far it is, or its phase.
func (m *model) inShort(s *Step) string {
	span := &s.Span
	if p := s.Current(); p != nil {
		span = &p.Span
	}
	if span.Total > 0 {
		return fmt.Sprintf("%d%%", min(100*span.Done/span.Total, 100))
	}
	if span == &s.Span {
		return ""
	}
	return m.look.text(span.Name)
}

// track draws a step's place in the time so far.
func (m *model) track(t *Timeline, s *Step, w int) string {
	l := m.look
	total := t.Elapsed(m.now())
	if total <= 0 || s.Start.IsZero() || s.State == Skipped {
		return l.dim.Render(strings.Repeat(l.rail, w))
	}
	from, to := bar(s.Start.Sub(t.Start), s.Elapsed(m.now()), total, w)
	return l.dim.Render(strings.Repeat(l.rail, from)) +
		l.stateStyle(s.State).Render(strings.Repeat(l.bar, to-from)) +
		l.dim.Render(strings.Repeat(l.rail, w-to))
}
